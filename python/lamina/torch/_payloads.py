# SPDX-License-Identifier: MIT
from typing import Tuple

import torch

PAYLOADS = ("as_is", "float16", "bfloat16", "int8", "int4")
BLOCK = 64  # elements that share a scale
_BITS = {"int8": 7, "int4": 3}  # of a magnitude
_HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class Payload:
    """Numbers rounded as by lamina/payload.hpp, by torch's operators: rows of float32, a multiple of 64 each, to rows of bytes. Scales are
    powers of two, a byte for each block, before the integers; the lower half of an int4 byte has an element of the block's first half.
    Magnitudes beyond 2^120 are rounded otherwise than by C++."""

    def __init__(self, name: str) -> None:
        self._name = name

    def bytes_of(self, elements: int) -> int:
        """Of a row."""
        return {"as_is": 4 * elements, "int8": elements // BLOCK + elements,
                "int4": elements // BLOCK + elements // 2}.get(self._name, 2 * elements)

    def encode(self, numbers: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """The bytes, and the numbers that they say. What is not finite is so when it is read."""
        if self._name == "as_is":
            return numbers.contiguous().view(torch.uint8), numbers
        if self._name in _HALVES:
            limits = torch.finfo(_HALVES[self._name])
            halves = numbers.clamp(limits.min, limits.max).to(_HALVES[self._name])
            return halves.view(torch.uint8), halves.float()
        bits, blocks = _BITS[self._name], numbers.view(*numbers.shape[:-1], -1, BLOCK)
        largest = torch.linalg.vector_norm(blocks, torch.inf, dim=-1)
        # The exponent of the smallest scale with which the largest number fits, as float32 has it: one more where its mantissa is beyond
        # that of the largest integer. Not below 2^-120.
        exponents = ((largest.view(torch.int32) + ((1 << 24 - bits) - 1 - (bits - 1 << 23))) >> 23).clamp_(min=7)
        integers = (blocks * _power_of_two(254 - exponents).unsqueeze(-1)).round_()
        exponents = exponents.masked_fill_(~(largest < torch.inf), 255)
        said = (integers * _power_of_two(exponents).unsqueeze(-1)).view(numbers.shape)
        if self._name == "int4":
            first, second = integers.view(*integers.shape[:-1], 2, BLOCK // 2).unbind(-2)
            integers = torch.add(first, second, alpha=16)
        return torch.cat([exponents.to(torch.uint8), integers.to(torch.int8).flatten(-2).view(torch.uint8)], -1), said

    def decode(self, given: torch.Tensor) -> torch.Tensor:
        if self._name == "as_is":
            return given.view(torch.float32)
        if self._name in _HALVES:
            return given.view(_HALVES[self._name]).float()
        a_block = BLOCK if self._name == "int8" else BLOCK // 2
        count = given.shape[-1] // (1 + a_block)
        scales, integers = _power_of_two(given[..., :count].to(torch.int32)), given[..., count:].view(torch.int8)
        integers = integers.view(*integers.shape[:-1], count, a_block)
        if self._name == "int4":
            second = (integers + 8) >> 4
            integers = torch.stack([torch.sub(integers, second, alpha=16), second], -2).flatten(-2)
        return (integers * scales.unsqueeze(-1)).flatten(-2)


def _power_of_two(biased: torch.Tensor) -> torch.Tensor:
    """Infinity of 255."""
    return (biased << 23).view(torch.float32)
