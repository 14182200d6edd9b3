# SPDX-License-Identifier: MIT
"""Layer dropping once more, by numpy and word for word from the paper: what the package is held against."""

import numpy as np


def threshold(values, sizes, drop_ratio, descending=False):
    """Algorithm 1; -1 if everything goes out."""
    order = sorted(range(len(values)), key=lambda l: -values[l] if descending else values[l])
    total = 0
    for layer in order:
        total += sizes[layer]
        if total > drop_ratio * sum(sizes):
            return values[layer]
    return -1.0


def mean_abs(fragment):
    return float(np.abs(fragment.astype(np.float64)).sum() / max(fragment.size, 1))


class Workers:
    """All workers of a run in one place: residuals, agreed selection, mean."""

    def __init__(self, world, sizes, drop_ratio, fragment_elements=0):
        self.sizes, self.drop_ratio = sizes, drop_ratio
        self.residuals = [[np.zeros(size, np.float32) for size in sizes] for _ in range(world)]
        self.cuts = [list(range(0, size, fragment_elements or max(size, 1))) or [0] for size in sizes]

    def step(self, gradients):
        """gradients[w][l]; returns the mean of what is sent, zeros elsewhere, of each layer, and the fragments sent."""
        world, fragments = len(self.residuals), []
        for residual, own in zip(self.residuals, gradients):
            for layer, gradient in zip(residual, own):
                layer += gradient
        for l, cut in enumerate(self.cuts):
            for begin, end in zip(cut, cut[1:] + [self.sizes[l]]):
                used = any(np.any(own[l]) for own in gradients)
                value = sum(mean_abs(residual[l][begin:end]) for residual in self.residuals) / world
                fragments.append((l, begin, end, value if used else -np.inf))
        limit = threshold([fragment[3] for fragment in fragments], [fragment[2] - fragment[1] for fragment in fragments], self.drop_ratio)
        means, sent = [np.zeros(size, np.float32) for size in self.sizes], []
        for index, (l, begin, end, value) in enumerate(fragments):
            if value == -np.inf or value < limit or begin == end:
                continue
            sent.append(index)
            means[l][begin:end] = sum(residual[l][begin:end] / np.float32(world) for residual in self.residuals)
            for residual in self.residuals:
                residual[l][begin:end] = 0
        return means, sent
