# SPDX-License-Identifier: MIT
"""Which fragments local updates bring together in a step, within the same bytes. A choice has
    decide(step, y, shared, is_held) -> fragments
    value_bytes                     that deciding costs a worker in a step, each way
    period                          the steps between two sendings of a fragment, on average
    state(step), load(state)
"""

import math

import numpy as np

from rows import named

VALUES = {  # of the local deltas (W, N) and the shared parameters (N,): (W, P), whose mean decides
    "mean_abs": lambda fragments, delta, shared: fragments.means(delta.abs()),
    "root_mean_square": lambda fragments, delta, shared: np.sqrt(fragments.means(delta.square())),
    "l2_norm": lambda fragments, delta, shared: np.sqrt(fragments.means(delta.square()) * np.float32(fragments.sizes)),
    # To the fragment's own scale, which all workers know.
    "relative": lambda fragments, delta, shared: fragments.means(delta.abs()) / (fragments.means(shared.abs()[None]) + np.float32(1e-12)),
}


def share_within(row, fragments, value_bytes: int, fragment_bytes) -> float:
    """The share of the elements that may go out in a step so that all bytes are row.traffic of the dense run's, where a fragment of so many
    elements takes fragment_bytes of them."""
    dense = 4 * fragments.elements
    overhead = fragments.overhead_bytes + value_bytes
    if overhead >= row.traffic * dense:
        raise ValueError(f"traffic={row.traffic:g}: headers and values alone are {overhead / dense:.2%} of the dense run's bytes")
    return min(1.0, (row.traffic * dense - overhead) / sum(fragment_bytes(size) for size in fragments.sizes))


class OneByOne:
    """As many fragments in every step as the bytes allow, those of the largest priority first. Subclasses have memory, an array;
    priorities(step, y, shared), (P,) float64; and note(step, chosen), after which it is another memory."""

    def __init__(self, row, fragments, value_bytes=0, at_least_every=0, share=None):
        """The share of the elements that go out in a step; None: what the bytes allow."""
        self.fragments, self.value_bytes = fragments, value_bytes
        share = share or share_within(row, fragments, value_bytes, fragments.payload.bytes)
        self.period = 1 / share
        self.selector = fragments.selector(send_budget=share, at_least_every=at_least_every)

    def decide(self, step, y, shared, is_held):
        chosen = list(self.selector.decide(step, self.priorities(step, y, shared), is_held))
        self.selector.commit(step)
        self.note(step, chosen)
        return chosen

    def state(self, step):
        return {"memory": self.memory, "selector": self.fragments.saved(self.selector, step)}

    def load(self, state):
        self.memory = state["memory"].copy()
        self.selector.load(state["selector"])


class ByValue(OneByOne):
    """The fragments that have the largest local deltas. With age_power=1 those of which the score is most. That order has the least delta in the
    mean over fragments and steps, where deltas grow as c k^b in k steps: a fragment that goes out every k steps, at a price p, costs
    (sum of c j^b over j < k, + p) / k, which is least where k c k^b less that sum, b / (b + 1) of the score, is p. The order by
    value alone has the least largest delta."""

    def __init__(self, row, fragments, share=None):
        self.value, self.age_power = named(VALUES, row, "value"), row.age_power
        super().__init__(row, fragments, fragments.value_bytes, row.at_least_every, share)
        self.memory = np.zeros(len(fragments.sizes))  # the step in which each was last sent

    def priorities(self, step, y, shared):
        return self.fragments.agreed(self.value(self.fragments, shared - y, shared)) * (step - self.memory) ** self.age_power

    def note(self, step, chosen):
        self.memory[chosen] = step


class InTurn(OneByOne):
    """Those that have waited longest: the order of the model, round and round. The schedule of Streaming DiLoCo (Douillard et al.,
    arXiv 2501.18512) with the fragments of this study in place of its own."""

    def __init__(self, row, fragments):
        super().__init__(row, fragments)
        self.memory = np.arange(len(fragments.sizes))  # the queue

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

    def __init__(self, row, fragments):
        self.all = list(range(len(fragments.sizes)))
        self.period = math.ceil(fragments.frame_bytes(self.all) / (row.traffic * 4 * fragments.elements))
        if row.delay >= self.period:
            raise ValueError(f"delay={row.delay}: everything goes out every {self.period} steps, before the last has arrived")

    def decide(self, step, y, shared, is_held):
        return self.all if step % self.period == 0 else []

    def state(self, step):
        return None

    def load(self, state):
        pass


CHOICES = {"value": ByValue, "turn": InTurn, "all": AllAtOnce}
