# SPDX-License-Identifier: MIT
"""Those that send the largest elements of each layer: Deep Gradient Compression, where each worker has its own, and ScaleCom, where all
send those of one of them."""

import functools
import math

import torch

from payload import PAYLOADS
from rows import named
from training import Replicas, Shared, Step, clipped, worker_clip


@functools.cache
def place_bits(elements: int, sent: int) -> int:
    """The least that any code needs for which of the elements are sent: lenient towards who sends them."""
    return (math.comb(elements, sent) - 1).bit_length()


def in_order(places):
    """As numbers go out whose places are told as a set; blocks of a payload are of neighbours then."""
    return places.sort(-1).values


class Largest(Shared):
    """What both have: of each matrix a share of the elements, one at least, and of a convolution's; vectors are sent whole. What is not
    sent stays with the worker."""

    def __init__(self, task, row):
        self.task, self.row = task, row
        self.replicas = Replicas(task, row, 1, decays=1 / (1 - row.correction))
        self.layers = [math.prod(shape) for shape in task.shapes().values()]
        self.is_vector = [len(shape) == 1 for shape in task.shapes().values()]
        self.payload = named(PAYLOADS, row, "payload")
        self.residual = torch.zeros(row.workers, sum(self.layers))

    def sent_of(self, share: float) -> list[int]:
        """Elements of each layer."""
        return [size if whole else max(1, round(share * size)) for size, whole in zip(self.layers, self.is_vector)]

    def bytes_of(self, sent: list[int]) -> tuple[int, int]:
        """Of the values, and of the places."""
        return sum(map(self.payload.bytes, sent)), sum(-(-place_bits(*each) // 8) for each in zip(self.layers, sent))

    def gradients(self, step):
        return self.task.gradients(self.replicas.y.expand(self.row.workers, -1), step)

    def state(self, step):
        return {"replicas": self.replicas.state(), "residual": self.residual}

    def load(self, state):
        self.replicas.load(state["replicas"])
        self.residual.copy_(state["residual"])


class Dgc(Largest):
    """Deep Gradient Compression (Lin et al., arXiv 1712.01887): a worker clips its gradient to sqrt(W) times the norm that the mean of
    all may have, adds its Nesterov momentum to its residual (momentum correction), sends the largest elements, and clears both there
    (momentum factor masking). At the beginning it sends a quarter, a sixteenth, ... of them (warm-up). Each receives what every other one
    sends of a matrix; vectors are summed on the way, as in the authors' code."""

    RAMP = 4  # shares of the warm-up, each a quarter of the one before

    def __init__(self, task, row):
        super().__init__(task, row)
        if row.correction and row.optimizer != "sgd":
            raise ValueError(f"correction is a momentum of its own: the optimizer must be sgd, got {row.optimizer!r}")
        # In the paper 1 / sqrt(W) of the norm, of gradients that are divided by W already.
        self.clip, self.replicas.clip = None if task.clip is None else task.clip * math.sqrt(row.workers), None
        self.velocity = torch.zeros_like(self.residual)
        self.vector_bytes = sum(self.payload.bytes(size) for size, is_vector in zip(self.layers, self.is_vector) if is_vector)

    def share(self, step: int) -> float:
        if step > self.row.ramp_steps:
            return self.row.share
        return max(self.row.share, 0.25 ** (1 + (step - 1) * self.RAMP // self.row.ramp_steps))

    def step(self, step, rate):
        losses, gradients = self.gradients(step)
        gradients = clipped(gradients, self.clip)
        self.velocity.add_(gradients).mul_(self.row.correction)
        self.residual += self.velocity + gradients
        sent = self.sent_of(self.share(step))
        arrived = torch.zeros_like(self.residual)
        pieces = (torch.split(each, self.layers, dim=1) for each in (self.residual, self.velocity, arrived))
        for count, residual, velocity, arriving in zip(sent, *pieces):
            places = in_order(residual.abs().topk(count, dim=1).indices)
            values = residual.gather(1, places)
            rounded = self.payload.rounded(values)
            arriving.scatter_(1, places, rounded)
            residual.scatter_(1, places, values - rounded)
            if count < residual.shape[1]:
                velocity.scatter_(1, places, 0.0)
        self.replicas.step(arrived.mean(0, keepdim=True), rate)
        up = sum(self.bytes_of(sent))
        return Step(float(losses.mean()), up, (self.row.workers - 1) * (up - self.vector_bytes) + self.vector_bytes)

    def state(self, step):
        return super().state(step) | {"velocity": self.velocity}

    def load(self, state):
        super().load(state)
        self.velocity.copy_(state["velocity"])


class ScaleCom(Largest):
    """ScaleCom (Chen et al., arXiv 2104.11125, algorithm 1): the workers take turns in choosing the largest elements of their own residual,
    and all send these, so that they can be summed on the way. The residual takes in new gradients, and gives off what was sent, by a share
    (low_pass) alone."""

    def __init__(self, task, row):
        super().__init__(task, row)
        self.clip = worker_clip(task, row, self.replicas)
        self.sent = self.sent_of(row.share)
        values, places = self.bytes_of(self.sent)
        # One of the workers sends places up, and all get them.
        self.up, self.down = values + math.ceil(places / row.workers), values + places

    def step(self, step, rate):
        losses, gradients = self.gradients(step)
        gradients = clipped(gradients, self.clip)
        leader = (step - 1) % self.row.workers
        arrived = torch.zeros(1, self.residual.shape[1])
        pieces = (torch.split(each, self.layers, dim=1) for each in (self.residual, gradients, arrived))
        for count, residual, gradient, arriving in zip(self.sent, *pieces):
            waiting = residual + gradient
            places = in_order(waiting[leader].abs().topk(count).indices)
            rounded = self.payload.rounded(waiting[:, places])
            arriving[0, places] = rounded.mean(0)
            change = gradient.clone()
            change[:, places] -= rounded
            residual += self.row.low_pass * change
        self.replicas.step(arrived, rate)
        return Step(float(losses.mean()), self.up, self.down)
