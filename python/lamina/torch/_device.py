# SPDX-License-Identifier: MIT
import dataclasses
from typing import List, Optional, Sequence, Set

import torch

import lamina
from lamina.torch._cpu import Place, write_ahead

# What stands for a part: the order of a norm of its elements, and the power of their number that divides it.
NORMS = {"mean_abs": (1, 1.0), "l1_norm": (1, 0.0), "l2_norm": (2, 0.0), "root_mean_square": (2, 0.5),
         "max_abs": (float("inf"), 0.0)}


class TorchBackend:
    """The step's numbers by torch's operators, on whatever device the gradients are; the decision is C++ on the host. On a GPU
    everything is enqueued on the current stream. The host waits three times a step: for the flag of NaN, for which layers have
    a gradient together with the values, and where a scaler is asked for its scale; with overlap also for what says that the ranks
    have not parted, in the middle of the backward pass."""

    def __init__(self, layout: lamina.Layout, options: lamina.Options, wire: str, device: torch.device, decide: str) -> None:
        chosen = dataclasses.asdict(options)
        self._norm, power = NORMS[chosen.pop("value")]
        self._momentum = options.momentum
        self._selector = lamina.Selector(layout, decide=decide, **chosen)
        self._is_ahead = decide == "ahead"
        self._wire = getattr(torch, wire)
        self.parts, self.parts_of = self._selector.parts, self._selector.parts_of
        self._sizes = layout.sizes
        self._residual = torch.zeros(layout.elements, dtype=torch.float32, device=device)
        self._velocity = torch.zeros(layout.elements if options.momentum else 0, dtype=torch.float32, device=device)
        self._residual_layers = torch.split(self._residual, self._sizes)
        self._velocity_layers = torch.split(self._velocity, self._sizes) if options.momentum else ()
        self._residual_parts = torch.split(self._residual, self.parts.sizes)
        self._velocity_parts = torch.split(self._velocity, self.parts.sizes) if options.momentum else ()
        self._divisors = torch.tensor(self.parts.sizes, dtype=torch.float64, device=device).clamp_(min=1).pow_(power)
        self._left_out = torch.zeros((), dtype=torch.int64, device=device)
        self._sent: List[int] = []
        self._fresh: List[torch.Tensor] = []  # of each part the norm of this step's gradient alone
        self._is_sent: Set[int] = set()
        self._has_begun = False  # a step that nothing was accumulated in
        self.step = 0

    def take(self, buffers: Sequence[torch.Tensor], places: Sequence[Place]) -> None:
        self._gradients = [buffers[bucket].narrow(0, begin, size) for (bucket, begin), size in zip(places, self._sizes)]

    def release(self) -> None:
        self._gradients = []
        self._fresh = []

    def first_non_finite(self) -> Optional[int]:
        bad = torch.stack([~torch.isfinite(each).all() for each in self._gradients]).cpu()
        return int(bad.nonzero()[0]) if bad.any() else None

    def find_zero(self) -> bytes:
        return bytes(torch.stack([~each.any() for each in self._gradients]).cpu().tolist())

    def begin(self) -> List[int]:
        """Begins a step that was decided ahead; returns the parts that go out."""
        self.step += 1
        self._has_begun = True
        self._sent = self._selector.begin(self.step)
        self._is_sent = set(self._sent)
        return self._sent

    def pack_ahead(self, layer: int, gradient: torch.Tensor, to: torch.Tensor, divisor: int, scale: float) -> None:
        """What pack() will hold of the layer once this gradient is accumulated."""
        first, last = self.parts_of(layer)
        begin, filled = 0, 0
        for part in range(first, last):
            size = self.parts.sizes[part]
            if part in self._is_sent:
                velocity = self._velocity_parts[part] if self._momentum else self._residual_parts[part]
                write_ahead(to[filled:filled + size], self._residual_parts[part], velocity, gradient[begin:begin + size],
                            self._momentum, scale, divisor)
                filled += size
            begin += size

    def predicted_values(self) -> torch.Tensor:
        is_sent = torch.zeros(len(self.parts), dtype=torch.bool)
        is_sent[self._sent] = True
        return self.values().masked_fill_(is_sent, 0) + (torch.stack(self._fresh) / self._divisors).cpu()

    def plan(self, agreed: torch.Tensor) -> None:
        self._selector.plan(self.step, agreed)

    def accumulate(self, scale: float) -> None:
        self._fresh = []
        self._has_begun = False
        if not self._is_ahead:
            self.step += 1
        for layer, gradient in enumerate(self._gradients):
            added = gradient.float() * scale if scale != 1 else gradient.float()
            if self._is_ahead:
                finite = torch.where(torch.isfinite(added), added, torch.zeros_like(added))
                parts = torch.split(finite, [self.parts.sizes[part] for part in range(*self.parts_of(layer))])
                self._fresh += [self._norm_of(part) for part in parts]
            # The residual is the only copy of what waits: nothing that is not finite comes in, by a sum neither.
            residual = self._residual_layers[layer]
            moved = self._velocity_layers[layer] * self._momentum + added if self._momentum else added
            after = residual + moved
            is_good = torch.isfinite(after)
            if self._momentum:
                is_good &= torch.isfinite(moved)
                self._velocity_layers[layer].copy_(torch.where(is_good, moved, self._velocity_layers[layer]))
            self._left_out += is_good.numel() - is_good.sum()
            residual.copy_(torch.where(is_good, after, residual))

    def values(self) -> torch.Tensor:
        return (torch.stack([self._norm_of(part) for part in self._residual_parts]) / self._divisors).cpu()

    def _norm_of(self, part: torch.Tensor) -> torch.Tensor:
        if not len(part):
            return torch.zeros((), dtype=torch.float64, device=part.device)
        norm: torch.Tensor = torch.linalg.vector_norm(part, self._norm, dtype=torch.float64)
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
        packed = torch.cat([self._residual_parts[part] for part in self._sent] or [self._residual[:0]])
        if self._wire is torch.float32:
            return packed.div_(world_size)
        packed = packed.clamp_(torch.finfo(self._wire).min, torch.finfo(self._wire).max).to(self._wire)
        self._rounded = packed.float()  # the allreduce overwrites `packed`
        return packed

    def use_ahead(self) -> None:
        """In place of pack(), where pack_ahead() has written all that is sent."""
        if self._wire is not torch.float32:
            self.pack(1)

    def commit(self) -> None:
        begin = 0
        for part in self._sent:
            residual = self._residual_parts[part]
            if self._wire is torch.float32:
                residual.zero_()
            else:
                residual.sub_(self._rounded[begin:begin + len(residual)])
            begin += len(residual)
            if self._momentum:
                self._velocity_parts[part].zero_()
        self._selector.commit(self.step)

    def unpack(self, mean: torch.Tensor) -> None:
        sent, begin = set(self._sent), 0
        for layer, gradient in enumerate(self._gradients):
            within = 0
            for part in range(*self.parts_of(layer)):
                size = self.parts.sizes[part]
                to = gradient[within:within + size]
                if part in sent:
                    if to.dtype is torch.float32:
                        to.copy_(mean[begin:begin + size])
                    else:
                        to.copy_(mean[begin:begin + size].clamp(torch.finfo(to.dtype).min, torch.finfo(to.dtype).max))
                    begin += size
                else:
                    to.zero_()
                within += size

    def abandon(self) -> None:
        """The step ends here; what was accumulated stays in the residual. A step that nothing was accumulated in has not begun."""
        if self._has_begun:
            self._selector.take_back(self.step)
            self.step -= 1
            self._has_begun = False
        self.release()

    def save(self) -> bytes:
        velocity = self._velocity.cpu() if self._momentum else None
        return self._selector.save(self.step, self._residual.cpu(), velocity)

    def load(self, memory: memoryview) -> None:
        self.step, residual, velocity = self._selector.load(memory)
        self._residual.copy_(torch.frombuffer(residual, dtype=torch.float32))
        if self._momentum:
            self._velocity.copy_(torch.frombuffer(velocity, dtype=torch.float32))

    def residual(self, layer: int) -> torch.Tensor:
        return self._residual_layers[layer].clone()
