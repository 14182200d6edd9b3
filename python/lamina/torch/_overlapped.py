# SPDX-License-Identifier: MIT
import contextlib
from typing import Any, Dict, List, Tuple, TYPE_CHECKING, cast

import torch
import torch.distributed as dist

from lamina.torch import _step
from lamina.torch._cpu import CpuBackend
from lamina.torch._cuda import CudaBackend
from lamina.torch._device import TorchBackend
from lamina.torch._foreach import joined

if TYPE_CHECKING:
    from lamina.torch._state import LayerDropping

Work = Tuple["dist.Work", torch.Tensor]  # an all-reduce under way, and what it sums


class OverlappedStep:
    """One step whose fragments were selected in the step before, so that each bucket's all-reduce is overlapped with backward. Of a
    batch with NaN or infinity on any rank nothing is delivered: what the other gradients have added stays in the residuals."""

    def __init__(self, state: "LayerDropping", device: torch.device) -> None:
        assert not isinstance(state.backend, CudaBackend)  # LayerDropping refuses it
        self._state, self._backend, self._watch = state, state.backend, _step.Stopwatch()
        self._sent = self._backend.begin(state.plan)
        self._scale = state.loss_scale()
        self._sent_bytes = 0
        sizes, where = state.backend.fragments.sizes, 0
        self._places: Dict[int, Tuple[int, int]] = {}  # of a layer in what is packed: where it begins, and its elements
        sent = set(self._sent)
        for layer in range(len(state.names)):
            elements = sum(sizes[fragment] for fragment in range(*state.backend.fragments_of(layer)) if fragment in sent)
            self._places[layer] = (where, elements)
            where += elements
        # Ranks that have parted would start all-reduces of different sizes; they notice before the first.
        state.last_choice = _step.choice_of(state.backend.sent_bitmap)
        self._apart: Any = cast(Any, torch.cuda).Stream(device) if device.type == "cuda" else None
        with self._on_own_stream():
            self._past = self._start(_step.past_of(state).to(device))
        self._is_checked = False
        self.works: List[Tuple[Work, List[int]]] = []

    def _start(self, sums: torch.Tensor) -> Work:
        self._sent_bytes += sums.numel() * sums.element_size()
        return dist.all_reduce(sums, group=self._state.process_group, async_op=True), sums

    def _require_one_past(self) -> None:
        if not self._is_checked:
            with self._on_own_stream():
                self._past[0].wait()
                _step.require_one_past(self._state, self._past[1].cpu())
            self._is_checked = True

    def _on_own_stream(self) -> Any:
        """For the numbers that the host waits for in backward, so that it does not wait for backward itself."""
        return torch.cuda.stream(self._apart) if self._apart is not None else contextlib.nullcontext()

    def add(self, bucket: _step.Bucket) -> None:
        """Adds the gradients of a bucket, and starts the all-reduce of what is sent of them, if there is something."""
        state = self._state
        with self._watch.time("add"):
            self._backend.add(bucket.layers, _flat_gradients(bucket), 1 / self._scale)
        layers = [layer for layer in bucket.layers if self._places[layer][1]]
        if not layers:
            return
        with self._watch.time("pack"):
            packed = self._backend.pack_layers(layers, 1 / state.world_size)
        with self._watch.time("agree"):
            self._require_one_past()
        self.works.append((self._start(packed), layers))

    def finish(self, buckets: List[_step.Bucket]) -> None:
        state, backend, watch = self._state, self._backend, self._watch
        backend.take([bucket.buffer for bucket in buckets], _step.places_of(state, buckets))
        with watch.time("agree"):
            self._require_one_past()
        with watch.time("allreduce"):
            for (work, _), _ in self.works:
                work.wait()
        if isinstance(backend, CpuBackend):
            self._finish_on_cpu(backend, buckets)
        else:
            self._finish_on_device(backend, buckets)

    def _finish_on_cpu(self, backend: CpuBackend, buckets: List[_step.Bucket]) -> None:
        state, watch = self._state, self._watch
        if state.nonfinite != "leave_out":
            is_bad, flag_bytes = _step.refuse_non_finite(state, buckets, watch)
            self._sent_bytes += flag_bytes
            if is_bad:
                _step.finish_skipped(state, buckets, self._sent_bytes, watch)
                return
        value_bytes = 8 * len(backend.fragments)
        _step.deliver(state, buckets, self._packed(buckets), self._sent, self._scale, self._sent_bytes + value_bytes, watch,
                      state.wire == "bfloat16", any(bucket.buffer.dtype is torch.float16 for bucket in buckets))
        with watch.time("agree"):
            sums = backend.expected_values()
            dist.all_reduce(sums, group=state.process_group)
            state.plan = backend.plan(sums / state.world_size)

    def _finish_on_device(self, backend: TorchBackend, buckets: List[_step.Bucket]) -> None:
        """The same, but that the host waits for the flag and the values together."""
        state, watch = self._state, self._watch
        with watch.time("agree"):
            observed = _step.sum_observed(state, buckets, self._scale, torch.zeros(2, dtype=torch.float64))
            self._sent_bytes += observed.sent_bytes
        if observed.has_bad_gradient and state.nonfinite != "leave_out":
            _step.give_up_step(state, buckets, observed.own_bad_gradient)
            _step.finish_skipped(state, buckets, self._sent_bytes, watch)
            return
        expected = backend.forecast(observed.values / state.world_size)
        _step.deliver(state, buckets, self._packed(buckets), self._sent, self._scale, self._sent_bytes, watch, observed.may_overflow,
                      observed.may_be_cut)
        state.plan = backend.plan(expected)

    def _packed(self, buckets: List[_step.Bucket]) -> torch.Tensor:
        """What was delivered, in the order of the layers."""
        with self._watch.time("pack"):
            delivered: Dict[int, torch.Tensor] = {}
            for (_, sums), layers in self.works:
                delivered.update(zip(layers, torch.split(sums, [self._places[layer][1] for layer in layers])))
            return joined([delivered[layer] for layer in sorted(delivered)], buckets[0].buffer).to(getattr(torch, self._state.wire))


def _flat_gradients(bucket: _step.Bucket) -> torch.Tensor:
    """The gradients of a bucket's layers, one behind the other: the buffer itself where they lie so."""
    begin, width = bucket.buffer.data_ptr(), bucket.buffer.element_size()
    sizes = [gradient.numel() for gradient in bucket.gradients]
    places = [(gradient.data_ptr() - begin) // width if size else 0 for gradient, size in zip(bucket.gradients, sizes)]
    if sum(sizes) == len(bucket.buffer) and all(not size or place == sum(sizes[:number])
                                                for number, (place, size) in enumerate(zip(places, sizes))):
        return bucket.buffer
    return torch.cat([bucket.buffer[place:place + size] for place, size in zip(places, sizes)])
