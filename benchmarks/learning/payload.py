# SPDX-License-Identifier: MIT
"""How numbers are written when they are sent, as docs/wire-format.md has it, and what it has not: int2, int1, top4, top2 and top1."""

import dataclasses

import numpy as np
import torch

BLOCK_ELEMENTS = 64  # that share a power of two
LARGEST_EXPONENT = 120
POWERS = torch.from_numpy(np.ldexp(np.float32(1), np.arange(-LARGEST_EXPONENT, LARGEST_EXPONENT + 1)).astype(np.float32))


class AsIs:
    def bytes(self, elements: int) -> int:
        """Of one fragment."""
        return 4 * elements

    def rounded(self, numbers: torch.Tensor) -> torch.Tensor:
        """What arrives of numbers, (..., n) float32 and finite, each row a fragment or several of whole blocks."""
        return numbers


class Bfloat16:
    def bytes(self, elements):
        return 2 * elements

    def rounded(self, numbers):
        return numbers.bfloat16().float()


@dataclasses.dataclass(frozen=True)
class Integers:
    """Blocks of 64 share the smallest power of two with which they fit; to nearest, ties to even."""

    magnitude_bits: int

    def bytes(self, elements):
        return -(-elements * (self.magnitude_bits + 1) // 8) + -(-elements // BLOCK_ELEMENTS)

    def rounded(self, numbers):
        most = 2 ** self.magnitude_bits - 1
        elements = numbers.shape[-1]
        blocks = torch.nn.functional.pad(numbers, (0, -elements % BLOCK_ELEMENTS)).unflatten(-1, (-1, BLOCK_ELEMENTS))
        largest = blocks.abs().amax(-1, keepdim=True)
        # largest < 2^exponent, so that power over 2^bits is the one, or the next.
        exponent = (torch.frexp(largest).exponent.long() - self.magnitude_bits).clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
        place = exponent + LARGEST_EXPONENT
        place += (largest > most * POWERS[place]) & (exponent < LARGEST_EXPONENT)
        scale = POWERS[place]
        return ((blocks / scale).round().clamp(-most, most) * scale).flatten(-2)[..., :elements]


class Ternary:
    """0, or plus or minus a power of two for what is at least half of it: the one nearest, in the logarithm, to the sum of squares over the
    sum of magnitudes of a block of 64. That is the level of least square error for a Laplace distribution, and to 3 % for a normal one
    (Max, Quantizing for minimum distortion, 1960)."""

    def bytes(self, elements):
        blocks, left = divmod(elements, BLOCK_ELEMENTS)
        return 14 * blocks + (1 + -(-left // 5) if left else 0)

    def rounded(self, numbers):
        elements = numbers.shape[-1]
        blocks = torch.nn.functional.pad(numbers, (0, -elements % BLOCK_ELEMENTS)).unflatten(-1, (-1, BLOCK_ELEMENTS))
        magnitudes = blocks.abs().double()
        level = magnitudes.square().sum(-1, keepdim=True) / magnitudes.sum(-1, keepdim=True).clamp(min=1e-300)
        exponent = torch.frexp(level * 2 ** 0.5).exponent.long() - 1
        scale = POWERS[exponent.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT) + LARGEST_EXPONENT]
        return ((blocks.abs() >= scale / 2) * blocks.sign() * scale).flatten(-2)[..., :elements]


@dataclasses.dataclass(frozen=True)
class OddHalves:
    """2^bits levels, odd multiples of half a power of two, which blocks of 64 share: no number is sent as 0. The power is the one
    nearest to `step` times the mean magnitude, in the logarithm. Levels and step are those of least square error for a normal
    distribution (Max, Quantizing for minimum distortion, 1960). What is left of a number is rounded, once, to a float32."""

    bits: int
    step: float

    def bytes(self, elements):
        return -(-elements * self.bits // 8) + -(-elements // BLOCK_ELEMENTS)

    def rounded(self, numbers):
        elements = numbers.shape[-1]
        blocks = torch.nn.functional.pad(numbers, (0, -elements % BLOCK_ELEMENTS)).unflatten(-1, (-1, BLOCK_ELEMENTS))
        wanted = self.step * 2 ** 0.5 * blocks.abs().mean(-1, keepdim=True)
        exponent = (torch.frexp(wanted).exponent.long() - 1).clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
        scale = POWERS[exponent + LARGEST_EXPONENT]
        most = 2 ** (self.bits - 1)
        return (((blocks / scale).floor().clamp(-most, most - 1) + 0.5) * scale).flatten(-2)[..., :elements]


@dataclasses.dataclass(frozen=True)
class Largest:
    """The largest of each block of 64, a byte each: six bits say where, one the sign, and one whether it is once or twice a power of two
    that the block shares. Nothing is sent of a number that is nearer to 0: its byte repeats the one before, and a block without any has
    no power. What is left of a number is exact."""

    count: int

    def bytes(self, elements):
        return -(-elements // BLOCK_ELEMENTS) * (self.count + 1)

    def rounded(self, numbers):
        elements = numbers.shape[-1]
        blocks = torch.nn.functional.pad(numbers, (0, -elements % BLOCK_ELEMENTS)).unflatten(-1, (-1, BLOCK_ELEMENTS))
        places = blocks.abs().topk(self.count).indices
        values = blocks.gather(-1, places)
        # The largest is 1.5 to 3 times the power.
        exponent = torch.frexp(values[..., :1].abs() / 1.5).exponent.long() - 1
        scale = POWERS[exponent.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT) + LARGEST_EXPONENT]
        told = (values / scale).round().clamp(-2, 2) * scale
        return torch.zeros_like(blocks).scatter(-1, places, told).flatten(-2)[..., :elements]


PAYLOADS = {"as_is": AsIs(), "bfloat16": Bfloat16(), "int8": Integers(7), "int4": Integers(3), "ternary": Ternary(), "int2": OddHalves(2, 1.248),
            "int1": OddHalves(1, 2.0), "top4": Largest(4), "top2": Largest(2), "top1": Largest(1)}
