# SPDX-License-Identifier: MIT
"""SparseLoCo: local steps, and then the largest elements of what they did; and what it becomes with one thing changed."""

import math

import torch

from payload import PAYLOADS
from baselines.largest import place_bits
from rows import named
from training import Replicas, Shared, Step

# What the sum of an element is divided by, of those that sent it and of all.
AVERAGES = {"senders": lambda senders, workers: senders.clamp(min=1), "workers": lambda senders, workers: workers}


UNSENT = {"outside": False, "within": True}
INT4 = PAYLOADS["int4"]
SENDS = {"elements": False, "fragments": True}
ANSWERS = {"relayed": False, "rounded": True}


class SparseLoco(Shared):
    """SparseLoCo (Sarfi et al., arXiv 2508.15706, algorithm 1): every so many steps a worker adds its local delta to 0.95 of what it had left,
    and sends the largest of each 4,096 elements, with 2 bits of value. All then have the same parameters. What arrives of an element is the
    mean over all workers, as in the algorithm, or over those that sent it, as in the code of the authors' earlier CCLoco, from which this is,
    too: the four values of a layer are the means of what falls into four bins around the mean, each 1.5 deviations wide. The last step
    sends, too. Each receives what every other one sends.

    By the row, and not as in the paper: what is left may stay within the worker's parameters, as that of local updates does; it may
    fade otherwise (left_kept); all workers may send the same fragments, whole and in int4, those of the largest mean magnitude over all workers;
    and a server may reply with the largest elements of the mean in as few bits, and keep the rest of it, of which nothing fades, for its
    next reply."""

    CHUNK = 4096
    VALUE_BITS = 2

    def __init__(self, task, row):
        self.task, self.row = task, row
        self.replicas = Replicas(task, row, row.workers)
        self.average = named(AVERAGES, row, "averaged")
        self.stays_within, self.is_rounded = named(UNSENT, row, "unsent"), named(ANSWERS, row, "answer")
        self.sends_fragments = named(SENDS, row, "sends")
        self.shared = self.replicas.y[0].clone()
        self.unanswered = torch.zeros_like(self.shared)  # what rounding took of the server's replies
        self.left = torch.zeros_like(self.replicas.y)
        self.layers = [math.prod(shape) for shape in task.shapes().values()]
        self.chunks = [min(size - begin, self.CHUNK) for size in self.layers for begin in range(0, size, self.CHUNK)]
        sent = [(chunk, min(row.top, chunk)) for chunk in self.chunks]
        table = 4 * (1 + 2 ** self.VALUE_BITS) * len(self.layers)  # float32: their mean, and the values
        self.bytes = -(-sum(place_bits(*each) + self.VALUE_BITS * each[1] for each in sent) // 8) + table

    def step(self, step, rate):
        losses, gradients = self.task.gradients(self.replicas.y, step)
        self.replicas.step(gradients, rate)
        loss = float(losses.mean())
        if step % self.row.interval and step != self.row.steps:
            return Step(loss, 0, 0)
        waiting = self.left + (self.shared - self.replicas.y)
        sent = self.sent(waiting)
        up = self.bytes
        self.shared -= self.answer(self.row.outer_rate * sent.sum(0) / self.average((sent != 0).sum(0), self.row.workers))
        self.replicas.y[:] = self.shared
        rest = self.row.left_kept * (waiting - sent)
        if self.stays_within:
            self.replicas.y -= rest
        else:
            self.left = rest
        return Step(loss, up, self.bytes if self.is_rounded else (self.row.workers - 1) * up)

    def answer(self, change):
        """What all take off the shared parameters."""
        if not self.is_rounded:
            return change
        wanted = change + self.unanswered
        reply = self.sent(wanted[None])[0]
        self.unanswered = wanted - reply
        return reply

    def sent(self, numbers):
        """What arrives of (R, N), zeros where nothing is sent."""
        if self.sends_fragments:
            return self.fragments_of(numbers)
        return torch.cat([self.sent_of(layer) for layer in torch.split(numbers, self.layers, dim=1)], dim=1)

    def fragments_of(self, numbers):
        """The same of fragments: each has the value of four bytes that chooses it."""
        pieces = torch.split(numbers, self.chunks, dim=1)
        values = torch.stack([piece.abs().mean() for piece in pieces])
        chosen = set(values.topk(max(1, round(self.row.share * len(pieces)))).indices.tolist())
        self.bytes = sum(4 + (INT4.bytes(piece.shape[1]) if place in chosen else 0) for place, piece in enumerate(pieces))
        return torch.cat([INT4.rounded(piece) if place in chosen else torch.zeros_like(piece) for place, piece in enumerate(pieces)], dim=1)

    def sent_of(self, layer):
        """The same of (R, n) of a layer."""
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
        return {"replicas": self.replicas.state(), "shared": self.shared, "left": self.left, "unanswered": self.unanswered}

    def load(self, state):
        self.replicas.load(state["replicas"])
        self.shared.copy_(state["shared"])
        self.left, self.unanswered = state["left"].clone(), state["unanswered"].clone()
