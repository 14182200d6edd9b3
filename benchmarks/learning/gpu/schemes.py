# SPDX-License-Identifier: MIT
"""How workers communicate. A scheme has y, (R, N), on which the optimizers step, and the shared parameters x, (N,). exchange(step) comes
after each step of the optimizers and counts the bits of one worker each way."""

import torch

from gpu import payloads
from gpu.layout import Layout


class Scheme:
    """W replicas, and residuals where the scheme has them: one of each worker, (W, N) or None, and the server's, (N,)."""

    def __init__(self, layout: Layout, row, x: torch.Tensor):
        self.layout, self.row, self.x = layout, row, x
        self.y = x[None].repeat(row.W, 1)
        self.residual, self.server_residual = None, torch.zeros_like(x)
        self.up_bits, self.down_bits = (torch.zeros((), device=layout.device, dtype=torch.float64) for _ in range(2))

    def is_exchanged(self, step: int) -> bool:
        """Of schemes that exchange everything every H steps, and after the last one."""
        return step % int(self.row.H) == 0 or step == self.row.steps

    def count(self, up_bits, down_bits) -> None:
        self.up_bits += up_bits
        self.down_bits += down_bits


class Dense(Scheme):
    """One replica steps on the mean of all gradients. No bits are counted."""

    def __init__(self, layout, row, x):
        super().__init__(layout, row, x)
        self.y = x[None].clone()
        self.x = self.y[0]

    def exchange(self, step):
        pass


class Mean(Scheme):
    """All workers get the mean of all parameters in every step, in float32. No bits are counted."""

    def exchange(self, step):
        self.x = self.y.mean(0)
        self.y.copy_(self.x)


class DiLoCo(Scheme):
    """DiLoCo (Douillard et al., arXiv 2311.08105) in int4 both ways, without outer momentum: every H steps all local deltas are averaged.
    What the server's rounding leaves out is added to its next reply."""

    def exchange(self, step):
        if not self.is_exchanged(step):
            return
        wanted = self.server_residual + payloads.int4(self.x - self.y).mean(0)
        reply = payloads.int4(wanted)
        self.server_residual = wanted - reply
        self.x = self.x - reply
        self.y.copy_(self.x)
        self.count(payloads.INT4_BITS * self.layout.elements, payloads.INT4_BITS * self.layout.elements)
