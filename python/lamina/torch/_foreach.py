# SPDX-License-Identifier: MIT
"""Operations over many tensors that are a few launches on a device, however many tensors there are."""

from typing import Dict, List, Optional, Sequence, Tuple

import torch

# Newer ones add up in float64 what is float32, without a copy.
_ADDS_IN_FLOAT64 = any(each.name == "dtype" for each in torch.ops.aten._foreach_norm.Scalar._schema.arguments)


class Pieces:
    """Pieces of flat tensors: of each tensor, in the order of the memory, the number of a piece, or None for a gap, and its elements."""

    def __init__(self, pieces: Sequence[Sequence[Tuple[Optional[int], int]]]) -> None:
        self._pieces = [[number for number, _ in each] for each in pieces]
        self._sizes = [[size for _, size in each] for each in pieces]
        self._count = sum(number is not None for each in self._pieces for number in each)

    def of(self, flats: Sequence[torch.Tensor]) -> List[torch.Tensor]:
        """A view of each piece."""
        views: Dict[int, torch.Tensor] = {}
        for flat, sizes, numbers in zip(flats, self._sizes, self._pieces):
            views.update((number, view) for number, view in zip(numbers, torch.split(flat, sizes)) if number is not None)
        return [views[number] for number in range(self._count)]

    def norms(self, flats: Sequence[torch.Tensor], order: float) -> torch.Tensor:
        """The norm of each piece, summed up in float64; 0 of an empty one. Not finite if, and only if, an element is not."""
        if not _ADDS_IN_FLOAT64:
            flats = [flat.double() for flat in flats]
        views = self.of(flats)
        zero = torch.zeros((), dtype=torch.float64, device=flats[0].device)
        found = [zero] * self._count
        for dtype in {flat.dtype for flat in flats}:
            numbers = [number for number, view in enumerate(views) if view.dtype is dtype and view.numel()]
            if numbers:
                options = {"dtype": torch.float64} if _ADDS_IN_FLOAT64 else {}
                for number, norm in zip(numbers, torch._foreach_norm([views[number] for number in numbers], order, **options)):
                    found[number] = norm
        return torch.stack(found)


def zero_all(tensors: Sequence[torch.Tensor]) -> None:
    if tensors:
        torch._foreach_zero_(list(tensors))


def copy_all(to: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
    """Into tensors of one type each, from as many."""
    if not to:
        return
    if hasattr(torch, "_foreach_copy_"):  # since PyTorch 2.1
        torch._foreach_copy_(list(to), list(given))
    else:
        torch._foreach_zero_(list(to))
        torch._foreach_add_(list(to), list(given))


def joined(tensors: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """One behind the other; without any, an empty one like another."""
    return torch.cat(list(tensors)) if tensors else like[:0].clone()


def is_gapless(tensor: torch.Tensor) -> bool:
    """Whether the elements lie without gaps and overlaps, in any order of the dimensions: DDP keeps the order then."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True
