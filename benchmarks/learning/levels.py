# SPDX-License-Identifier: MIT
"""Local updates in levels: about a bit an element of a third of the model in every step, and what a message leaves out waits outside of what
the worker computes with. Three codes for such a message, to choose one of them for the library.

A code is made for a row and its fragments, and has
    share                           of the elements that go out in a step
    encoder() -> encoder            of one worker's messages, or of the server's replies; with state() and load(state)
    encoder.arriving(numbers, sizes) -> numbers, bytes      what arrives of the elements of fragments of these sizes, and what it costs
"""

import dataclasses
import itertools
import math

import numpy as np
import torch

from choices import ByValue, share_within
from fragments import Fragments
from payload import BLOCK_ELEMENTS, LARGEST_EXPONENT, POWERS
from rows import named
from training import Replicas, Step

MOST = 3  # the largest integer of a level
UP_FROM = 0.6  # of a step: what is below it is 0, what is below 1.6 is 1
TABLE_BITS = 24  # of a fragment: the frequencies of its magnitudes
SAMPLE = 7  # of the magnitudes each seventh says what the step is to be


def three_bits(step: float) -> float:
    """The nearest number of three bits of significand: its multiples are exact, and what is left of a float32 is, too."""
    significand, exponent = math.frexp(step)
    return math.ldexp(round(significand * 8) / 8, exponent)


def integers(magnitudes: torch.Tensor, step: float) -> torch.Tensor:
    return (magnitudes / step).add_(1 - UP_FROM).floor_().clamp_(max=MOST)


def entropy(counts: np.ndarray) -> np.ndarray:
    """(..., 4) counts of the integers -> bits (...), their signs included."""
    counts = np.float64(counts)
    shares = counts / np.maximum(counts.sum(-1, keepdims=True), 1)
    return -(counts * np.log2(np.where(shares > 0, shares, 1))).sum(-1) + counts[..., 1:].sum(-1)


class Filling:
    """The step of a message from its own magnitudes, so that what it costs fills what the budget has left."""

    def __init__(self, bits: float):
        self.bits, self.overspent, self.ratio = bits, 0.0, 1.0  # the last is what was spent over what was foreseen

    def step(self, magnitudes: torch.Tensor) -> float:
        target = max(0.3 * self.bits, self.bits - self.overspent / 10)
        self.foreseen = target
        each = target / self.ratio / len(magnitudes)
        sample = magnitudes[::SAMPLE]
        # Never below where the integers saturate: there a smaller step takes fewer bits, and asks for a smaller one yet.
        low, high = 0.4 * float(sample.mean()) + 1e-30, 2 * float(sample.max()) + 1e-29
        for _ in range(16):
            step = math.sqrt(low * high)
            counts = np.bincount(integers(sample, step).numpy().astype(np.int64), minlength=MOST + 1)
            low, high = (step, high) if entropy(counts) > each * len(sample) else (low, step)
        return max(three_bits(high), 2.0 ** -100)

    def note(self, spent: float) -> None:
        self.overspent += spent - self.bits
        self.ratio *= min(1.3, max(0.75, spent / self.foreseen)) ** 0.3

    def arriving(self, numbers, sizes):
        magnitudes = numbers.abs()
        step = self.step(magnitudes)
        levels = integers(magnitudes, step)
        begins = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        counts = np.stack([np.add.reduceat(levels.numpy() == level, begins, dtype=np.int64) for level in range(MOST + 1)], axis=-1)
        spent = entropy(counts).sum() + TABLE_BITS * len(sizes)
        self.note(spent)
        return levels * numbers.sign() * step, math.ceil(spent / 8)

    def state(self):
        return self.overspent, self.ratio

    def load(self, state):
        self.overspent, self.ratio = state


class Entropy:
    """Integers of at most 3 in a step that all fragments of a message share, entropy coded with a table a fragment."""

    def __init__(self, row, fragments):
        self.share = 1 / row.period
        overhead = fragments.overhead_bytes + fragments.value_bytes
        self.bits = 8 * (row.traffic * 4 * fragments.elements - overhead)

    def encoder(self):
        return Filling(self.bits)


class Fixed:
    """Of codes that take as many bits whatever they say: an encoder of itself, without a state."""

    def encoder(self):
        return self

    def state(self):
        return None

    def load(self, state):
        pass

    def arriving(self, numbers, sizes):
        """By runs of fragments of one size, (F, size)."""
        arrived, begin = [], 0
        for size, run in itertools.groupby(sizes):
            end = begin + size * len(list(run))
            arrived.append(self.rounded(numbers[begin:end].view(-1, size)).flatten())
            begin = end
        return torch.cat(arrived), sum(self.bytes(size) for size in sizes)


