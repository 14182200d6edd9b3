# SPDX-License-Identifier: MIT
import dataclasses
from typing import List, Optional, Sequence

import torch

import lamina
from lamina.torch._cpu import Place

# The representative value of a fragment: the order of a norm of its elements, and the power of their number that divides it.
NORMS = {"mean_abs": (1, 1.0), "l1_norm": (1, 0.0), "l2_norm": (2, 0.0), "root_mean_square": (2, 0.5),
         "max_abs": (float("inf"), 0.0)}


class TorchBackend:
    """The step's numbers by torch's operators, on whatever device the gradients are; the decision is C++ on the host. On a GPU
    everything is enqueued on the current stream. The host waits three times a step: for the flag of NaN, for which layers have
    a gradient together with the values, and where a scaler is asked for its scale or max_norm needs the norm; with overlap also for what says that the ranks
    have not parted, during the backward pass."""

    def __init__(self, layout: lamina.Layout, options: lamina.Options, wire: str, device: torch.device) -> None:
        chosen = dataclasses.asdict(options)
        self._norm, power = NORMS[chosen.pop("value")]
        self._momentum = options.momentum
        self._selector = lamina.Selector(layout, **chosen)
        self._wire = getattr(torch, wire)
        self.fragments, self.fragments_of = self._selector.fragments, self._selector.fragments_of
        self._sizes = layout.sizes
        self._residual = torch.zeros(layout.elements, dtype=torch.float32, device=device)
        self._velocity = torch.zeros(layout.elements if options.momentum else 0, dtype=torch.float32, device=device)
        self._residual_layers = torch.split(self._residual, self._sizes)
        self._velocity_layers = torch.split(self._velocity, self._sizes) if options.momentum else ()
        self._residual_fragments = torch.split(self._residual, self.fragments.sizes)
        self._velocity_fragments = torch.split(self._velocity, self.fragments.sizes) if options.momentum else ()
        self._divisors = torch.tensor(self.fragments.sizes, dtype=torch.float64, device=device).clamp_(min=1).pow_(power)
        self._left_out = torch.zeros((), dtype=torch.int64, device=device)
        self._sent: List[int] = []
        self._values: Optional[torch.Tensor] = None
        self._expected = torch.full((len(self.fragments),), torch.inf, dtype=torch.float64)
        self._is_open = False
        self.step = 0

    def take(self, buffers: Sequence[torch.Tensor], places: Sequence[Place]) -> None:
        self._gradients = [buffers[bucket].narrow(0, begin, size) for (bucket, begin), size in zip(places, self._sizes)]

    def release(self) -> None:
        self._gradients = []

    def first_non_finite(self) -> Optional[int]:
        bad = torch.stack([~torch.isfinite(each).all() for each in self._gradients]).cpu()
        return int(bad.nonzero()[0]) if bad.any() else None

    def find_zero(self) -> bytes:
        return bytes(torch.stack([~each.any() for each in self._gradients]).cpu().tolist())

    def begin(self, sent: Optional[List[int]]) -> List[int]:
        """Begins a step that sends these fragments, or everything."""
        self.step += 1
        self._is_open, self._values = True, None
        self._sent = list(range(len(self.fragments))) if sent is None else sent
        self._selector.take(self.step, self._sent)
        return self._sent

    def add_all(self, scale: float) -> None:
        """Begins a step with the gradients that were taken."""
        self.step += 1
        self._is_open = True
        for layer, gradient in enumerate(self._gradients):
            self.add(layer, gradient, scale)

    def add(self, layer: int, gradient: torch.Tensor, scale: float) -> None:
        added = gradient.float() * scale if scale != 1 else gradient.float()
        # The residual is the only copy of what was not sent: nothing that is not finite comes in, by a sum neither.
        residual = self._residual_layers[layer]
        moved = self._velocity_layers[layer] * self._momentum + added if self._momentum else added
        after = residual + moved
        is_good = torch.isfinite(after)
        if self._momentum:
            is_good &= torch.isfinite(moved)
            self._velocity_layers[layer].copy_(torch.where(is_good, moved, self._velocity_layers[layer]))
        self._left_out += is_good.numel() - is_good.sum()
        residual.copy_(torch.where(is_good, after, residual))

    def pack_layer(self, layer: int, to: torch.Tensor, scale: float) -> None:
        """What is sent of a layer that has its gradient."""
        is_sent, filled = set(self._sent), 0
        for fragment in range(*self.fragments_of(layer)):
            if fragment in is_sent:
                written = self._residual_fragments[fragment]
                if self._wire is torch.float32:
                    written = written * scale
                else:
                    written = written.clamp(torch.finfo(self._wire).min, torch.finfo(self._wire).max)
                to[filled:filled + written.numel()] = written
                filled += written.numel()

    def expected_values(self) -> torch.Tensor:
        """After commit(): the values to expect in the next step."""
        return self._expected

    def plan(self, agreed: torch.Tensor) -> List[int]:
        """What the next step sends, by agreed values."""
        return self._selector.decide(self.step + 1, agreed)

    def values(self) -> torch.Tensor:
        self._values = (torch.stack([self._norm_of(each) for each in self._residual_fragments]) / self._divisors).cpu()
        return self._values

    def _norm_of(self, fragment: torch.Tensor) -> torch.Tensor:
        if not len(fragment):
            return torch.zeros((), dtype=torch.float64, device=fragment.device)
        norm: torch.Tensor = torch.linalg.vector_norm(fragment, self._norm, dtype=torch.float64)
        return norm

    def select(self, agreed: torch.Tensor, held: bytes) -> List[int]:
        self._sent = self._selector.decide(self.step, agreed, held)
        return self._sent

    @property
    def threshold(self) -> float:
        return self._selector.threshold

    @property
    def sent_elements(self) -> int:
        return self._selector.sent_elements

    @property
    def sent_bitmap(self) -> bytes:
        return self._selector.sent_bitmap

    @property
    def left_out_elements(self) -> int:
        return int(self._left_out)

    def pack(self, world_size: int) -> torch.Tensor:
        packed = torch.cat([self._residual_fragments[fragment] for fragment in self._sent] or [self._residual[:0]])
        if self._wire is torch.float32:
            return packed.mul_(1 / world_size)
        packed = packed.clamp_(torch.finfo(self._wire).min, torch.finfo(self._wire).max).to(self._wire)
        return packed

    def commit(self) -> None:
        values = self.values() if self._values is None else self._values
        self._expected = torch.frombuffer(self._selector.forecast(self.step, values), dtype=torch.float64)
        for fragment in self._sent:
            residual = self._residual_fragments[fragment]
            if self._wire is torch.float32:
                residual.zero_()
            else:
                residual.sub_(residual.clamp(torch.finfo(self._wire).min, torch.finfo(self._wire).max).to(self._wire).float())
            if self._momentum:
                self._velocity_fragments[fragment].zero_()
        self._selector.commit(self.step)
        self._is_open = False

    def unpack(self, mean: torch.Tensor) -> None:
        sent, begin = set(self._sent), 0
        for layer, gradient in enumerate(self._gradients):
            within = 0
            for fragment in range(*self.fragments_of(layer)):
                size = self.fragments.sizes[fragment]
                to = gradient[within:within + size]
                if fragment in sent:
                    if to.dtype is torch.float32:
                        to.copy_(mean[begin:begin + size])
                    else:
                        to.copy_(mean[begin:begin + size].clamp(torch.finfo(to.dtype).min, torch.finfo(to.dtype).max))
                    begin += size
                else:
                    to.zero_()
                within += size

    def abandon(self) -> None:
        """The step ends here; what was added stays in the residual, and the next step has the same number."""
        if self._is_open:
            self.step -= 1
            self._is_open = False
        self.release()

    def save(self) -> bytes:
        velocity = self._velocity.cpu() if self._momentum else None
        return self._selector.save(self.step, self._residual.cpu(), velocity, self._expected)

    def load(self, memory: memoryview) -> None:
        self.step, residual, velocity, expected = self._selector.load(memory)
        self._expected = torch.frombuffer(expected, dtype=torch.float64)
        self._residual.copy_(torch.frombuffer(residual, dtype=torch.float32))
        if self._momentum:
            self._velocity.copy_(torch.frombuffer(velocity, dtype=torch.float32))

    def residual(self, layer: int) -> torch.Tensor:
        return self._residual_layers[layer].clone()
