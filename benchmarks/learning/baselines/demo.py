# SPDX-License-Identifier: MIT
"""DeMo: the largest components of each worker's momentum, and steps of one size."""

import math

import torch

from optimizers import adamw_decay
from payload import PAYLOADS
from baselines.largest import in_order, place_bits
from baselines.low_rank import matrices
from rows import named
from training import Shared, Step


def cosines(size: int) -> torch.Tensor:
    """(size, size): the orthonormal discrete cosine transform, a component a row."""
    places, components = torch.arange(size, dtype=torch.float64) + 0.5, torch.arange(size)
    matrix = torch.cos(torch.pi / size * components[:, None] * places) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix.float()


class Tiles:
    """The tiles of a layer, and their components. Each dimension is cut into the largest equal pieces of 64 at most."""

    SIDE = 64

    def __init__(self, shape):
        self.shape = shape
        self.sides = [max(side for side in range(1, self.SIDE + 1) if size % side == 0) for size in shape]
        self.size = math.prod(self.sides)
        self.count = math.prod(shape) // self.size
        self.transforms = [cosines(side) for side in self.sides]

    def components(self, numbers):
        """(W, count, size) of (W, n)."""
        if len(self.sides) == 1:
            return numbers.view(len(numbers), -1, self.size) @ self.transforms[0].T
        high, wide = self.sides
        tiles = numbers.view(len(numbers), self.shape[0] // high, high, self.shape[1] // wide, wide).transpose(2, 3)
        return (self.transforms[0] @ tiles @ self.transforms[1].T).reshape(len(numbers), -1, self.size)

    def numbers(self, components):
        """The way back."""
        if len(self.sides) == 1:
            return (components @ self.transforms[0]).flatten(1)
        high, wide = self.sides
        tiles = components.view(len(components), self.shape[0] // high, self.shape[1] // wide, high, wide)
        return (self.transforms[0].T @ tiles @ self.transforms[1]).transpose(2, 3).reshape(len(components), -1)


class DeMo(Shared):
    """DeMo (Peng, Quesnelle and Kingma, arXiv 2411.19870, algorithm 1, and the authors' demo.py): a worker's momentum takes in the gradient
    times the rate. Of each tile of 64 x 64 it sends the largest components of a cosine transform, and takes them off the momentum. What
    arrives of a component is the mean over those that sent it, and the parameters step by its sign. It is an optimizer of its own: weights
    decay as AdamW's, and gradients are not clipped. Each receives what every other one sends."""

    def __init__(self, task, row):
        self.task, self.row = task, row
        self.y = task.initial()[None]
        self.payload = named(PAYLOADS, row, "payload")
        self.tiles = [Tiles(shape) for shape in matrices(task)]
        self.layers = [math.prod(tiles.shape) for tiles in self.tiles]
        self.momentum = torch.zeros(row.workers, sum(self.layers))
        self.decay = adamw_decay(task)
        self.bytes = 0
        for tiles in self.tiles:
            sent = tiles.count * min(row.top, tiles.size)
            places = tiles.count * place_bits(tiles.size, min(row.top, tiles.size))
            self.bytes += self.payload.bytes(sent) + -(-places // 8)

    def step(self, step, rate):
        losses, gradients = self.task.gradients(self.y.expand(self.row.workers, -1), step)
        self.momentum.mul_(self.row.momentum_kept).add_(gradients, alpha=rate)
        arrived = [self.send(*each) for each in zip(self.tiles, torch.split(self.momentum, self.layers, dim=1))]
        self.y.mul_(1 - rate * self.decay).sub_(rate * torch.cat(arrived, dim=1).sign())
        return Step(float(losses.mean()), self.bytes, (self.row.workers - 1) * self.bytes)

    def send(self, tiles, momentum):
        """What arrives of a layer, (1, n); it is taken off the momentum."""
        components = tiles.components(momentum)
        places = in_order(components.abs().topk(min(self.row.top, tiles.size), dim=2).indices)
        values = components.gather(2, places)
        values = self.payload.rounded(values.flatten(1)).view_as(values)
        sent = torch.zeros_like(components).scatter_(2, places, values)
        momentum -= tiles.numbers(sent)
        senders = torch.zeros_like(components).scatter_(2, places, 1.0).sum(0, keepdim=True)
        return tiles.numbers(sent.sum(0, keepdim=True) / senders.clamp(min=1))

    def parameters(self):
        return self.y[0]

    def state(self, step):
        return {"y": self.y, "momentum": self.momentum}

    def load(self, state):
        self.y.copy_(state["y"])
        self.momentum.copy_(state["momentum"])
