# SPDX-License-Identifier: MIT
"""Schemes that exchange, in every step, the fragments of largest score. The score of a fragment is its representative value (the mean
magnitude of the local deltas) times its age (the steps since it was last sent)."""

import torch

from gpu import payloads
from gpu.levels import Levels
from gpu.schemes import Scheme


class ByScore(Scheme):
    """Subclasses have `chosen`, the number of fragments of a step, and send(numbers, value, sizes) and reply(numbers, value, sizes), which
    return what arrives and its bits. `value` is the mean representative value of the chosen fragments. What a message leaves out is kept
    outside of what the worker computes with, in its residual."""

    def __init__(self, layout, row, x):
        super().__init__(layout, row, x)
        self.age = torch.zeros(layout.fragments, device=layout.device)
        self.residual = torch.zeros_like(self.y)

    def exchange(self, step):
        self.age += 1
        x, y, server_residual = (self.layout.in_fragments(each) for each in (self.x, self.y, self.server_residual))
        deltas = self.layout.in_fragments(self.x - self.y)
        values = deltas.abs().sum(-1).mean(0) / self.layout.sizes
        chosen = (values * self.age).topk(self.chosen).indices
        self.age[chosen] = 0
        value, sizes = values[chosen].mean(), self.layout.sizes[chosen]
        sent, left, up_bits = self.sent(chosen, deltas[:, chosen], value, sizes)
        wanted = server_residual[chosen] + sent.mean(0)
        reply, down_bits = self.reply(wanted[None], value, sizes)
        server_residual[chosen] = wanted - reply[0]
        x[chosen] -= reply[0]
        y[:, chosen] = x[chosen] - left
        self.count(up_bits, down_bits)

    def sent(self, chosen, deltas, value, sizes):
        """What arrives of the chosen fragments, what stays of their local deltas within the workers, and the bits of a message."""
        residual = self.layout.in_fragments(self.residual)
        pending = residual[:, chosen] + deltas
        sent, bits = self.send(pending, value, sizes)
        residual[:, chosen] = pending - sent
        return sent, 0, bits


class InLevels(ByScore):
    def __init__(self, layout, row, x):
        super().__init__(layout, row, x)
        self.chosen = round(layout.fragments / row.H)
        self.up, self.down = Levels(layout, row.pct), Levels(layout, row.pct)

    def send(self, numbers, value, sizes):
        return self.up.send(numbers, value, sizes)

    def reply(self, numbers, value, sizes):
        return self.down.send(numbers, value / 2, sizes)


class InTrits(ByScore):
    def __init__(self, layout, row, x):
        super().__init__(layout, row, x)
        self.chosen = round(layout.fragments / row.H)
        self.bits = self.chosen * payloads.TRITS_BITS + payloads.VALUE_BITS * layout.fragments

    def send(self, numbers, value, sizes):
        return payloads.trits(numbers, sizes, self.row.scale), self.bits

    reply = send


class InInt4(ByScore):
    """What rounding leaves out stays in the local delta. As many fragments are sent as fill the budget, values not counted. ValueError if
    there is not one."""

    def __init__(self, layout, row, x):
        super().__init__(layout, row, x)
        self.residual = None
        self.chosen, self.bits = int4_message(layout, row.pct)
        if not self.chosen:
            raise ValueError(f"pct={row.pct:g}: not one fragment fits")

    def sent(self, chosen, deltas, value, sizes):
        sent, bits = self.send(deltas, value, sizes)
        return sent, deltas - sent, bits

    def send(self, numbers, value, sizes):
        return payloads.int4(numbers), self.bits

    reply = send


def int4_message(layout, pct: float) -> tuple[int, float]:
    """The fragments of a message, and its bits."""
    each = payloads.INT4_BITS * payloads.ELEMENTS + payloads.INT4_OVERHEAD_BITS
    chosen = int(pct / 100 * 32 * layout.elements / each)
    return chosen, chosen * each + payloads.VALUE_BITS * layout.fragments
