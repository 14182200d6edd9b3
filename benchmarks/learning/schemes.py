# SPDX-License-Identifier: MIT
"""What the workers tell each other. A scheme makes a step of the training of all W workers, in turn, and counts the bytes:
    step(step, rate) -> Step        counted from 1
    parameters() -> (N,)            what would be evaluated or saved
    workers_mean() -> (N,)          the mean of what the workers have: the same, but for what is still in their deltas
    facts(step) -> dict             of the run so far, for its result
    state(step), load(state)        after a step: all it needs to go on
"""

import dataclasses

import numpy as np
import torch

from choices import CHOICES
from fragments import Fragments
from baselines.demo import DeMo
from baselines.largest import Dgc, ScaleCom
from baselines.low_rank import PowerSgd
from baselines.one_bit import OneBitAdam
from baselines.sparse_loco import SparseLoco
from levels import Levels
from rows import FIRST_FIELDS, named
from training import Replicas, Shared, Step, clipped, worker_clip


class Dense(Shared):
    """Everything is sent as it is: the optimizer steps on the mean of all gradients."""

    def __init__(self, task, row):
        self.task = task
        self.replicas = Replicas(task, row, 1)
        self.bytes = 4 * self.replicas.y.numel() if row.workers > 1 else 0

    def step(self, step, rate):
        losses, gradients = self.task.gradients(self.replicas.y, step)
        self.replicas.step(gradients, rate)
        return Step(float(losses.mean()), self.bytes, self.bytes)

    def state(self, step):
        return self.replicas.state()

    def load(self, state):
        self.replicas.load(state)


HELD_BACK = {"zeros": False, "nothing": True}


class Gradients(Shared):
    """Layer dropping of gradients (docs/algorithm.md) with agreed selection. The optimizer steps on what arrives. Of fragments that were held
    back it gets zeros, as under DDP; or nothing, and then neither they nor its state move. With a correction (Lin et al., arXiv
    1712.01887, equations 4 and 5) a worker's momentum is added to its residual, and cleared with what is sent."""

    def __init__(self, task, row):
        self.task, self.row = task, row
        self.fragments = Fragments(task.shapes(), row)
        self.stands_still = named(HELD_BACK, row, "held_back")
        self.replicas = Replicas(task, row, 1, self.fragments.sizes if self.stands_still else None, decays=1 / (1 - row.correction))
        self.clip = worker_clip(task, row, self.replicas)
        self.selector = self.fragments.selector(drop_ratio=row.drop_ratio)
        self.residual = torch.zeros(row.workers, self.fragments.elements)
        if row.correction and row.optimizer != "sgd":
            raise ValueError(f"correction is a momentum of its own: the optimizer must be sgd, got {row.optimizer!r}")
        self.velocity = torch.zeros_like(self.residual) if row.correction else None

    def step(self, step, rate):
        losses, gradients = self.task.gradients(self.replicas.y.expand(self.row.workers, -1), step)
        gradients = clipped(gradients, self.clip)
        if self.velocity is not None:
            gradients = self.velocity.mul_(self.row.correction).add_(gradients)
        self.residual += gradients
        chosen = list(self.selector.decide(step, self.fragments.agreed(self.fragments.means(self.residual.abs()))))
        elements = self.fragments.indices(chosen)
        waiting = self.residual[:, elements]
        sent = self.fragments.arriving(chosen, waiting)
        self.residual[:, elements] = waiting - sent
        if self.velocity is not None:
            self.velocity[:, elements] = 0
        self.selector.commit(step)
        arrived = torch.zeros(1, self.fragments.elements)
        arrived[0, elements] = sent.mean(0)
        self.replicas.step(arrived, rate, chosen if self.stands_still else None)
        each_way = self.fragments.frame_bytes(chosen) + self.fragments.value_bytes
        return Step(float(losses.mean()), each_way, each_way)

    def state(self, step):
        return {"replicas": self.replicas.state(), "residual": self.residual, "velocity": self.velocity,
                "selector": self.fragments.saved(self.selector, step)}

    def load(self, state):
        self.replicas.load(state["replicas"])
        self.residual.copy_(state["residual"])
        if self.velocity is not None:
            self.velocity.copy_(state["velocity"])
        self.selector.load(state["selector"])


