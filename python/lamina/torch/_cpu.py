# SPDX-License-Identifier: MIT
from __future__ import annotations

import dataclasses
from typing import Any, List, Optional, Sequence, Tuple, Union

import torch

import lamina

Place = Tuple[int, int]  # of a layer's gradient: the bucket, and where in its buffer it begins


class CpuBackend:
    """The step's numbers by lamina._core, where the gradients lie in the memory of the CPU. The calls are those of TorchBackend."""

    looks_first = True  # a gradient is added only once all ranks' are known to be finite

    def __init__(self, layout: lamina.Layout, options: lamina.Options, wire: str, device: torch.device) -> None:
        self._layout = layout
        self._wire = getattr(torch, wire)
        # Of gradients that were looked at already, skip leaves out what would overflow the residual alone.
        self._worker = lamina.Worker(layout, non_finite="skip", payload="as_is" if wire == "float32" else wire,
                                     **dataclasses.asdict(options))
        self._taken: Optional[lamina.Arrays] = None
        self._buffers: List[torch.Tensor] = []
        self._open: Optional[lamina.Step] = None
        self.fragments = self._worker.fragments
        self.fragments_of = self._worker.fragments_of
        self._packed = torch.empty(0, dtype=self._wire)
        self._sent: List[int] = []
        self.sent_elements = 0
        self.sent_bitmap = b""

    def take(self, buffers: Sequence[torch.Tensor], places: Sequence[Place]) -> None:
        """The gradients of this step: layer l is `places[l]`."""
        self._buffers = list(buffers)
        self._taken = lamina.Arrays(self._layout, self._buffers, places)

    @property
    def _gradients(self) -> lamina.Arrays:
        if self._taken is None:
            raise RuntimeError("there are no gradients between steps")
        return self._taken

    @property
    def _step(self) -> lamina.Step:
        if self._open is None:
            raise RuntimeError("there is no step between steps")
        return self._open

    def first_non_finite(self) -> Optional[int]:
        return self._worker.first_non_finite(self._gradients)

    def add_all(self, scale: Union[float, torch.Tensor], agree: Any = None) -> int:
        """Begins a step with the gradients that were taken."""
        self._open = self._worker.add(self._gradients, float(scale))
        return 0

    def observe(self, world_size: int, scale: Union[float, torch.Tensor]) -> torch.Tensor:
        values = torch.frombuffer(self._step.values(), dtype=torch.float64)
        is_zero = torch.frombuffer(bytearray(self._worker.find_zero(self._gradients)), dtype=torch.uint8)
        has_float16 = any(buffer.dtype is torch.float16 for buffer in self._buffers)
        flags = torch.tensor([False, False, self._wire is not torch.float32, has_float16], dtype=torch.float64)
        return torch.cat([values, is_zero.eq(0).double(), flags])

    def fetch(self, sums: torch.Tensor, own: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        return sums, own

    def leave_out(self) -> None:
        """It was, by add_all()."""

    def select(self, agreed: torch.Tensor, held: bytes) -> List[int]:
        return self._selected(self._step.select(agreed, held))

    def _selected(self, sent: List[int]) -> List[int]:
        self._sent, self.sent_elements, self.sent_bitmap = sent, self._step.sent_elements, self._step.sent_bitmap
        return sent

    def begin(self, sent: Optional[List[int]]) -> List[int]:
        """Begins a step that sends these fragments, or everything."""
        self._open = self._worker.begin(list(range(len(self.fragments))) if sent is None else sent)
        return self._selected(self._step.sent)

    def add(self, layers: Sequence[int], gradients: torch.Tensor, scale: Union[float, torch.Tensor]) -> None:
        for layer, gradient in zip(layers, torch.split(gradients, [self._layout.sizes[layer] for layer in layers])):
            self._step.add(layer, gradient, float(scale))

    def pack_layers(self, layers: Sequence[int], scale: float) -> torch.Tensor:
        """What is sent of layers that have their gradients."""
        is_sent, sizes = set(self._sent), self.fragments.sizes
        packed = [torch.empty(sum(sizes[fragment] for fragment in range(*self.fragments_of(layer)) if fragment in is_sent),
                              dtype=self._wire) for layer in layers]
        for layer, to in zip(layers, packed):
            if to.numel():
                self._step.pack_layer(layer, to, scale if self._wire is torch.float32 else 1)
        return torch.cat(packed)

    def expected_values(self) -> torch.Tensor:
        """After commit(): the values to expect in the next step."""
        self._open = None
        return torch.frombuffer(self._worker.values(), dtype=torch.float64)

    def plan(self, agreed: torch.Tensor) -> List[int]:
        """What the next step sends, by agreed values."""
        return self._worker.plan(agreed)

    @property
    def step(self) -> int:
        return self._worker.steps

    @property
    def threshold(self) -> float:
        return self._worker.threshold

    @property
    def left_out_elements(self) -> int:
        return self._worker.left_out_elements

    def pack(self, world_size: int) -> torch.Tensor:
        if len(self._packed) < self.sent_elements:  # kept, since fresh memory costs more than what is written to it
            self._packed = torch.empty(self.sent_elements, dtype=self._wire)
        packed = self._packed[:self.sent_elements]
        self._step.pack(packed, 1 / world_size if self._wire is torch.float32 else 1)
        return packed

    def commit(self) -> None:
        self._step.commit()

    def unpack(self, mean: torch.Tensor) -> None:
        self._step.unpack(mean, self._gradients)

    def release(self) -> None:
        """The buckets are DDP's again."""
        self._taken, self._buffers = None, []

    def refuse(self) -> None:
        """The step ends here, with the residual as it was before, but for what add() has added."""
        self.abandon()

    def abandon(self) -> None:
        """The step ends here; what was added stays in the residual, and the next step has the same number."""
        self._open = None
        self.release()

    def save(self) -> bytes:
        return self._worker.save()

    def load(self, memory: memoryview) -> None:
        self._open = None
        self._worker.load(memory)

    def residual(self, layer: int) -> torch.Tensor:
        if self._layout.sizes[layer] == 0:
            return torch.empty(0)
        return torch.frombuffer(self._worker.residual(layer), dtype=torch.float32)
