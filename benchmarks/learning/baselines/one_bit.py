# SPDX-License-Identifier: MIT
"""1-bit Adam: signs of the momentum, once the variance stands."""

import math

import torch

from optimizers import BETAS, EPSILON, adamw_decay
from training import Shared, Step, clipped


class OneBitAdam(Shared):
    """1-bit Adam (Tang et al., arXiv 2102.02888, algorithm 1). In its dense steps it is AdamW on the mean of all gradients. From then on the
    variance stands still, and a worker adds its gradient to the momentum that all share, sends the sign of each element with the root of the
    mean square of its layer, and keeps what that leaves; who adds these up replies in the same way. Until then the mean is clipped, from
    then on each worker to sqrt(W) times that norm."""

    def __init__(self, task, row):
        if not row.dense_steps:
            raise ValueError("dense_steps must be at least 1: they make the variance that 1-bit Adam goes on with")
        self.task, self.row = task, row
        self.clip = None if task.clip is None else task.clip * math.sqrt(row.workers)
        self.y = task.initial()[None]
        self.layers = [math.prod(shape) for shape in task.shapes().values()]
        self.momentum, self.variance, self.left_by_all = (torch.zeros_like(self.y) for _ in range(3))
        self.left = torch.zeros(row.workers, self.y.shape[1])
        self.decay = adamw_decay(task)
        self.bytes = sum(-(-size // 8) + 4 for size in self.layers)

    def signs(self, numbers):
        """What arrives of (R, N)."""
        return torch.cat([torch.where(layer < 0, -1.0, 1.0) * layer.square().mean(1, keepdim=True).sqrt()
                          for layer in torch.split(numbers, self.layers, dim=1)], dim=1)

    def step(self, step, rate):
        losses, gradients = self.task.gradients(self.y.expand(self.row.workers, -1), step)
        if step <= self.row.dense_steps:
            mean = clipped(gradients.mean(0, keepdim=True), self.task.clip)
            self.momentum.lerp_(mean, 1 - BETAS[0])
            self.variance.mul_(BETAS[1]).addcmul_(mean, mean, value=1 - BETAS[1])
            sent = 4 * self.y.shape[1]
        else:
            self.left += self.momentum.lerp(clipped(gradients, self.clip), 1 - BETAS[0])
            arrived = self.signs(self.left)
            self.left -= arrived
            self.left_by_all += arrived.mean(0, keepdim=True)
            self.momentum = self.signs(self.left_by_all)
            self.left_by_all -= self.momentum
            sent = self.bytes
        begun = [1 - beta ** min(step, most) for beta, most in zip(BETAS, (step, self.row.dense_steps))]
        self.y.mul_(1 - rate * self.decay)
        self.y.sub_(rate * (self.momentum / begun[0]) / ((self.variance / begun[1]).sqrt() + EPSILON))
        return Step(float(losses.mean()), sent, sent)

    def parameters(self):
        return self.y[0]

    def state(self, step):
        return {name: getattr(self, name) for name in ("y", "momentum", "variance", "left", "left_by_all")}

    def load(self, state):
        for name, saved in state.items():
            getattr(self, name).copy_(saved)
