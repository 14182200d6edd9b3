# SPDX-License-Identifier: MIT
"""Levels: integers from -3 to 3 in a step tau, entropy coded with a table for each fragment."""

import math

import torch

from gpu.layout import ELEMENTS
from gpu.payloads import VALUE_BITS

MOST = 3
TABLE_BITS, HEADER_BITS = 24, 256  # of a fragment; of a message


def entropy(counts: torch.Tensor) -> torch.Tensor:
    """(..., K) counts -> bits (...)."""
    counts = counts.double()
    shares = counts / counts.sum(-1, keepdim=True).clamp(min=1)
    return -(counts * torch.where(shares > 0, shares, torch.ones_like(shares)).log2()).sum(-1)


def integers(numbers: torch.Tensor, tau: torch.Tensor) -> torch.Tensor:
    return (numbers.abs() / tau).add_(0.4).floor_().clamp_(max=MOST).mul_(numbers.sign())


class Levels:
    """The messages of one direction. tau is c times the mean of the agreed representative values, and c follows the bits of the messages
    before, so that they meet the budget of `pct` per cent. In the first message c is bisected."""

    def __init__(self, layout, pct: float):
        self.layout, self.budget = layout, pct / 100 * 32 * layout.elements
        self.c = None
        self.overspent = torch.zeros((), device=layout.device, dtype=torch.float64)

    def send(self, numbers: torch.Tensor, value: torch.Tensor, sizes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What arrives of (R, F, 4096), and the mean bits of the R messages. Nothing waits for the device after the first message."""
        if self.c is None:
            self.c = self.bisected(numbers, value, sizes)
        tau = self.c * value
        sent = integers(numbers, tau)
        bits = self.bits(sent, sizes)
        self.overspent += bits - self.budget
        wanted = torch.clamp(self.budget - self.overspent / 20, min=0.3 * self.budget)
        self.c *= torch.clamp((bits / wanted) ** 0.5, 0.8, 1.25).float()
        return sent * tau, bits

    def bisected(self, numbers, value, sizes) -> torch.Tensor:
        low, high = 0.05, 50.0
        for _ in range(14):
            middle = math.sqrt(low * high)
            is_over = float(self.bits(integers(numbers, middle * value), sizes)) > self.budget
            low, high = (middle, high) if is_over else (low, middle)
        return torch.tensor(high, device=self.layout.device)

    def bits(self, sent, sizes):
        """The integers in entropy and signs, a table for each fragment, the bitmap of fragments, a header, and the values of all."""
        counts = torch.stack([(sent.abs() == level).sum(-1) for level in range(MOST + 1)], -1)
        counts[..., 0] -= (ELEMENTS - sizes).long()  # padding is not sent
        payload = (entropy(counts) + counts[..., 1:].sum(-1)).sum(-1).mean()
        return payload + TABLE_BITS * sent.shape[1] + self.layout.fragments + HEADER_BITS + VALUE_BITS * self.layout.fragments
