# SPDX-License-Identifier: MIT
import dataclasses
from typing import List, Optional, Sequence, Set, Tuple

import torch

import lamina

Place = Tuple[int, int]  # of a layer's gradient: the bucket, and where in its buffer it begins


def write_ahead(to: torch.Tensor, residual: torch.Tensor, velocity: torch.Tensor, gradient: torch.Tensor, momentum: float,
                scale: float, divisor: int) -> None:
    """Writes what a part's residual will be once this gradient is accumulated, divided and rounded as pack() does. An element that
    would not be finite, there or in the velocity, is left out. Without momentum the velocity is not looked at."""
    added = gradient.float() * scale if scale != 1 else gradient.float()
    updated = velocity * momentum + added if momentum else added
    after = residual + updated
    written = torch.where(torch.isfinite(after) & torch.isfinite(updated), after, residual)
    if to.dtype is torch.float32:
        written.div_(divisor)
    else:
        written.clamp_(torch.finfo(to.dtype).min, torch.finfo(to.dtype).max)
    to.copy_(written)


class CpuBackend:
    """The step's numbers by lamina._core, where the gradients lie in the memory of the CPU."""

    def __init__(self, layout: lamina.Layout, options: lamina.Options, wire: str, device: torch.device, decide: str) -> None:
        self._layout = layout
        self._wire = getattr(torch, wire)
        # Of gradients that were looked at already, skip leaves out what would overflow the residual alone.
        self._core = lamina.Compressor(layout, non_finite="skip", payload="as_is" if wire == "float32" else wire,
                                       decide=decide, **dataclasses.asdict(options))
        self._momentum = options.momentum
        self._is_sent: Set[int] = set()  # of the parts, in a step that was decided ahead
        self._taken: Optional[lamina.Gradients] = None
        self.parts = self._core.parts
        self.parts_of = self._core.parts_of

    def take(self, buffers: Sequence[torch.Tensor], places: Sequence[Place]) -> None:
        """The gradients of this step: layer l is `places[l]`."""
        self._taken = lamina.Gradients(self._layout, list(buffers), places)

    @property
    def _gradients(self) -> lamina.Gradients:
        if self._taken is None:
            raise RuntimeError("there are no gradients between steps")
        return self._taken

    def first_non_finite(self) -> Optional[int]:
        return self._core.first_non_finite(self._gradients)

    def find_zero(self) -> bytes:
        return self._core.find_zero(self._gradients)

    def accumulate(self, scale: float) -> None:
        self._core.accumulate_all(self._gradients, scale)

    def values(self) -> torch.Tensor:
        return torch.frombuffer(self._core.values(), dtype=torch.float64)

    def select(self, agreed: torch.Tensor, held: bytes) -> List[int]:
        return self._core.select(agreed, held)

    def begin(self) -> List[int]:
        """Begins a step that was decided ahead; returns the parts that go out."""
        self._core.begin_step()
        sent = self._core.sent_parts
        self._is_sent = set(sent)
        return sent

    def pack_ahead(self, layer: int, gradient: torch.Tensor, to: torch.Tensor, divisor: int, scale: float) -> None:
        """What pack() will hold of the layer once this gradient is accumulated."""
        first, last = self.parts_of(layer)
        residual = self.residual(layer)
        velocity = torch.frombuffer(self._core.velocity(layer), dtype=torch.float32) if self._momentum else residual
        begin, filled = 0, 0
        for part in range(first, last):
            end = begin + self.parts.sizes[part]
            if part in self._is_sent:
                write_ahead(to[filled:filled + end - begin], residual[begin:end], velocity[begin:end], gradient[begin:end],
                            self._momentum, scale, divisor)
                filled += end - begin
            begin = end

    def predicted_values(self) -> torch.Tensor:
        return torch.frombuffer(self._core.predicted_values(), dtype=torch.float64)

    def plan(self, agreed: torch.Tensor) -> None:
        self._core.plan_next(agreed)
        self._core.select()

    @property
    def step(self) -> int:
        return self._core.step

    @property
    def threshold(self) -> float:
        return self._core.threshold

    @property
    def sent_elements(self) -> int:
        return self._core.sent_elements

    @property
    def sent_bitmap(self) -> bytes:
        return self._core.sent_bitmap

    @property
    def left_out_elements(self) -> int:
        return self._core.left_out_elements

    def pack(self, world_size: int) -> torch.Tensor:
        packed = torch.empty(self.sent_elements, dtype=self._wire)
        self._core.pack(packed, world_size if self._wire is torch.float32 else 1)
        return packed

    def use_ahead(self) -> None:
        """In place of pack(), where pack_ahead() has written all that is sent."""
        self._core.use_ahead()

    def commit(self) -> None:
        self._core.commit()

    def unpack(self, mean: torch.Tensor) -> None:
        self._core.scatter(mean, self._gradients)

    def release(self) -> None:
        """The buckets are DDP's again."""
        self._taken = None

    def abandon(self) -> None:
        """The step ends here; what was accumulated stays in the residual. A step that nothing was accumulated in has not begun."""
        self._core.abandon()
        self.release()

    def save(self) -> bytes:
        return self._core.save()

    def load(self, memory: memoryview) -> None:
        self._core.load(memory)

    def residual(self, layer: int) -> torch.Tensor:
        if self._layout.sizes[layer] == 0:
            return torch.empty(0)
        return torch.frombuffer(self._core.residual(layer), dtype=torch.float32)
