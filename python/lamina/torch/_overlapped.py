# SPDX-License-Identifier: MIT
from typing import Dict, List, Tuple, TYPE_CHECKING

import torch
import torch.distributed as dist

from lamina.torch import _step

if TYPE_CHECKING:
    from lamina.torch._state import LayerDropping

Work = Tuple["dist.Work", torch.Tensor]  # an allreduce under way, and what it sums


class OverlappedStep:
    """One step whose parts were chosen in the step before, so that each bucket's allreduce starts while the backward pass goes
    on. Nothing is added to the residual before all ranks know that the whole batch is finite: until then a step can be given up."""

    def __init__(self, state: "LayerDropping", device: torch.device) -> None:
        self._state, self._watch = state, _step.Stopwatch()
        self._sent = state.backend.begin()
        self._scale = state.loss_scale()
        self._sent_bytes = 0
        sizes, where = state.backend.parts.sizes, 0
        self._places: Dict[int, Tuple[int, int]] = {}  # of a layer in what is packed: where it begins, and its elements
        sent = set(self._sent)
        for layer in range(len(state.names)):
            elements = sum(sizes[part] for part in range(*state.backend.parts_of(layer)) if part in sent)
            self._places[layer] = (where, elements)
            where += elements
        # Ranks that have parted would start allreduces of different sizes; they notice before the first.
        state.last_choice = _step.choice_of(state.backend.sent_bitmap)
        self._past = self._start(_step.past_of(state).to(device))
        self._is_checked = False
        self.works: List[Tuple[Work, List[int]]] = []

    def _start(self, sums: torch.Tensor) -> Work:
        self._sent_bytes += sums.numel() * sums.element_size()
        return dist.all_reduce(sums, group=self._state.process_group, async_op=True), sums

    def _require_one_past(self) -> None:
        if not self._is_checked:
            self._past[0].wait()
            _step.require_one_past(self._state, self._past[1].cpu())
            self._is_checked = True

    def add(self, bucket: _step.Bucket) -> None:
        """Starts the allreduce of what is sent of a bucket, if there is something."""
        state = self._state
        wire = getattr(torch, state.wire)
        layers = [layer for layer in bucket.layers if self._places[layer][1]]
        if not layers:
            return
        with self._watch.time("pack"):
            packed = torch.empty(sum(self._places[layer][1] for layer in layers), dtype=wire, device=bucket.buffer.device)
            begin = 0
            for layer, flat in _flat_gradients(bucket):
                elements = self._places[layer][1]
                if elements:
                    state.backend.pack_ahead(layer, flat, packed[begin:begin + elements],
                                             state.world_size if wire is torch.float32 else 1, 1 / self._scale)
                    begin += elements
        with self._watch.time("agree"):
            self._require_one_past()
        self.works.append((self._start(packed), layers))

    def finish(self, buckets: List[_step.Bucket]) -> None:
        state, backend, watch = self._state, self._state.backend, self._watch
        backend.take([bucket.buffer for bucket in buckets], _step.places_of(state, buckets))
        with watch.time("agree"):
            self._require_one_past()
        with watch.time("allreduce"):
            for (work, _), _ in self.works:
                work.wait()
        if state.nonfinite != "leave_out":
            is_bad, flag_bytes = _step.refuse_non_finite(state, buckets, watch)
            self._sent_bytes += flag_bytes
            if is_bad:
                _step.finish_skipped(state, buckets, self._sent_bytes, watch)
                return
        with watch.time("accumulate"):
            backend.accumulate(1 / self._scale)
        with watch.time("agree"):
            sums = backend.predicted_values().to(buckets[0].buffer.device)
            dist.all_reduce(sums, group=state.process_group)
            self._sent_bytes += sums.numel() * sums.element_size()
            backend.plan(sums.cpu() / state.world_size)
        with watch.time("pack"):
            backend.use_ahead()
            packed = torch.empty(backend.sent_elements, dtype=getattr(torch, state.wire), device=buckets[0].buffer.device)
            for (_, sums), layers in self.works:
                begin = 0
                for layer in layers:
                    where, elements = self._places[layer]
                    packed[where:where + elements] = sums[begin:begin + elements]
                    begin += elements
        _step.deliver(state, buckets, packed, self._sent, self._scale, self._sent_bytes, watch)


def _flat_gradients(bucket: _step.Bucket) -> List[Tuple[int, torch.Tensor]]:
    """Each layer's gradient as it lies in memory."""
    begin, width = bucket.buffer.data_ptr(), bucket.buffer.element_size()
    return [(layer, bucket.buffer.narrow(0, (gradient.data_ptr() - begin) // width if gradient.numel() else 0, gradient.numel()))
            for layer, gradient in zip(bucket.layers, bucket.gradients)]
