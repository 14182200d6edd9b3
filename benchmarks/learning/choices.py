# SPDX-License-Identifier: MIT
"""Which parts local updates bring together in a step, within the same bytes. A choice has
    decide(step, y, shared, is_held) -> parts
    value_bytes                     that deciding costs a worker in a step, each way
    state(step), load(state)
"""

import math

import numpy as np

from rows import named

VALUES = {  # of the drifts (W, N) and the shared parameters (N,): (W, P), whose mean decides
    "mean_abs": lambda parts, drift, shared: parts.means(drift.abs()),
    "root_mean_square": lambda parts, drift, shared: np.sqrt(parts.means(drift.square())),
    "l2_norm": lambda parts, drift, shared: np.sqrt(parts.means(drift.square()) * np.float32(parts.sizes)),
    # To the part's own scale, which all workers know.
    "relative": lambda parts, drift, shared: parts.means(drift.abs()) / (parts.means(shared.abs()[None]) + np.float32(1e-12)),
}


def share_within(row, parts, value_bytes: int) -> float:
    """The share of the elements that may go out in a step so that all bytes are row.traffic of the dense run's."""
    dense = 4 * parts.elements
    overhead = parts.overhead_bytes + value_bytes
    if overhead >= row.traffic * dense:
        raise ValueError(f"traffic={row.traffic:g}: headers and values alone are {overhead / dense:.2%} of the dense run's bytes")
    return min(1.0, (row.traffic * dense - overhead) / sum(parts.payload.bytes(size) for size in parts.sizes))


class ByValue:
    """The parts that have drifted most."""

    def __init__(self, row, parts):
        self.parts, self.value, self.value_bytes = parts, named(VALUES, row, "value"), parts.value_bytes
        self.selector = parts.selector(byte_budget=share_within(row, parts, self.value_bytes))

    def decide(self, step, y, shared, is_held):
        values = self.parts.agreed(self.value(self.parts, shared - y, shared))
        chosen = list(self.selector.decide(step, values, is_held))
        self.selector.commit(step)
        return chosen

    def state(self, step):
        return self.parts.saved(self.selector, step)

    def load(self, state):
        self.selector.load(state)


class InTurn:
    """Those that have waited longest: the order of the model, round and round. The schedule of Streaming DiLoCo (Douillard et al.,
    arXiv 2501.18512) with parts in place of its fragments."""

    value_bytes = 0

    def __init__(self, row, parts):
        self.parts = parts
        self.selector = parts.selector(byte_budget=share_within(row, parts, self.value_bytes))
        self.last = np.zeros(len(parts.sizes))

    def decide(self, step, y, shared, is_held):
        chosen = list(self.selector.decide(step, step - self.last, is_held))
        self.selector.commit(step)
        self.last[chosen] = step
        return chosen

    def state(self, step):
        return {"last": self.last, "selector": self.parts.saved(self.selector, step)}

    def load(self, state):
        self.last[:] = state["last"]
        self.selector.load(state["selector"])


class AllAtOnce:
    """Everything, and then nothing for a while: DiLoCo (Douillard et al., arXiv 2311.08105)."""

    value_bytes = 0

    def __init__(self, row, parts):
        self.all = list(range(len(parts.sizes)))
        self.interval = math.ceil(parts.frame_bytes(self.all) / (row.traffic * 4 * parts.elements))
        if row.delay >= self.interval:
            raise ValueError(f"delay={row.delay}: everything goes out every {self.interval} steps, before the last has arrived")

    def decide(self, step, y, shared, is_held):
        return self.all if step % self.interval == 0 else []

    def state(self, step):
        return None

    def load(self, state):
        pass


CHOICES = {"value": ByValue, "turn": InTurn, "all": AllAtOnce}
