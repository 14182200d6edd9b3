# SPDX-License-Identifier: MIT
"""SparseLoCo (Sarfi et al., arXiv 2508.15706): local steps, and then the largest elements of what they did."""

import collections
import math

import torch

from gpu.layout import Layout
from gpu.schemes import Scheme

VALUE_BITS = 2
TABLE_BITS = 160  # of a layer: the mean and the four values, float32


def message_bits(layout: Layout, k: int) -> int:
    """The positions of the largest elements of each fragment take as many bits as any code needs for them."""
    sizes = collections.Counter(layout.sizes.long().tolist())
    elements = sum(count * ((math.comb(size, min(k, size)) - 1).bit_length() + VALUE_BITS * min(k, size)) for size, count in sizes.items())
    return elements + TABLE_BITS * len(layout.shapes)


class SparseLoCo(Scheme):
    """Every H steps a worker sends the k largest of each 4,096 elements of its local delta and residual, with 2 bits of value. Each worker
    receives what every other one sends."""

    def __init__(self, layout, row, x):
        super().__init__(layout, row, x)
        self.residual = torch.zeros_like(self.y)
        self.message_bits = message_bits(layout, row.k)

    def exchange(self, step):
        if not self.is_exchanged(step):
            return
        pending = self.layout.in_fragments(self.residual.add_(self.x - self.y))
        sent = self.largest(pending)
        self.residual = (pending - sent).mul_(self.row.keep).view_as(self.y)
        self.x = self.x - sent.view_as(self.y).mean(0)
        self.y.copy_(self.x)
        self.count(self.message_bits, (self.row.W - 1) * self.message_bits)

    def largest(self, numbers: torch.Tensor) -> torch.Tensor:
        """What arrives of (R, F, 4096). The four values of a layer are the means of what falls into four bins around its mean, each 1.5
        deviations wide."""
        places = numbers.abs().topk(self.row.k, dim=2, sorted=False).indices
        values = numbers.gather(2, places)
        is_sent = values != 0
        counts = self.by_layer(is_sent.float()).clamp(min=1)
        mean = self.of_layer(self.by_layer(values) / counts)
        deviation = (self.by_layer((values - mean) ** 2 * is_sent) / counts).sqrt()
        width = self.of_layer((6 * deviation / 4).clamp(min=1e-30))
        bins = ((values - mean) / width + 2).round_().clamp_(0, 3)
        sent = torch.zeros_like(values)
        for each in range(4):
            is_in = (bins == each) & is_sent
            sent += is_in * self.of_layer(self.by_layer(values * is_in) / self.by_layer(is_in.float()).clamp(min=1))
        return torch.zeros_like(numbers).scatter_(2, places, sent)

    def by_layer(self, numbers):
        """The sums (R, L) of (R, F, k)."""
        return torch.zeros(len(numbers), len(self.layout.shapes), device=numbers.device).index_add_(1, self.layout.layer, numbers.sum(-1))

    def of_layer(self, numbers):
        """(R, L) -> (R, F, 1)"""
        return numbers[:, self.layout.layer][..., None]
