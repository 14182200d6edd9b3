# SPDX-License-Identifier: MIT
import torch

BLOCK = 64  # elements that share a scale
_LARGEST = {"int8": 127, "int4": 7}
_BITS = {"int8": 7, "int4": 3}
_HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class Payload:
    """Numbers as lamina/payload.hpp writes and rounds them, by torch's operators: rows of float32, a multiple of 64 each, to rows of
    bytes. In a row of int8 or int4 the scales of all blocks come first. Scales are powers of two."""

    def __init__(self, name: str) -> None:
        self._name = name

    def bytes_of(self, elements: int) -> int:
        """Of a row."""
        return {"as_is": 4 * elements, "int8": elements // BLOCK + elements,
                "int4": elements // BLOCK + elements // 2}.get(self._name, 2 * elements)

    def encode(self, numbers: torch.Tensor) -> torch.Tensor:
        if self._name == "as_is":
            return numbers.contiguous().view(torch.uint8)
        if self._name in _HALVES:
            limits = torch.finfo(_HALVES[self._name])
            return numbers.clamp(limits.min, limits.max).to(_HALVES[self._name]).view(torch.uint8)
        most, blocks = _LARGEST[self._name], numbers.view(*numbers.shape[:-1], -1, BLOCK)
        largest = blocks.abs().amax(-1)
        # As biased exponents: the smallest with which the largest number fits, from 2^-120 to 2^120; 255 of what is not finite.
        exponents = ((largest.view(torch.int32) >> 23) - (_BITS[self._name] - 1)).clamp_(7, 247)
        exponents = exponents + (largest > _power_of_two(exponents) * most)
        exponents = exponents.clamp_(max=247).masked_fill_(~(largest < torch.inf), 255)
        integers = (blocks * _power_of_two((254 - exponents).clamp_(min=0)).unsqueeze(-1)).round_().clamp_(-most, most)
        integers = integers.to(torch.int8).view(numbers.shape).view(torch.uint8)
        if self._name == "int4":
            integers = (integers[..., 0::2] & 15) | (integers[..., 1::2] << 4)
        return torch.cat([exponents.to(torch.uint8), integers], -1)

    def decode(self, given: torch.Tensor) -> torch.Tensor:
        if self._name == "as_is":
            return given.view(torch.float32)
        if self._name in _HALVES:
            return given.view(_HALVES[self._name]).float()
        per_block = 1 + (BLOCK if self._name == "int8" else BLOCK // 2)
        count = given.shape[-1] // per_block
        scales = _power_of_two(given[..., :count].to(torch.int32))
        integers = given[..., count:]
        if self._name == "int4":
            both = integers.contiguous().view(torch.int8)
            integers = torch.stack([(both << 4) >> 4, both >> 4], -1).flatten(-2)
        else:
            integers = integers.contiguous().view(torch.int8)
        return (integers.view(*integers.shape[:-1], -1, BLOCK) * scales.unsqueeze(-1)).flatten(-2)


def _power_of_two(biased: torch.Tensor) -> torch.Tensor:
    return (biased << 23).view(torch.float32)
