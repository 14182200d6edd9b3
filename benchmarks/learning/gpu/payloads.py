# SPDX-License-Identifier: MIT
"""What arrives of the numbers of a message, (R, F, 4096), and what the message costs in bits, where that does not depend on them."""

import math

import torch

from gpu.layout import ELEMENTS

INT4_BITS = 4.25  # of an element
INT4_OVERHEAD_BITS = 33  # of a fragment
TRITS_BITS = 8 * math.ceil(ELEMENTS / 5) + 16 + 1  # of a fragment: five trits a byte, a scale, and whether it is sent
VALUE_BITS = 32  # of a fragment's representative value, which every step sends for all fragments


def int4(numbers: torch.Tensor) -> torch.Tensor:
    """Blocks of 32 share the smallest power of two with which their integers are at most 7."""
    blocks = numbers.view(*numbers.shape[:-1], -1, 32)
    scale = torch.exp2((blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 7).log2().ceil())
    return ((blocks / scale).round().clamp(-7, 7) * scale).view_as(numbers)


def trits(numbers: torch.Tensor, sizes: torch.Tensor, scale: float) -> torch.Tensor:
    """Minus one, zero or one times `scale` times the mean magnitude of the fragment; sizes (F,) count its elements without padding."""
    step = (numbers.abs().sum(-1) / sizes * scale).clamp(min=1e-30)[..., None]
    return (numbers.abs() / step + 0.5).floor_().clamp_(max=1).mul_(numbers.sign()) * step
