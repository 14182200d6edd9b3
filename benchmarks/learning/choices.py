# SPDX-License-Identifier: MIT
"""Which parts local updates bring together in a step, within the same bytes. A choice has
    decide(step, y, shared, is_held) -> parts
    value_bytes                     that deciding costs a worker in a step, each way
    period                          the steps between two sendings of a part, on average
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


class OneByOne:
    """As many parts in every step as the bytes allow, those of the largest priority first. Subclasses have memory, an array;
    priorities(step, y, shared), (P,) float64; and note(step, chosen), after which it is another memory."""

    def __init__(self, row, parts, value_bytes=0, at_least_every=0):
        self.parts, self.value_bytes = parts, value_bytes
        share = share_within(row, parts, value_bytes)
        self.period = 1 / share
        self.selector = parts.selector(send_budget=share, at_least_every=at_least_every)

    def decide(self, step, y, shared, is_held):
        chosen = list(self.selector.decide(step, self.priorities(step, y, shared), is_held))
        self.selector.commit(step)
        self.note(step, chosen)
        return chosen

    def state(self, step):
        return {"memory": self.memory, "selector": self.parts.saved(self.selector, step)}

    def load(self, state):
        self.memory = state["memory"].copy()
        self.selector.load(state["selector"])


class ByValue(OneByOne):
    """The parts that have drifted most. With age_power=1 those of which value times waiting is most. That order has the least drift in the
    mean over parts and steps, where drifts grow as c k^b in k steps: a part that goes out every k steps, at a price p, costs
    (sum of c j^b over j < k, + p) / k, which is least where k c k^b less that sum, b / (b + 1) of value times waiting, is p. The order by
    value alone has the least largest drift."""

    def __init__(self, row, parts):
        self.value, self.age_power = named(VALUES, row, "value"), row.age_power
        super().__init__(row, parts, parts.value_bytes, row.at_least_every)
        self.memory = np.zeros(len(parts.sizes))  # the step in which each was last sent

    def priorities(self, step, y, shared):
        return self.parts.agreed(self.value(self.parts, shared - y, shared)) * (step - self.memory) ** self.age_power

    def note(self, step, chosen):
        self.memory[chosen] = step


class InTurn(OneByOne):
    """Those that have waited longest: the order of the model, round and round. The schedule of Streaming DiLoCo (Douillard et al.,
    arXiv 2501.18512) with parts in place of its fragments."""

    def __init__(self, row, parts):
        super().__init__(row, parts)
        self.memory = np.arange(len(parts.sizes))  # the queue

    def priorities(self, step, y, shared):
        priorities = np.empty(len(self.memory))
        priorities[self.memory] = np.arange(len(self.memory), 0, -1)
        return priorities

    def note(self, step, chosen):
        is_sent = np.isin(self.memory, chosen)
        self.memory = np.concatenate([self.memory[~is_sent], self.memory[is_sent]])


class AllAtOnce:
    """Everything, and then nothing for a while: DiLoCo (Douillard et al., arXiv 2311.08105)."""

    value_bytes = 0

    def __init__(self, row, parts):
        self.all = list(range(len(parts.sizes)))
        self.period = math.ceil(parts.frame_bytes(self.all) / (row.traffic * 4 * parts.elements))
        if row.delay >= self.period:
            raise ValueError(f"delay={row.delay}: everything goes out every {self.period} steps, before the last has arrived")

    def decide(self, step, y, shared, is_held):
        return self.all if step % self.period == 0 else []

    def state(self, step):
        return None

    def load(self, state):
        pass


CHOICES = {"value": ByValue, "turn": InTurn, "all": AllAtOnce}