class Trits(Fixed):
    """Minus one, 0 or one of a scale that a fragment has to itself: five to a byte, and two bytes of scale."""

    def __init__(self, row, fragments):
        self.scale = row.scale
        self.share = share_within(row, fragments, fragments.value_bytes, self.bytes)

    def bytes(self, elements):
        return -(-elements // 5) + 2

    def rounded(self, numbers):
        magnitudes = numbers.abs()
        scale = (self.scale * magnitudes.mean(1, keepdim=True)).bfloat16().float()
        return (magnitudes >= scale / 2) * numbers.sign() * scale


class Blocks(Fixed):
    """The same of blocks of 64, whose scale is a power of two, the nearest in the logarithm: thirteen bytes, and one of scale."""

    def __init__(self, row, fragments):
        self.scale = row.scale
        self.share = share_within(row, fragments, fragments.value_bytes, self.bytes)

    def bytes(self, elements):
        blocks, left = divmod(elements, BLOCK_ELEMENTS)
        return 14 * blocks + (1 + -(-left // 5) if left else 0)

    def exponents(self, magnitudes):
        return torch.frexp(self.scale * 2 ** 0.5 * magnitudes.mean(-1, keepdim=True)).exponent.long() - 1

    def rounded(self, numbers):
        elements = numbers.shape[1]
        blocks = torch.nn.functional.pad(numbers, (0, -elements % BLOCK_ELEMENTS)).unflatten(1, (-1, BLOCK_ELEMENTS))
        magnitudes = blocks.abs()
        scale = POWERS[self.exponents(magnitudes).clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT) + LARGEST_EXPONENT]
        return ((magnitudes >= scale / 2) * blocks.sign() * scale).flatten(1)[:, :elements]


class Top(Fixed):
    """The largest of a fragment: twelve bits say where, one the sign, and one whether it is 0.8 or 1.6 of the mean of them, which two bytes
    say."""

    def __init__(self, row, fragments):
        self.share = 1 / row.period
        overhead = fragments.overhead_bytes + fragments.value_bytes
        bits = 8 * (row.traffic * 4 * fragments.elements - overhead) * row.period - 16 * len(fragments.sizes)
        self.kept = bits / 14 / fragments.elements

    def count(self, elements):
        return max(1, math.floor(self.kept * elements))

    def bytes(self, elements):
        return -(-self.count(elements) * 14 // 8) + 2

    def rounded(self, numbers):
        places = numbers.abs().topk(self.count(numbers.shape[1]), sorted=False).indices
        values = numbers.gather(1, places)
        mean = values.abs().mean(1, keepdim=True).bfloat16().float()
        told = torch.where(values.abs() > 1.25 * mean, 1.6, 0.8) * mean * values.sign()
        return torch.zeros_like(numbers).scatter_(1, places, told)


CODES = {"entropy": Entropy, "trits": Trits, "blocks": Blocks, "top": Top}


class Levels:
    """Each worker steps its own optimizer. Of the fragments of largest score, mean |local delta| times age, the local delta joins what
    earlier messages left out, is sent in the code, and what the code leaves out waits in `rest`. The server adds the mean of what arrives to
    what its replies left out, and replies in the same code. What a worker computes with is then the shared parameters on these fragments; the
    local delta of the others stays in it. Nothing fades, and nothing is lost: at every element the shared parameters lag what all optimizers
    did by the mean of rest and local delta, and by what waits at the server."""

    def __init__(self, task, row):
        self.task, self.row = task, row
        self.replicas = Replicas(task, row, row.workers)
        self.fragments = Fragments(task.shapes(), row)
        self.code = named(CODES, row, "code")(row, self.fragments)
        self.choice = ByValue(dataclasses.replace(row, age_power=1.0), self.fragments, self.code.share)
        self.shared = self.replicas.y[0].clone()
        self.rest = torch.zeros_like(self.replicas.y)
        self.server_rest = torch.zeros_like(self.shared)
        self.up = [self.code.encoder() for _ in range(row.workers)]
        self.down = self.code.encoder()

    def step(self, step, rate):
        losses, gradients = self.task.gradients(self.replicas.y, step)
        self.replicas.step(gradients, rate)
        chosen = self.choice.decide(step, self.replicas.y, self.shared, bytes(len(self.fragments.sizes)))
        if not chosen:
            return Step(float(losses.mean()), self.fragments.value_bytes, self.fragments.value_bytes)
        elements = self.fragments.indices(chosen)
        sizes = [self.fragments.sizes[fragment] for fragment in chosen]
        overhead = self.fragments.overhead_bytes + self.fragments.value_bytes
        waiting = self.rest[:, elements] + (self.shared[elements] - self.replicas.y[:, elements])
        messages = [encoder.arriving(numbers, sizes) for encoder, numbers in zip(self.up, waiting)]
        sent = torch.stack([numbers for numbers, _ in messages])
        self.rest[:, elements] = waiting - sent
        wanted = self.server_rest[elements] + sent.mean(0)
        reply, reply_bytes = self.down.arriving(wanted, sizes)
        self.server_rest[elements] = wanted - reply
        self.shared[elements] -= reply
        self.replicas.y[:, elements] = self.shared[elements]
        up_bytes = sum(message_bytes for _, message_bytes in messages) / len(messages)
        return Step(float(losses.mean()), overhead + round(up_bytes), overhead + reply_bytes)

    def parameters(self):
        return self.shared

    def workers_mean(self):
        return self.replicas.y.mean(0)

    def facts(self, step):
        """How much waits outside over what the shared parameters have."""
        return {"rest": float(self.rest.abs().mean() / self.shared.abs().mean())}

    def state(self, step):
        return {"replicas": self.replicas.state(), "choice": self.choice.state(step), "shared": self.shared, "rest": self.rest,
                "server_rest": self.server_rest, "codes": [encoder.state() for encoder in [*self.up, self.down]]}

    def load(self, state):
        self.replicas.load(state["replicas"])
        self.choice.load(state["choice"])
        for name in ("shared", "rest", "server_rest"):
            getattr(self, name).copy_(state[name])
        for encoder, saved in zip([*self.up, self.down], state["codes"]):
            encoder.load(saved)