# Of the outer momentum and of the periods that a fragment has waited, a tensor, 1 on average: what is kept of the momentum m of its
# elements, how much of the mean G joins it, and how much of it is then taken off besides G.
CLOCKS = {
    "sends": lambda momentum, periods: (momentum, 1.0, momentum),
    # What the last sends say has grown old.
    "fading": lambda momentum, periods: (momentum ** periods, 1.0, momentum ** periods),
    # m is a speed, delta per period, so that it counts for the time that has passed, as if every period had brought its share of G.
    "steps": lambda momentum, periods: (momentum ** periods,
                                        (1 - momentum ** periods) / ((1 - momentum) * periods) if momentum != 1 else 1.0,
                                        periods * momentum ** periods),
}


class Local:
    """Local updates. Each worker steps with its own optimizer at once, on its own y. What it did that the others have not seen is its
    delta, shared - y. Chosen fragments of the local deltas are sent and averaged, and an outer optimizer brings them into the shared parameters; the
    worker is shifted by what it sent and by what came back, so that the rest of its delta stays. By the row it may fade: workers are then
    drawn to the shared parameters, as in elastic averaging (Zhang et al., arXiv 1412.6651), where these are drawn to the workers, too."""

    def __init__(self, task, row):
        self.task, self.row = task, row
        if row.delta_kept != 1 and row.delay:
            raise ValueError(f"delta_kept={row.delta_kept:g} is for delay=0: what is under way must not fade")
        self.replicas = Replicas(task, row, row.workers)
        self.fragments = Fragments(task.shapes(), row)
        self.clock = named(CLOCKS, row, "outer_clock")
        self.choice = named(CHOICES, row, "choice")(row, self.fragments)
        self.shared = self.replicas.y[0].clone()
        self.momentum = torch.zeros_like(self.shared)
        self.rounding = torch.zeros_like(self.shared)  # what rounding took of the outer optimizer's updates, kept by who computes them
        self.rest = torch.zeros_like(self.replicas.y) if row.error_feedback else None  # what messages left out, outside of y
        self.under_way: list[tuple] = []  # (step of arrival, fragments, of each worker its local delta of them, and what it sent), in that order
        self.came = np.full(len(self.fragments.sizes), float(row.delay))  # the step in which each fragment last did
        self.times = np.zeros(len(self.fragments.sizes), int)  # that it did
        self.longest = 0.0  # that one waited, in steps

    def step(self, step, rate):
        losses, gradients = self.task.gradients(self.replicas.y, step)
        self.replicas.step(gradients, rate)
        result = Step(float(losses.mean()), self.choice.value_bytes, self.choice.value_bytes)
        self.arrive(step, result)
        if self.row.delta_kept != 1:
            self.replicas.y.lerp_(self.shared, 1 - self.row.delta_kept)
        is_held = bytearray(len(self.fragments.sizes))
        for _, fragments, _, _ in self.under_way:
            for fragment in fragments:
                is_held[fragment] = 1
        chosen = self.choice.decide(step, self.replicas.y, self.shared, bytes(is_held))
        if chosen:
            elements = self.fragments.indices(chosen)
            delta = self.shared[elements] - self.replicas.y[:, elements]
            sent = self.fragments.arriving(chosen, delta if self.rest is None else delta + self.rest[:, elements])
            self.under_way.append((step + self.row.delay, chosen, sent if self.rest is None else delta, sent))
            result.up_bytes += self.fragments.frame_bytes(chosen)
            self.arrive(step, result)
        return result

    def arrive(self, step, result):
        while self.under_way and self.under_way[0][0] <= step:
            arrival, fragments, delta, sent = self.under_way.pop(0)
            waited = arrival - self.came[fragments]
            self.came[fragments] = arrival
            self.times[fragments] += 1
            self.longest = max(self.longest, waited.max())
            self.bring_together(fragments, self.fragments.indices(fragments), delta, sent, waited / self.choice.period)
            result.down_bytes += self.fragments.frame_bytes(fragments)

    def bring_together(self, fragments, elements, delta, sent, periods):
        """A shift and not an overwrite: what a worker did not send, or has done since, is still in its delta; but with error feedback what a
        message left out waits outside."""
        taken = self.outer_optimizer(fragments, elements, sent.mean(0), periods)
        self.shared[elements] -= taken
        self.replicas.y[:, elements] += delta - taken
        if self.rest is not None:
            self.rest[:, elements] += delta - sent

    def outer_optimizer(self, fragments, elements, mean, periods):
        """Nesterov's, on the fragments that have come after so many periods; the momentum of all others stands still. Returns what is taken
        off them."""
        periods = torch.from_numpy(np.repeat(np.float32(periods), [self.fragments.sizes[fragment] for fragment in fragments]))
        kept, joins, counts = self.clock(self.row.outer_momentum, periods)
        momentum = kept * self.momentum[elements] + joins * mean
        self.momentum[elements] = momentum
        wanted = self.row.outer_rate * (mean + counts * momentum) + self.rounding[elements]
        taken = self.fragments.arriving(fragments, wanted)
        self.rounding[elements] = wanted - taken
        return taken

    def parameters(self):
        return self.shared

    def workers_mean(self):
        return self.replicas.y.mean(0)

    def facts(self, step):
        """How often the fragments came, and for how many steps one waited, those counted that still do."""
        return {"came_least": int(self.times.min()), "came_most": int(self.times.max()),
                "waited_longest": int(max(self.longest, (step - self.came).max()))}

    def state(self, step):
        return {"replicas": self.replicas.state(), "choice": self.choice.state(step), "under_way": self.under_way,
                "shared": self.shared, "momentum": self.momentum, "rounding": self.rounding, "rest": self.rest,
                "came": self.came, "times": self.times, "longest": self.longest}

    def load(self, state):
        self.replicas.load(state["replicas"])
        self.choice.load(state["choice"])
        self.under_way = list(state["under_way"])
        self.came[:], self.times[:], self.longest = state["came"], state["times"], state["longest"]
        for name in ("shared", "momentum", "rounding", *(["rest"] if self.rest is not None else [])):
            getattr(self, name).copy_(state[name])


