# SPDX-License-Identifier: MIT
import collections
import dataclasses
import functools
import itertools
import math
from typing import Any, Callable, Deque, Dict, List, Optional, Sequence, TYPE_CHECKING, Tuple

import torch
import torch.distributed as dist

import lamina
from lamina.torch._device import NORMS
from lamina.torch._options import share_to_send
from lamina.torch._payloads import BLOCK, PAYLOADS, Payload

if TYPE_CHECKING:
    from lamina.torch._own import OwnParameters

_ROW = 4096  # elements whose norm is one sum: fragments are of whole rows, but for a layer's last
_SUMMED_IN_ORDER = 16  # ranks, by an operation each; more are summed by one
_BITS = 0xFFFFF  # of a fingerprint: its square, and the sums of both over the ranks, are exact in float64


@dataclasses.dataclass
class Sent:
    """What one step has sent, until its update is applied. Sizes do not depend on the data: what is not used of them refers to the
    trash behind the parameters, which is zero in the shared ones and in the rank's own."""

    step: int
    chosen: torch.Tensor  # of each fragment
    places: torch.Tensor  # [owner, slot]: in the flat parameters
    kept_at: torch.Tensor  # [slot]: in what this rank keeps of its shards
    elements: torch.Tensor  # [owner, slot]: what the rank's own parameters get back: what was sent, as the payload says it
    message: Optional[torch.Tensor] = None  # [owner, slot]: with error feedback that, and the elements are the whole local delta
    reply: Optional[torch.Tensor] = None  # of this rank, as its payload
    momentum: Optional[torch.Tensor] = None  # [slot], once the update is applied
    rounding: Optional[torch.Tensor] = None
    update: Optional[torch.Tensor] = None  # [owner, slot]
    received: Optional[torch.Tensor] = None  # by the half of the way that is under way
    work: Any = None

    @property
    def is_handed_on(self) -> bool:
        """The replies are on their way."""
        return self.reply is not None and self.work is not None


