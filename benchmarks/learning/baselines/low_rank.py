# SPDX-License-Identifier: MIT
"""PowerSGD: a matrix as the product of two narrow ones."""

import math

import torch

from payload import PAYLOADS
from rows import named
from training import Replicas, Shared, Step, clipped, worker_clip

MIN_RATIO = 2  # of PyTorch's hook: what would shrink less goes out as it is


def matrices(task) -> list[tuple]:
    """The shape of each layer, a convolution's as that of the matrix of its outputs."""
    return [(shape[0], math.prod(shape[1:])) if len(shape) > 1 else shape for shape in task.shapes().values()]


class PowerSgd(Shared):
    """PowerSGD (Vogels, Karimireddy and Jaggi, arXiv 1905.13727, algorithms 1 and 2): of each matrix, one step of power iteration from the
    last one's result, and what that leaves stays with the worker. The weight of a convolution is the matrix of its outputs; vectors go out
    whole, and small matrices. The optimizer steps on the mean, as under DDP with PyTorch's hook; so many steps at the beginning are without
    compression as the row says. With a payload factors and vectors are rounded on both ways, as PyTorch's bf16_compress_wrapper has it: what
    that takes of a factor stays with the worker, and of a vector is lost."""

    def __init__(self, task, row):
        self.task, self.dense_steps = task, row.dense_steps
        self.replicas = Replicas(task, row, 1)
        self.clip = worker_clip(task, row, self.replicas)
        self.payload = named(PAYLOADS, row, "payload")
        self.shapes = matrices(task)
        self.left = torch.zeros(row.workers, self.replicas.y.shape[1])
        generator = torch.Generator().manual_seed(row.seed)
        self.right = [torch.randn(shape[1], min(row.rank, *shape), generator=generator) if self.is_smaller(shape, row.rank) else None
                      for shape in self.shapes]
        self.bytes = sum(self.payload.bytes(math.prod(shape) if right is None else sum(shape) * right.shape[1])
                         for shape, right in zip(self.shapes, self.right))

    @staticmethod
    def is_smaller(shape, rank: int) -> bool:
        return len(shape) == 2 and MIN_RATIO * sum(shape) * min(rank, *shape) < math.prod(shape)

    def brought(self, numbers):
        """What arrives of the mean over the workers, of (W, ...)."""
        mean = self.payload.rounded(numbers.flatten(1)).mean(0, keepdim=True)
        return self.payload.rounded(mean).view(numbers.shape[1:])

    def step(self, step, rate):
        losses, gradients = self.task.gradients(self.replicas.y.expand(len(self.left), -1), step)
        gradients = clipped(gradients, self.clip)
        if step <= self.dense_steps:
            self.replicas.step(gradients.mean(0, keepdim=True), rate)
            return Step(float(losses.mean()), 4 * self.left.shape[1], 4 * self.left.shape[1])
        self.left += gradients
        arrived = torch.empty(1, self.left.shape[1])
        sizes = [math.prod(shape) for shape in self.shapes]
        for place, (layer, mean) in enumerate(zip(torch.split(self.left, sizes, dim=1), torch.split(arrived, sizes, dim=1))):
            if self.right[place] is None:
                mean[0] = self.brought(layer)
                layer.zero_()
            else:
                matrix = layer.view(len(layer), *self.shapes[place])
                left = torch.linalg.qr(self.brought(matrix @ self.right[place])).Q
                self.right[place] = self.brought(matrix.transpose(1, 2) @ left)
                mean[0] = (left @ self.right[place].T).flatten()
                layer -= mean
        self.replicas.step(arrived, rate)
        return Step(float(losses.mean()), self.bytes, self.bytes)

    def state(self, step):
        return {"replicas": self.replicas.state(), "left": self.left, "right": self.right}

    def load(self, state):
        self.replicas.load(state["replicas"])
        self.left.copy_(state["left"])
        self.right = list(state["right"])
