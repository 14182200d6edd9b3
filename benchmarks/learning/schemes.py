# SPDX-License-Identifier: MIT
"""What the workers tell each other. A scheme makes a step of the training of all W workers, in turn, and counts the bytes:
    step(step, rate) -> Step        counted from 1
    parameters() -> (N,)            what would be evaluated or saved
    state(step), load(state)        after a step: all it needs to go on
"""

import dataclasses

import torch

from choices import CHOICES
from parts import Parts
from rows import named
from training import Replicas


@dataclasses.dataclass
class Step:
    """What came of a step."""

    loss: float  #: the mean over the workers, of their parameters before the step
    up_bytes: int  #: from one worker to the server
    down_bytes: int  #: from the server to one worker


class Dense:
    """Everything is sent as it is: the optimizer steps on the mean of all gradients."""

    def __init__(self, task, row):
        self.task = task
        self.replicas = Replicas(task, row, 1)
        self.bytes = 4 * self.replicas.y.numel() if row.workers > 1 else 0

    def step(self, step, rate):
        losses, gradients = self.task.gradients(self.replicas.y, step)
        self.replicas.step(gradients, rate)
        return Step(float(losses.mean()), self.bytes, self.bytes)

    def parameters(self):
        return self.replicas.y[0]

    def state(self, step):
        return self.replicas.state()

    def load(self, state):
        self.replicas.load(state)


class Gradients:
    """Layer dropping of gradients (docs/scheme.md) with agreed selection. The optimizer steps on what arrives, with zeros for parts
    that were held back, as under DDP."""

    def __init__(self, task, row):
        self.task, self.row = task, row
        self.replicas = Replicas(task, row, 1)
        self.parts = Parts(task.shapes(), row)
        self.selector = self.parts.selector(drop_ratio=row.drop_ratio)
        self.residual = torch.zeros(row.workers, self.parts.elements)

    def step(self, step, rate):
        losses, gradients = self.task.gradients(self.replicas.y.expand(self.row.workers, -1), step)
        self.residual += gradients
        chosen = list(self.selector.decide(step, self.parts.agreed(self.parts.means(self.residual.abs()))))
        elements = self.parts.indices(chosen)
        waiting = self.residual[:, elements]
        sent = self.parts.arriving(chosen, waiting)
        self.residual[:, elements] = waiting - sent
        self.selector.commit(step)
        arrived = torch.zeros(1, self.parts.elements)
        arrived[0, elements] = sent.mean(0)
        self.replicas.step(arrived, rate)
        each_way = self.parts.frame_bytes(chosen) + self.parts.value_bytes
        return Step(float(losses.mean()), each_way, each_way)

    def parameters(self):
        return self.replicas.y[0]

    def state(self, step):
        return {"replicas": self.replicas.state(), "residual": self.residual, "selector": self.parts.saved(self.selector, step)}

    def load(self, state):
        self.replicas.load(state["replicas"])
        self.residual.copy_(state["residual"])
        self.selector.load(state["selector"])


class Local:
    """Local updates. Each worker steps with its own optimizer at once, on its own y. What it did that the others have not seen is its
    drift, shared - y. Chosen parts of the drifts are sent and averaged, and an outer step brings them into the shared parameters; the
    worker is shifted by what it sent and by what came back, so that the rest of its drift stays."""

    def __init__(self, task, row):
        self.task, self.row = task, row
        self.replicas = Replicas(task, row, row.workers)
        self.parts = Parts(task.shapes(), row)
        self.choice = named(CHOICES, row, "choice")(row, self.parts)
        self.shared = self.replicas.y[0].clone()
        self.momentum = torch.zeros_like(self.shared)
        self.rounding = torch.zeros_like(self.shared)  # what rounding took of the outer steps, kept by who computes them
        self.under_way: list[tuple] = []  # (step of arrival, parts, what each worker sent of them), in that order

    def step(self, step, rate):
        losses, gradients = self.task.gradients(self.replicas.y, step)
        self.replicas.step(gradients, rate)
        result = Step(float(losses.mean()), self.choice.value_bytes, self.choice.value_bytes)
        self.arrive(step, result)
        is_held = bytearray(len(self.parts.sizes))
        for _, parts, _ in self.under_way:
            for part in parts:
                is_held[part] = 1
        chosen = self.choice.decide(step, self.replicas.y, self.shared, bytes(is_held))
        if chosen:
            elements = self.parts.indices(chosen)
            drift = self.shared[elements] - self.replicas.y[:, elements]
            self.under_way.append((step + self.row.delay, chosen, self.parts.arriving(chosen, drift)))
            result.up_bytes += self.parts.frame_bytes(chosen)
            self.arrive(step, result)
        return result

    def arrive(self, step, result):
        while self.under_way and self.under_way[0][0] <= step:
            _, parts, sent = self.under_way.pop(0)
            self.bring_together(parts, self.parts.indices(parts), sent)
            result.down_bytes += self.parts.frame_bytes(parts)

    def bring_together(self, parts, elements, sent):
        """A shift and not an overwrite: what a worker did not send, or has done since, is still in its drift."""
        taken = self.outer_step(parts, elements, sent.mean(0))
        self.shared[elements] -= taken
        self.replicas.y[:, elements] += sent - taken

    def outer_step(self, parts, elements, mean):
        """Nesterov's, on the parts that have come; the momentum of all others stands still. Returns what is taken off them."""
        momentum = self.row.outer_momentum * self.momentum[elements] + mean
        self.momentum[elements] = momentum
        wanted = self.row.outer_rate * (mean + self.row.outer_momentum * momentum) + self.rounding[elements]
        taken = self.parts.arriving(parts, wanted)
        self.rounding[elements] = wanted - taken
        return taken

    def parameters(self):
        return self.shared

    def state(self, step):
        return {"replicas": self.replicas.state(), "choice": self.choice.state(step), "under_way": self.under_way,
                "shared": self.shared, "momentum": self.momentum, "rounding": self.rounding}

    def load(self, state):
        self.replicas.load(state["replicas"])
        self.choice.load(state["choice"])
        self.under_way = list(state["under_way"])
        for name in ("shared", "momentum", "rounding"):
            getattr(self, name).copy_(state[name])


SCHEMES = {"dense": Dense, "gradients": Gradients, "local": Local}