class Later:
    """A Status that the host reads once the device has it, a step later."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=numbers.device.type == "cuda")
        self._host.copy_(numbers, non_blocking=True)
        events = getattr(getattr(torch, numbers.device.type, None), "Event", None)
        self._event = None if events is None or numbers.device.type == "cpu" else events()
        if self._event is not None:
            self._event.record()

    def status(self) -> "Status":
        if self._event is not None:
            self._event.synchronize()
        largest, is_finite, is_one, has_equal_deltas, overflowed = self._host.tolist()
        return Status(largest > 0, bool(is_finite), bool(is_one), bool(has_equal_deltas), bool(overflowed))


@dataclasses.dataclass
class Status:
    """Of one exchange, on all ranks alike."""

    has_deltas: bool  # not all values are zero
    is_finite: bool  # else a rank's parameters are not, and nothing was sent
    is_one: bool  # else the ranks differ in what they do, and nothing was sent
    has_equal_deltas: bool  # all ranks the same
    overflowed: bool  # an update was not finite, and nothing of it was applied


class DeviceExchange:
    """The numbers of local updates by torch's operators, on any device: what lamina.LocalDelta and ShardOwners do on the CPU, of
    which it is bitwise equal up to magnitudes of 2^120. An exchange is at most 150 launches whatever the number of layers, and the host waits
    for none of them: shapes do not depend on data, and what a step has found is looked at in the next.

    The parameters live in one flat tensor from now on, layers padded to rows of 4,096 elements. Each rank owns a slice of every
    fragment. A payload has room for a step's share and the largest fragment, whatever the step sends. Memory: the shared parameters,
    2 / ranks of that for the outer optimizer, and a few payloads.

    Source: docs/algorithm.md, Local updates; the shards are those of a reduce-scatter and an all-gather.
    """

    def __init__(self, layout: lamina.Layout, options: lamina.Options, *, by_score: bool, payload: str, error_feedback: bool,
                 outer: Dict[str, float], delay: int, group: Optional[dist.ProcessGroup], device: torch.device) -> None:
        kept = {name: value for name, value in dataclasses.asdict(options).items() if name != "momentum"}
        rate, momentum = torch.tensor([outer["rate"], outer["momentum"]], dtype=torch.float32).tolist()  # as they are used
        for name, value, known in (("value", options.value, ("mean_abs", "root_mean_square", "l2_norm")), ("payload", payload, PAYLOADS)):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        if not 0 < rate < math.inf:
            raise ValueError(f"the outer rate must be a finite number above 0, got {outer['rate']:g}")
        if not 0 <= momentum < 1:
            raise ValueError(f"the outer momentum must lie in [0, 1), got {outer['momentum']:g}")
        self.fragments = lamina.Selector(layout, fragment_elements=options.fragment_elements).fragments
        for name, usual in (("at_least_every", 0), ("warm_up_steps", 0), ("search_every", 1)):
            if kept[name] != usual:
                raise ValueError(f"{name} needs backend 'cpu': with 'torch' all steps send one size, and it would not fit")
        self.layout, self._options, self._by_score, self._outer, self.delay = layout, options, by_score, outer, delay
        self._group, self._device = group, device
        self._world, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._payload = Payload(payload, device)
        self._lay_out()
        self.step, self.applied = 0, 0
        self._sent_in, self._going = self._per_fragment(0), torch.zeros(len(self._sizes), dtype=torch.bool, device=device)
        self._allowance = torch.zeros((), dtype=torch.float64, device=device)
        self._overflowed = self._no = torch.zeros((), dtype=torch.bool, device=device)
        kept_elements = sum(self._shards) + self._slots
        self.momentum = torch.zeros(kept_elements if outer["momentum"] else 0, dtype=torch.float32, device=device)
        self.rounding = torch.zeros(0 if payload == "as_is" else kept_elements, dtype=torch.float32, device=device)
        # With error feedback what messages leave out, where the parameters are.
        self.rest = torch.zeros(self._trash + _ROW if error_feedback else 0, dtype=torch.float32, device=device)
        self.under_way: Deque[Sent] = collections.deque()
        self._sent: Optional[Tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]] = None  # by the last exchange, for last_sent

    def _lay_out(self) -> None:
        self._sizes = self.fragments.sizes
        *self._layer_begins, self._trash = itertools.accumulate((-(-size // _ROW) * _ROW for size in self.layout.sizes), initial=0)
        cut = self._options.fragment_elements
        begins, rows = [], []
        for begin, size in zip(self._layer_begins, self.layout.sizes):
            for at in range(0, max(size, 1), cut or max(size, 1)):
                begins.append(begin + at)
                rows.append(-(-min(size - at, cut or size) // _ROW))
        assert len(begins) == len(self._sizes)
        self._shards = [_slice_of(size, self._world) for size in self._sizes]  # elements of a fragment that each rank owns, padded
        kept_begins = list(itertools.accumulate(self._shards, initial=0))
        # Of the fragments, and of one without elements, which what is not used belongs to.
        self._table = torch.tensor([*zip(self._shards, self._sizes, begins, kept_begins), (0, 0, 0, kept_begins[-1])], dtype=torch.int64,
                                   device=self._device)
        self._weights = torch.tensor([((2 * fragment + 1) * 0x9E3779B97F4A7C15 + 2 ** 63) % 2 ** 64 - 2 ** 63 for fragment in
                                      range(len(self._sizes))], dtype=torch.int64, device=self._device)
        self._elements = self._table[:-1, 1].double()
        self._order, self._power = NORMS[self._options.value]
        self._divisors = self._elements.clamp(min=1).pow(self._power)
        self._rows = None if all(each <= 1 for each in rows) and 0 not in rows else self._per_fragment(rows, torch.int64)
        share = share_to_send(self._options) * self.fragments.elements
        self._share, self._most = share, share + max(self._sizes)
        padding = sum(shard * self._world - size for shard, size in zip(self._shards, self._sizes))
        elements = min(math.floor(self._most), self.fragments.elements) + padding
        self._slots = _slice_of(elements, self._world)  # of a rank, in what a step sends
        self._slot = torch.arange(self._slots, dtype=torch.int64, device=self._device)
        self._in_trash = self._slot.remainder(_ROW) + self._trash
        self._owner = torch.arange(self._world, dtype=torch.int64, device=self._device).view(-1, 1)

    def _per_fragment(self, what: Any, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.tensor([what] * len(self._sizes) if isinstance(what, int) else what, dtype=dtype, device=self._device)

    # --- the parameters ---

    def begin(self, names: Sequence[str], own: "OwnParameters") -> None:
        """They lie in one flat tensor from now on, and are those of rank 0."""
        own.lie_in(self)

    def adopt(self, parameters: Sequence[torch.Tensor], copied: Sequence[int] = ()) -> None:
        """Puts the parameters into one flat tensor, with those of rank 0; of the `copied` ones, by number, their values only."""
        self.local = torch.zeros(self._trash + _ROW, dtype=torch.float32, device=self._device)
        self.hold(parameters, copied)
        for number in copied:
            self.layers(self.local)[number].copy_(parameters[number].detach().as_strided((self.layout.sizes[number],), (1,)))
        if self._rank:
            self.local.zero_()
        dist.all_reduce(self.local, group=self._group)
        self.shared = self.local.clone()

    def hold(self, parameters: Sequence[torch.Tensor], copied: Sequence[int] = ()) -> None:
        """Takes those that lie elsewhere, as after Module.load_state_dict(..., assign=True), into the flat tensor."""
        begin = self.local.data_ptr()
        for number, (parameter, at, size) in enumerate(zip(parameters, self._layer_begins, self.layout.sizes)):
            if size and number not in copied and parameter.data_ptr() != begin + 4 * at:
                to = self.local.as_strided(parameter.shape, parameter.stride(), at)
                to.copy_(parameter.detach())
                parameter.data = to

    def layers(self, flat: torch.Tensor) -> List[torch.Tensor]:
        """Each layer, as its elements lie in memory."""
        return [flat[at:at + size] for at, size in zip(self._layer_begins, self.layout.sizes)]

    def shared_layers(self) -> List[torch.Tensor]:
        return self.layers(self.shared)

    def tensors(self) -> Tuple[List[torch.Tensor], List[torch.Tensor]]:
        """The rank's own parameters, and the shared ones."""
        return [self.local], [self.shared]

    # --- an exchange ---

    def exchange(self, past: Callable[[], torch.Tensor]) -> Later:
        """`past` gives the fingerprint of what all ranks do alike."""
        fingerprint = past()
        self._arrive(self.step + 1 - self.delay)
        self.step += 1
        found = self._send(self._sum(fingerprint))
        self._hand_on(self.step - self.delay // 2)
        self._arrive(self.step - self.delay)
        overflowed, self._overflowed = self._overflowed, self._no
        return Later(torch.cat([each.view(1) for each in (*found, overflowed)]))

    @property
    def sent_bytes(self) -> int:
        """That a rank gives to the collectives of an exchange, the replies apart."""
        return int(self._world * self._payload.bytes_of(self._slots) + 8 * (len(self._sizes) + 6))

    def _values(self) -> torch.Tensor:
        deltas = (self.shared - self.local)[:self._trash].view(-1, _ROW)
        norms = torch.linalg.vector_norm(deltas, self._order, dim=1, dtype=torch.float64)
        if self._rows is not None:
            if self._order == 2:
                norms.square_()
            norms = torch.segment_reduce(norms, "sum", lengths=self._rows, unsafe=True)
            if self._order == 2:
                norms.sqrt_()
        return torch.div(norms, self._divisors, out=norms) if self._power else norms

    def meet(self, past: torch.Tensor) -> torch.Tensor:
        """The all-reduce of an exchange. Returns the sums of `past`."""
        return self._sum(past).cpu()[[-4, -1]]

    def _sum(self, past: torch.Tensor) -> torch.Tensor:
        """The sums over the ranks of the values, of the fingerprints of the values and of when each fragment was sent, of the first number
        of `past`, and of their squares. A value is not finite where a rank's parameters are not."""
        values = self._values()
        prints = ((torch.stack([values, self._sent_in]).view(torch.int64) * self._weights).sum(1) >> 40 & _BITS).double()
        past = past.to(self._device)
        sums = torch.cat([values, prints, past[:1], prints.square(), past[1:]])
        dist.all_reduce(sums, group=self._group)
        return sums

    def _send(self, sums: torch.Tensor) -> List[torch.Tensor]:
        """Chooses by the rule of lamina::selector, and begins the way to the owners. Returns the numbers of a Status but for the last."""
        values, prints, squares = torch.split(sums, [len(self._sizes), 3, 3])
        has_equal_deltas, one_choice, one_past = (squares * self._world == prints.square()).unbind()
        largest, is_one = values.max(), one_choice & one_past
        is_finite = largest < torch.inf
        may_send = is_finite & is_one
        scores = values / self._world
        if self._by_score:
            scores = scores * (self.step - self._sent_in)
        if self.delay:
            scores = scores.masked_fill(self._going, -1.0)
        ordered, order = torch.sort(scores, descending=True, stable=True)
        sizes = self._elements[order]
        through = sizes.cumsum(0)
        if self._options.send_budget is not None:
            self._allowance = torch.where(may_send, (self._allowance + self._share).clamp(max=self._most), self._allowance)
            fits = (through <= self._allowance) & (ordered > 0)
        elif self._options.drop_ratio == 0:
            fits = (ordered >= 0) & (sizes > 0)
        else:
            is_beyond = self.fragments.elements - (through - sizes) > self._options.drop_ratio * self.fragments.elements
            least = ordered.masked_fill(~is_beyond, torch.inf).amin()
            fits = (ordered >= least) & (ordered > 0) & (through <= self._most)
        fits = fits & may_send
        elements = (sizes * fits).sum()
        self._allowance = self._allowance - elements
        self._sent = self.step, ordered, fits, elements
        chosen = torch.zeros(len(self._sizes) + 1, dtype=torch.bool, device=self._device).scatter_(0, order, fits)
        self._sent_in = self._sent_in.masked_fill(chosen[:-1], self.step)
        if self.delay:
            self._going = self._going | chosen[:-1]
        self._begin(chosen)
        return [largest, is_finite, is_one, has_equal_deltas]

    def _begin(self, chosen: torch.Tensor) -> None:
        ends = (self._table[:, 0] * chosen).cumsum(0)
        fragment = torch.searchsorted(ends[:-1], self._slot, right=True)
        shards, sizes, begins, kept_begins = self._table[fragment].unbind(1)
        within = self._slot - ends[fragment] + shards  # of the shard that an owner has of the fragment
        offset = self._owner * shards + within
        places = torch.where(offset < sizes, offset + begins, self._in_trash)
        deltas = self.shared[places] - self.local[places]
        payload, said = self._payload.encode(deltas + self.rest[places] if len(self.rest) else deltas)
        going = Sent(self.step, chosen[:-1], places, within + kept_begins, *((deltas, said) if len(self.rest) else (said,)))
        going.received = torch.empty_like(payload)
        going.work = dist.all_to_all_single(going.received, payload, group=self._group, async_op=True)
        self.under_way.append(going)

    @property
    def last_sent(self) -> Optional[Tuple[int, int, int, float]]:
        """The step, fragments, elements, and the smallest score that was sent, of the last exchange; None before the first. Waits."""
        if self._sent is None:
            return None
        step, ordered, fits, elements = self._sent
        return step, int(fits.sum()), int(elements), float(ordered.masked_fill(~fits, torch.inf).amin())

    def _received(self, going: Sent) -> torch.Tensor:
        going.work.wait()
        received, going.work, going.received = going.received, None, None
        assert received is not None
        return received

    def reply(self, going: Sent) -> None:
        """Waits for what the others have sent, and makes of it what all will subtract of this rank's shards: the outer optimizer's step,
        as lamina::outer_optimizer rounds it. Not a number if it is not finite."""
        if going.reply is not None or going.update is not None:
            return
        of_ranks = self._payload.decode(self._received(going))
        mean = functools.reduce(torch.add, of_ranks.unbind()) if self._world <= _SUMMED_IN_ORDER else of_ranks.sum(0)
        mean = mean / self._world if self._world > 1 else mean
        if len(self.momentum):
            mu = self._outer["momentum"]
            going.momentum = (self.momentum[going.kept_at] * mu).add_(mean)
            mean = mean + going.momentum * mu
        if self._outer["rate"] != 1:
            mean = mean * self._outer["rate"]
        if len(self.rounding):
            mean = mean + self.rounding[going.kept_at]
        going.reply, said = self._payload.encode(mean)
        if len(self.rounding):
            going.rounding = mean - said

    def _hand_on(self, last: int) -> None:
        for going in self.under_way:
            if going.step <= last and going.update is None and not going.is_handed_on:
                self.reply(going)
                assert going.reply is not None
                going.received = torch.empty((self._world, *going.reply.shape), dtype=torch.uint8, device=self._device)
                going.work = _all_gather(going.received, going.reply, self._group)

    def update_of(self, going: Sent) -> None:
        """Waits for the replies of all owners."""
        if going.update is None:
            going.update = self._payload.decode(self._received(going))

    def settle(self) -> None:
        """What can be had of what is under way without the others doing anything more."""
        for going in self.under_way:
            if going.is_handed_on:
                self.update_of(going)
            else:
                self.reply(going)

    def _arrive(self, last: int) -> None:
        while self.under_way and self.under_way[0].step <= last:
            self.update_of(self.under_way[0])
            going = self.under_way.popleft()
            update = going.update
            assert update is not None
            is_bad = ~(torch.linalg.vector_norm(update, torch.inf) < torch.inf)
            update, sent = update.masked_fill(is_bad, 0.0), going.elements.masked_fill(is_bad, 0.0)
            # In this order, as lamina::local_delta rounds.
            self.local.index_put_((going.places,), self.local[going.places] + sent - update)
            self.shared.index_put_((going.places,), self.shared[going.places] - update)
            if going.message is not None:
                message = going.message.masked_fill(is_bad, 0.0)
                self.rest.index_put_((going.places,), self.rest[going.places] + sent - message)
            for kept, each in ((self.momentum, going.momentum), (self.rounding, going.rounding)):
                if each is not None:
                    kept.index_put_((going.kept_at,), torch.where(is_bad, kept[going.kept_at], each))
            if self.delay:
                self._going = self._going & ~going.chosen
            self._overflowed = is_bad
            self.applied = going.step

    threshold, last_choice = 0.0, 0  # as ranks compare them: what they are only the device knows

    def abandon(self) -> None:
        """What is under way is in the local deltas again."""
        self.under_way.clear()
        self._going.zero_()

    # --- what is not a step ---

    def finish(self) -> None:
        self._hand_on(self.step)
        self._arrive(self.step)

    def average(self) -> Optional[List[torch.Tensor]]:
        """The shared parameters once all local deltas, and what rounding has left, are averaged into them, as in tensors(); None if that is
        not finite. Waits."""
        deltas = self.shared - self.local
        if len(self.rest):
            deltas += self.rest
        if len(self.rounding):
            at, kept_at = self._shard_places()
            deltas[at] = deltas[at].add_(self.rounding[kept_at], alpha=self._world)
        dist.all_reduce(deltas, group=self._group)
        return [self.shared - deltas / self._world] if bool(torch.isfinite(deltas).all()) else None

    def set_all(self, parameters: Sequence[torch.Tensor]) -> None:
        for each in (self.local, self.shared):
            each.copy_(parameters[0])
        self.rounding.zero_()
        self.rest.zero_()

    def _shard_places(self) -> Tuple[torch.Tensor, torch.Tensor]:
        """Of the elements that a rank owns: where they are in the flat parameters, and in what it keeps of its shards."""
        shards, sizes, begins, kept_begins = self._table[:-1].unbind(1)
        fragment = torch.repeat_interleave(torch.arange(len(self._sizes), device=self._device), shards)
        kept_at = torch.arange(len(fragment), device=self._device)
        offset = kept_at - kept_begins[fragment] + shards[fragment] * self._rank
        is_one = offset < sizes[fragment]
        return (offset + begins[fragment])[is_one], kept_at[is_one]

    def save(self) -> Dict[str, Any]:
        """Once all that is under way is settled."""
        names = [field.name for field in dataclasses.fields(Sent) if field.name not in ("work", "received")]
        return {"step": self.step, "applied": self.applied, "sent_in": self._sent_in.clone(), "allowance": self._allowance.clone(),
                "momentum": self.momentum.clone(), "rounding": self.rounding.clone(),
                "shared": [each.clone() for each in self.layers(self.shared)], "local": [each.clone() for each in self.layers(self.local)],
                "rest": [each.clone() for each in self.layers(self.rest)] if len(self.rest) else [],
                "under_way": [{name: _cloned(getattr(going, name)) for name in names} for going in self.under_way]}

    def own_slices(self, whole: torch.Tensor) -> torch.Tensor:
        """Of what joined_slices() has made, what this rank keeps. ValueError for another model."""
        if not len(whole):
            return whole
        if len(whole) != self.fragments.elements:
            raise ValueError(f"there are {len(whole)} elements of all slices, the model has {self.fragments.elements}")
        own = [torch.nn.functional.pad(each, (0, size * self._world - len(each)))[self._rank * size:][:size]
               for each, size in zip(torch.split(whole, self._sizes), self._shards)]
        return torch.cat([*own, whole.new_zeros(self._slots)])

    def check(self, saved: Dict[str, Any]) -> None:
        """ValueError for what is not of this model."""
        now = self.save()
        for name, is_one in (("shared", self.layout.sizes), ("local", self.layout.sizes), ("rest", []), ("sent_in", None), ("momentum", None),
                             ("rounding", None), ("allowance", None)):
            given, own = saved.get(name), now[name]
            if is_one is not None:
                fits = isinstance(given, list) and [_shape_of(each) for each in given] == [_shape_of(each) for each in own]
            else:
                fits = _shape_of(given) == _shape_of(own)
            if not fits:
                raise ValueError(f"'{name}' is missing, or has another size or type")
            tensors: List[Any] = given if isinstance(given, list) else [given]
            for each in tensors:
                if not bool(torch.isfinite(each).all()):
                    raise ValueError(f"'{name}' is not finite")
        for name in ("step", "applied"):
            if not isinstance(saved.get(name), int) or saved[name] < 0:
                raise ValueError(f"'{name}' is {saved.get(name)!r}")
        if not isinstance(saved.get("under_way"), list) or len(saved["under_way"]) > self.delay:
            raise ValueError("what is under way is not all there")

    def load(self, saved: Dict[str, Any]) -> None:
        """What was checked."""
        def here(each: Any) -> Any:
            return each.to(self._device, copy=True) if isinstance(each, torch.Tensor) else each
        under_way = collections.deque(Sent(**{name: here(each) for name, each in going.items()}) for going in saved["under_way"])
        for flat, name in ((self.shared, "shared"), (self.local, "local"), (self.rest, "rest")):
            for to, each in zip(self.layers(flat), saved[name]):
                to.copy_(each)
        self.momentum.copy_(saved["momentum"])
        self.rounding.copy_(saved["rounding"])
        self._sent_in, self._allowance = (here(saved[name]) for name in ("sent_in", "allowance"))
        self.step, self.applied, self.under_way, self._sent = saved["step"], saved["applied"], under_way, None
        self._going.zero_()
        for going in self.under_way:
            self._going |= going.chosen
        self._overflowed = self._no


def _slice_of(elements: int, world: int) -> int:
    """What each rank owns of so many, padded."""
    return -(-elements // (BLOCK * world)) * BLOCK


def joined_slices(kept: List[torch.Tensor], sizes: List[int]) -> torch.Tensor:
    """What each rank keeps of its slices, as one tensor of all fragments; empty if they keep nothing."""
    if not len(kept[0]):
        return kept[0]
    slices = [_slice_of(size, len(kept)) for size in sizes]
    of_ranks = zip(*(torch.split(each[:sum(slices)], slices) for each in kept))
    return torch.cat([torch.cat(of_fragment)[:size] for of_fragment, size in zip(of_ranks, sizes)])


def _cloned(what: Any) -> Any:
    return what.clone() if isinstance(what, torch.Tensor) else what


def _shape_of(what: Any) -> Any:
    return (tuple(what.shape), what.dtype) if isinstance(what, torch.Tensor) else None


def _all_gather(to: torch.Tensor, own: torch.Tensor, group: Any) -> Any:
    if dist.get_backend(group) == "gloo":  # which has no other in PyTorch 1.13
        return dist.all_gather(list(to.unbind()), own, group=group, async_op=True)
    return dist.all_gather_into_tensor(to.view(-1), own, group=group, async_op=True)
