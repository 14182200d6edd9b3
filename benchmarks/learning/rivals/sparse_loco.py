# SPDX-License-Identifier: MIT
"""SparseLoCo: local steps, and then the largest elements of what they did."""

import math

import torch

from rivals.largest import place_bits
from rows import named
from training import Replicas, Shared, Step

# What the sum of an element is divided by, of those that sent it and of all.
AVERAGES = {"senders": lambda senders, workers: senders.clamp(min=1), "workers": lambda senders, workers: workers}


class SparseLoco(Shared):
    """SparseLoCo (Sarfi et al., arXiv 2508.15706, algorithm 1): every so many steps a worker adds its drift to 0.95 of what it had left,
    and sends the largest of each 4,096 elements, with 2 bits of value. All then have the same parameters. What arrives of an element is the
    mean over all workers, as in the algorithm, or over those that sent it, as in the code of the authors' earlier CCLoco, from which this is,
    too: the four values of a layer are the means of what falls into four bins around the mean, each 1.5 deviations wide. The last step
    sends, too. Each receives what every other one sends."""

    CHUNK = 4096
    KEPT = 0.95
    VALUE_BITS = 2

    def __init__(self, task, row):
        self.task, self.row = task, row
        self.replicas = Replicas(task, row, row.workers)
        self.average = named(AVERAGES, row, "averaged")
        self.shared = self.replicas.y[0].clone()
        self.left = torch.zeros_like(self.replicas.y)
        self.layers = [math.prod(shape) for shape in task.shapes().values()]
        chunks = [min(size - begin, self.CHUNK) for size in self.layers for begin in range(0, size, self.CHUNK)]
        sent = [(chunk, min(row.top, chunk)) for chunk in chunks]
        table = 4 * (1 + 2 ** self.VALUE_BITS) * len(self.layers)  # float32: their mean, and the values beside it
        self.bytes = -(-sum(place_bits(*each) + self.VALUE_BITS * each[1] for each in sent) // 8) + table

    def step(self, step, rate):
        losses, gradients = self.task.gradients(self.replicas.y, step)
        self.replicas.step(gradients, rate)
        loss = float(losses.mean())
        if step % self.row.interval and step != self.row.steps:
            return Step(loss, 0, 0)
        self.left = self.KEPT * self.left + (self.shared - self.replicas.y)
        sent = torch.cat([self.sent(layer) for layer in torch.split(self.left, self.layers, dim=1)], dim=1)
        self.left -= sent
        self.shared -= self.row.outer_rate * sent.sum(0) / self.average((sent != 0).sum(0), self.row.workers)
        self.replicas.y[:] = self.shared
        return Step(loss, self.bytes, (self.row.workers - 1) * self.bytes)

    def sent(self, layer):
        """What arrives of (W, n), zeros where nothing is sent."""
        workers = layer.shape[0]
        chunks = torch.split(layer, self.CHUNK, dim=1)
        places = [begin * self.CHUNK + chunk.abs().topk(min(self.row.top, chunk.shape[1]), dim=1).indices
                  for begin, chunk in enumerate(chunks)]
        places = torch.cat(places, dim=1)
        values = layer.gather(1, places)
        middle = values.mean(1, keepdim=True)
        scale = 6 * values.std(1, keepdim=True, correction=min(1, values.shape[1] - 1)) / 2 ** self.VALUE_BITS
        bins = ((values - middle) / scale.clamp(min=1e-30) + 2 ** (self.VALUE_BITS - 1)).round().clamp(0, 2 ** self.VALUE_BITS - 1).long()
        sums = torch.zeros(workers, 2 ** self.VALUE_BITS).scatter_add(1, bins, values)
        counts = torch.zeros(workers, 2 ** self.VALUE_BITS).scatter_add(1, bins, torch.ones_like(values))
        rounded = (sums / counts.clamp(min=1)).gather(1, bins)
        return torch.zeros_like(layer).scatter(1, places, rounded)

    def parameters(self):
        return self.shared

    def workers_mean(self):
        return self.replicas.y.mean(0)

    def state(self, step):
        return {"replicas": self.replicas.state(), "shared": self.shared, "left": self.left}

    def load(self, state):
        self.replicas.load(state["replicas"])
        self.shared.copy_(state["shared"])
        self.left = state["left"].clone()
