# SPDX-License-Identifier: MIT
"""The layers of a model cut into fragments, and what sending some of them costs and brings."""

import lamina
import numpy as np
import torch

from payload import BLOCK_ELEMENTS, PAYLOADS
from rows import named


class Fragments:
    def __init__(self, shapes: dict[str, tuple[int, ...]], row):
        self.layout = lamina.Layout(shapes)
        self.fragment_elements = row.fragment
        self.payload = named(PAYLOADS, row, "payload")
        self.sizes = [int(size) for size in self.selector().fragments.sizes]
        self.begins = np.concatenate([[0], np.cumsum(self.sizes)[:-1]])
        self.elements = sum(self.sizes)
        self.overhead_bytes = -(-(64 + -(-len(self.sizes) // 8)) // 64) * 64  # of a frame: header, bitmap, padding
        self.value_bytes = 4 * len(self.sizes)  # a float32 a fragment, up; and their means, down

    def selector(self, **options) -> lamina.Selector:
        """The library's own choice."""
        return lamina.Selector(self.layout, fragment_elements=self.fragment_elements, **options)

    def frame_bytes(self, chosen) -> int:
        """Of a frame with these fragments; nothing is sent where none is chosen."""
        return self.overhead_bytes + sum(self.payload.bytes(self.sizes[fragment]) for fragment in chosen) if chosen else 0

    def indices(self, chosen) -> torch.Tensor:
        """Of the elements of these fragments, in order."""
        return torch.cat([torch.arange(0), *(torch.arange(self.sizes[fragment]) + self.begins[fragment] for fragment in chosen)])

    def arriving(self, chosen, numbers: torch.Tensor) -> torch.Tensor:
        """What arrives of these fragments' elements, (..., n)."""
        sizes = [self.sizes[fragment] for fragment in chosen]
        if all(size % BLOCK_ELEMENTS == 0 for size in sizes):  # blocks then begin where fragments do
            return self.payload.rounded(numbers)
        return torch.cat([self.payload.rounded(each) for each in torch.split(numbers, sizes, dim=-1)], dim=-1)

    def means(self, numbers: torch.Tensor) -> np.ndarray:
        """(R, P): the mean of each fragment of (R, N) numbers."""
        return np.add.reduceat(numbers.numpy(), self.begins, axis=1) / np.float32(self.sizes)

    def agreed(self, values: np.ndarray) -> np.ndarray:
        """The mean over the workers of (W, P) values, as a float32 brings it."""
        return values.mean(0, dtype=np.float64).astype(np.float32).astype(np.float64)

    def saved(self, selector: lamina.Selector, step: int) -> bytes:
        """The selector's memory; the residual of the library lies elsewhere."""
        return selector.save(step, np.zeros(self.elements, np.float32))