SCHEMES = {"dense": Dense, "gradients": Gradients, "local": Local, "levels": Levels, "powersgd": PowerSgd, "sparseloco": SparseLoco,
           "dgc": Dgc, "scalecom": ScaleCom, "demo": DeMo, "onebit": OneBitAdam}
# What a scheme reads of a row besides its first fields.
READS = {"dense": "optimizer", "gradients": "optimizer payload fragment drop_ratio clipped correction held_back",
         "local": "optimizer payload error_feedback fragment choice value age_power at_least_every traffic delay delta_kept outer_rate outer_momentum outer_clock",
         "levels": "optimizer code period scale traffic fragment value",
         "powersgd": "optimizer payload clipped rank dense_steps", "sparseloco": "optimizer interval top averaged left_kept unsent sends share answer outer_rate",
         "dgc": "optimizer payload correction share ramp_steps", "scalecom": "optimizer payload clipped share low_pass",
         "demo": "payload top momentum_kept", "onebit": "dense_steps"}


def check_fields(row) -> None:
    """ValueError, naming it, for a field that is not as by default and that the scheme does not read."""
    for field in dataclasses.fields(row)[FIRST_FIELDS:]:
        if getattr(row, field.name) != field.default and field.name not in READS[row.scheme].split():
            raise ValueError(f"{row.scheme} has no {field.name}: it reads {READS[row.scheme].replace(' ', ', ')}")


def scheme_of(task, row):
    """ValueError for a row that cannot be."""
    scheme = named(SCHEMES, row, "scheme")
    check_fields(row)
    return scheme(task, row)
