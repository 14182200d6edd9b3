# SPDX-License-Identifier: MIT
from typing import Tuple

import torch

PAYLOADS = ("as_is", "float16", "bfloat16", "int8", "int4", "ternary")
BLOCK = 64  # elements that share a scale
_BITS = {"int8": 7, "int4": 3}  # of a magnitude
_STRIDE = 13  # bytes of a ternary block, of five trits each
_HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class Payload:
    """Numbers rounded as by lamina/payload.hpp, by torch's operators: rows of float32, a multiple of 64 each, to rows of bytes. Scales are
    powers of two, a byte for each block, before the integers; the lower half of an int4 byte has an element of the block's first half.
    Magnitudes beyond 2^120 are rounded otherwise than by C++."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._name = name
        if name == "ternary":  # what each of 64 trits adds to 13 bytes; and the five trits of each byte
            places = torch.arange(BLOCK, device=device)
            self._pack = torch.zeros(BLOCK, _STRIDE, device=device, dtype=torch.float32)
            self._pack[places, places % _STRIDE] = 3.0 ** (places // _STRIDE).float()
            self._unpack = torch.tensor([[(((byte + 128) % 256 - 7) // 3 ** place % 3) - 1 for place in range(5)] for byte in range(256)],
                                      dtype=torch.float32, device=device)

    def bytes_of(self, elements: int) -> int:
        """Of a row."""
        return {"as_is": 4 * elements, "int8": elements // BLOCK + elements,
                "int4": elements // BLOCK + elements // 2,
                "ternary": elements // BLOCK * (1 + _STRIDE)}.get(self._name, 2 * elements)

    def encode(self, numbers: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """The bytes, and the numbers that they say. What is not finite is so when it is read."""
        if self._name == "as_is":
            return numbers.contiguous().view(torch.uint8), numbers
        if self._name in _HALVES:
            limits = torch.finfo(_HALVES[self._name])
            halves = numbers.clamp(limits.min, limits.max).to(_HALVES[self._name])
            return halves.view(torch.uint8), halves.float()
        blocks = numbers.view(*numbers.shape[:-1], -1, BLOCK)
        if self._name == "ternary":
            return self._ternary(blocks)
        largest = torch.linalg.vector_norm(blocks, torch.inf, dim=-1)
        bits = _BITS[self._name]
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
        a_block = {"int8": BLOCK, "int4": BLOCK // 2}.get(self._name, _STRIDE)
        count = given.shape[-1] // (1 + a_block)
        scales, integers = _power_of_two(given[..., :count].to(torch.int32)), given[..., count:].view(torch.int8)
        integers = integers.view(*integers.shape[:-1], count, a_block)
        if self._name == "ternary":
            integers = self._unpack[integers.view(torch.uint8).long()].transpose(-2, -1).flatten(-2)[..., :BLOCK]
        elif self._name == "int4":
            second = (integers + 8) >> 4
            integers = torch.stack([torch.sub(integers, second, alpha=16), second], -2).flatten(-2)
        return (integers * scales.unsqueeze(-1)).flatten(-2)

    def _ternary(self, blocks: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        levels = torch.linalg.vector_norm(blocks, 2, dim=-1, dtype=torch.float64).square_()
        levels.div_(torch.linalg.vector_norm(blocks, 1, dim=-1, dtype=torch.float64).clamp_(min=1e-300)).mul_(2 ** 0.5)
        exponents = (levels.to(torch.float32).view(torch.int32) >> 23).clamp_(min=7)  # 255 of what is not finite
        trits = (blocks * _power_of_two(255 - exponents).unsqueeze(-1)).trunc_().clamp_(-1, 1)  # of twice the numbers
        said = (trits * _power_of_two(exponents).unsqueeze(-1)).flatten(-2)
        packed = (trits @ self._pack).to(torch.int8).flatten(-2).view(torch.uint8)
        return torch.cat([exponents.to(torch.uint8), packed], -1), said


def _power_of_two(biased: torch.Tensor) -> torch.Tensor:
    """Infinity of 255."""
    return (biased << 23).view(torch.float32)
