# SPDX-License-Identifier: MIT
import contextlib
import dataclasses
import struct
import time
import zlib
from typing import Any, Dict, Iterator, List, Optional, Protocol, TYPE_CHECKING, Union

import torch
import torch.distributed as dist

from lamina.torch._report import StepReport, logger

if TYPE_CHECKING:
    from lamina.torch._state import LayerDropping


Scale = Union[float, torch.Tensor]  # of the loss; a tensor on the gradients' device spares the host a wait


@dataclasses.dataclass
class Bucket:
    """What DDP handed to the hook, until the last bucket has come."""

    buffer: torch.Tensor
    layers: List[int]
    gradients: List[torch.Tensor]
    future: "Optional[torch.futures.Future[torch.Tensor]]" = None  # DDP waits for it


class Past(Protocol):
    """What the choice of a step depends on: of LayerDropping, and of LocalUpdates."""

    process_group: Any
    world_size: int

    @property
    def last_choice(self) -> int: ...

    @property
    def backend(self) -> Any: ...  # step and threshold


class Stopwatch:
    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("check", "agree", "add", "pack", "allreduce", "unpack"), 0.0)

    @contextlib.contextmanager
    def time(self, what: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[what] += time.perf_counter() - begin


def run(state: "LayerDropping", buckets: List[Bucket]) -> None:
    """One step over the whole model, on the thread of the last bucket's hook: at most three allreduces, none of which is
    started from a callback. Writes the mean of what was sent into the buckets, and zeros over the rest. If it raises, as a
    collective does when a rank has died, the residual holds what was not sent and the state can be saved."""
    try:
        _run(state, buckets)
    except BaseException:
        state.backend.abandon()
        raise


def _run(state: "LayerDropping", buckets: List[Bucket]) -> None:
    backend, world, watch = state.backend, state.world_size, Stopwatch()
    backend.take([bucket.buffer for bucket in buckets], places_of(state, buckets))
    sent_bytes = 0
    if backend.looks_first and state.nonfinite != "leave_out":
        is_bad, sent_bytes = refuse_non_finite(state, buckets, watch)
        if is_bad:
            finish_skipped(state, buckets, sent_bytes, watch)
            return

    scale = state.loss_scale()
    with watch.time("add"):
        sent_bytes += backend.add_all(clip_factor(state, buckets, scale) / scale, None if state.nonfinite == "leave_out" else state.sum)

    with watch.time("agree"):
        observed = sum_observed(state, buckets, scale, past_of(state))
        sent_bytes += observed.sent_bytes
        require_one_past(state, observed.past)
        if observed.has_bad_gradient and state.nonfinite != "leave_out":
            give_up_step(state, buckets, observed.own_bad_gradient)
            finish_skipped(state, buckets, sent_bytes, watch)
            return
        if observed.has_bad_gradient or observed.has_bad_sum:
            backend.leave_out()
            observed = sum_observed(state, buckets, scale, past_of(state))
            sent_bytes += observed.sent_bytes
        # A parameter that no rank used keeps its .grad, and DDP throws away what the hook gives for it: nothing of it goes out.
        held = bytearray(len(backend.fragments))
        for layer in torch.nonzero(observed.gradients == 0).flatten().tolist():
            first, last = backend.fragments_of(layer)
            held[first:last] = b"\1" * (last - first)
        sent = backend.select(observed.values / world, bytes(held))

    with watch.time("pack"):
        packed = backend.pack(world)
    with watch.time("allreduce"):
        if packed.numel():
            state.sum(packed)
            sent_bytes += packed.numel() * packed.element_size()
    deliver(state, buckets, packed, sent, scale, sent_bytes, watch, observed.may_overflow, observed.may_be_cut)


class Observed:
    """What the ranks have summed up of a step."""

    def __init__(self, fragments: int, layers: int, sums: torch.Tensor, own: torch.Tensor, sent_bytes: int) -> None:
        self.values, self.gradients, flags, self.past = torch.split(sums, [fragments, layers, 4, 2])
        self.has_bad_gradient, self.has_bad_sum, self.may_overflow, self.may_be_cut = (flag != 0 for flag in flags.tolist())
        self.own_bad_gradient = bool(own[-4] != 0)
        self.sent_bytes = sent_bytes


def sum_observed(state: "LayerDropping", buckets: List[Bucket], scale: Scale, past: torch.Tensor) -> Observed:
    """The values, whether a layer has a gradient, flags, and two numbers by which ranks notice that they have parted. Here the host
    waits for the device."""
    own = state.backend.observe(state.world_size, scale)
    sums = torch.cat([own, past.to(own.device)])
    state.sum(sums)
    return Observed(len(state.backend.fragments), len(state.names), *state.backend.fetch(sums, own), sums.numel() * sums.element_size())


def clip_factor(state: "LayerDropping", buckets: List[Bucket], scale: Scale) -> Scale:
    """By what this rank's gradient is multiplied, so that its norm is max_norm at most: that of clip_grad_norm_."""
    if state.max_norm is None:
        return 1.0
    norms = torch.stack([torch.linalg.vector_norm(bucket.buffer, dtype=torch.float64) for bucket in buckets])
    factor: torch.Tensor = state.max_norm / (torch.linalg.vector_norm(norms) / scale + 1e-6)
    return factor.clamp(max=1.0)


def past_of(state: Past, more: Optional[Dict[str, Any]] = None) -> torch.Tensor:
    """The fingerprint of what this step's choice depends on, and of whatever else must be alike on all ranks, by name."""
    return fingerprint(struct.pack("<QdI", state.backend.step, state.backend.threshold, state.last_choice) + repr(more).encode())


def fingerprint(of: Any) -> torch.Tensor:
    """Bytes as 20 bits and their square, whose sums over the ranks are exact."""
    bits = zlib.crc32(of) & 0xFFFFF
    return torch.tensor([bits, bits ** 2], dtype=torch.float64)


def all_equal(world_size: int, sums: torch.Tensor) -> bool:
    """Whether all ranks had the fingerprint that was summed."""
    return world_size * int(sums[1]) == int(sums[0]) ** 2


def require_one_past(state: Past, sums: torch.Tensor, more: Optional[Dict[str, Any]] = None) -> None:
    """Raises the same on all ranks if they would select different fragments, or differ in `more`."""
    if not all_equal(state.world_size, sums):
        raise RuntimeError(parted(state, more or {}))


def refuse_non_finite(state: "LayerDropping", buckets: List[Bucket], watch: Stopwatch) -> "tuple[bool, int]":
    """Whether any rank's gradient holds NaN or infinity, in which case the step is given up; and the bytes that this took."""
    with watch.time("check"):
        bad = state.backend.first_non_finite()
        flag = torch.tensor([bad is not None], dtype=torch.int32, device=buckets[0].buffer.device)
        state.sum(flag)
        any_bad = bool(flag.item())
    if any_bad:
        give_up_step(state, buckets, bad is not None)
    return any_bad, flag.numel() * flag.element_size()


def give_up_step(state: "LayerDropping", buckets: List[Bucket], is_own: bool) -> None:
    """A gradient is not finite, here or on another rank: the buckets are filled as state.nonfinite says."""
    bad = state.backend.first_non_finite() if is_own else None
    state.backend.refuse()
    where = "another rank" if bad is None else f"'{state.names[bad]}' on rank {state.rank}"
    logger.warning("after step %d a batch was skipped: NaN or infinity in the gradient of %s", state.step, where)
    for bucket in buckets:
        bucket.buffer.fill_(torch.nan if state.nonfinite == "propagate" else 0)


def finish_skipped(state: "LayerDropping", buckets: List[Bucket], sent_bytes: int, watch: Stopwatch) -> None:
    backend = state.backend
    state.finish(StepReport(state.step, True, backend.threshold, len(backend.fragments), 0, backend.fragments.elements, 0,
                            _dense_bytes(buckets), sent_bytes, state.left_out_elements, watch.seconds), [])


def deliver(state: "LayerDropping", buckets: List[Bucket], packed: torch.Tensor, sent: List[int], scale: Scale, sent_bytes: int,
            watch: Stopwatch, may_overflow: bool, may_be_cut: bool) -> None:
    """The end of a step whose allreduce is done: `packed` has the sums of what was sent. Whether they are beyond the wire's type, or
    their means beyond float16, is looked at only where that may be, since the host waits for it."""
    backend = state.backend
    if may_overflow and not torch.isfinite(packed).all():
        # On all ranks alike: they have the same sum.
        raise OverflowError("what waits is too large for bfloat16 to add; take wire='float32'")
    with watch.time("unpack"):
        # Only now that the others have it: had the allreduce failed, the residual would hold everything.
        backend.commit()
        mean = packed if state.wire == "float32" else packed.float().div_(state.world_size)
        if isinstance(scale, torch.Tensor) or scale != 1:
            mean.mul_(scale)
        if may_be_cut:
            state.cut_elements += _beyond_float16(state, buckets, sent, mean)
        backend.unpack(mean)
        backend.release()
    state.last_choice = choice_of(backend.sent_bitmap)
    state.finish(StepReport(backend.step, False, backend.threshold, len(backend.fragments), len(sent), backend.fragments.elements,
                            backend.sent_elements, _dense_bytes(buckets), sent_bytes, state.left_out_elements, watch.seconds),
                 sent)


def choice_of(sent_bitmap: bytes) -> int:
    return zlib.crc32(sent_bitmap) & 0xFFFFF


def _dense_bytes(buckets: List[Bucket]) -> int:
    return sum(bucket.buffer.numel() * bucket.buffer.element_size() for bucket in buckets)


def _beyond_float16(state: "LayerDropping", buckets: List[Bucket], sent: List[int], mean: torch.Tensor) -> int:
    """Elements that unpack() cuts: what waited for long may be more than float16 can say."""
    layers = {layer for bucket in buckets if bucket.buffer.dtype is torch.float16 for layer in bucket.layers}
    if not layers:
        return 0
    cut, begin, sizes = 0, 0, state.backend.fragments.sizes
    for fragment in sent:
        if state.layer_of_fragment[fragment] in layers:
            cut += int((mean[begin:begin + sizes[fragment]].abs() > torch.finfo(torch.float16).max).sum())
        begin += sizes[fragment]
    return cut


def parted(state: Past, more: Dict[str, Any]) -> str:
    """Why the ranks would select different fragments. All of them have seen that they would, so they can talk about it."""
    own = {**more, "step": state.backend.step, "threshold": state.backend.threshold}
    theirs: List[Dict[str, Any]] = [{}] * state.world_size
    dist.all_gather_object(theirs, own, group=state.process_group)
    for field in own:
        for rank, each in enumerate(theirs):
            if each[field] != theirs[0][field]:
                why = ("all ranks make the same calls; where one has more batches, train within torch.distributed.algorithms.Join"
                       if field == "the call" else "was a state loaded, or did a step fail, on one of them alone?")
                return f"the ranks have parted: {field} is {theirs[0][field]} on rank 0 and {each[field]} on rank {rank}; {why}"
    return f"the ranks selected different fragments in step {state.backend.step - 1}"


def places_of(state: "LayerDropping", buckets: List[Bucket]) -> List["tuple[int, int]"]:
    """Where each layer's gradient lies: taken anew in each step, since DDP rebuilds its buckets."""
    places: Dict[int, "tuple[int, int]"] = {}
    for number, bucket in enumerate(buckets):
        begin, width = bucket.buffer.data_ptr(), bucket.buffer.element_size()
        for layer, gradient in zip(bucket.layers, bucket.gradients):
            places[layer] = (number, (gradient.data_ptr() - begin) // width if gradient.numel() else 0)
    missing = [name for layer, name in enumerate(state.names) if layer not in places]
    if missing:
        raise RuntimeError(f"no bucket had the gradient of '{missing[0]}', which was there when the state was bound")
    return [places[layer] for layer in range(len(state.names))]
