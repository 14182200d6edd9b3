# SPDX-License-Identifier: MIT
import collections
import dataclasses
from typing import Any, Callable, Deque, Dict, List, Optional, Sequence, Set, Tuple, cast

import torch
import torch.distributed as dist

import lamina
from lamina.torch import _step
from lamina.torch._checkpoint import is_count, is_flat, require
from lamina.torch._local_device import Status
from lamina.torch._own import OwnParameters, arrays_of
from lamina.torch._owned import ShardOwners, UnderWay

_KEPT = ("answer", "momentum", "rounding", "update")  # of what is under way


class CpuExchange:
    """The numbers of local updates by lamina's C++: lamina.LocalDelta for this rank, and ShardOwners for the server's part. What an exchange
    has found is known when it ends."""

    def __init__(self, layout: lamina.Layout, options: lamina.Options, *, by_score: bool, payload: str, error_feedback: bool,
                 outer: Dict[str, float], delay: int, group: Optional[dist.ProcessGroup]) -> None:
        kept = {name: value for name, value in dataclasses.asdict(options).items() if name != "momentum"}
        self.layout, self.delay, self._error_feedback, self._group = layout, delay, error_feedback, group
        self._world, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._fragment_elements = options.fragment_elements
        self.core = lamina.LocalDelta(layout, by_score=by_score, payload=payload, error_feedback=error_feedback, sender=self._rank, **kept)
        self.fragments = self.core.fragments
        self.owned = ShardOwners(self.fragments, group, payload, outer)
        self.under_way: Deque[UnderWay] = collections.deque()
        self.applied = self.last_choice = self.sent_bytes = 0
        self.last_sent: Optional[Tuple[int, int, int, float]] = None

    @property
    def step(self) -> int:
        return int(self.core.step)

    @property
    def threshold(self) -> float:
        return float(self.core.threshold)

    # --- the parameters ---

    def begin(self, names: Sequence[str], own: OwnParameters) -> None:
        """They stay where they are, and are those of rank 0."""
        own.lie_here()
        first = torch.cat(own.flat)
        if self._rank != 0:
            first.zero_()
        dist.all_reduce(first, group=self._group)
        self.shared = [each.clone() for each in torch.split(first, self.layout.sizes)]
        for y, x in zip(own.flat, self.shared):
            y.copy_(x)
        own.give()
        self._names, self._own, self._shared_arrays = names, own, arrays_of(names, self.shared)

    def shared_layers(self) -> List[torch.Tensor]:
        return self.shared

    def tensors(self) -> Tuple[List[torch.Tensor], List[torch.Tensor]]:
        """The rank's own parameters, and the shared ones."""
        return self._own.flat, self.shared

    # --- an exchange ---

    def exchange(self, past: Callable[[], torch.Tensor]) -> Status:
        """`past` gives the fingerprint of what all ranks do alike. Where ranks have parted nothing more is done, and where parameters are
        not finite nothing is sent."""
        self._arrive(self.core.step + 1 - self.delay)
        status, sent_bytes = self._agree(past)
        if not status.is_one:
            return status
        if status.is_finite:
            sent_bytes += self._send()
        self._hand_on(self.core.step - self.delay // 2)
        if status.is_finite:
            self._arrive(self.core.step - self.delay)
            self.sent_bytes = sent_bytes
            self.last_sent = self.core.step, len(self.core.sent), self.core.sent_elements, self.core.threshold
        return status

    def meet(self, past: torch.Tensor) -> torch.Tensor:
        """The all-reduce of an exchange. Returns the sums of `past`."""
        return self._sum(torch.zeros(len(self.fragments), dtype=torch.float64), False, past)[-2:]

    def _sum(self, values: torch.Tensor, is_refused: bool, past: torch.Tensor) -> torch.Tensor:
        """Over the ranks: the values, whether a rank has none, and the fingerprints of the values and of `past`."""
        sums = torch.cat([values, torch.tensor([is_refused], dtype=torch.float64), _step.fingerprint(values.numpy()), past])
        dist.all_reduce(sums, group=self._group)
        return sums

    def _agree(self, past: Callable[[], torch.Tensor]) -> Tuple[Status, int]:
        """And the bytes that it took."""
        core, shared, is_refused = self.core, self._shared_arrays, False
        try:
            core.observe_all(shared, self._own.arrays)
        except ValueError:
            is_refused = True
            core.observe_all(shared, shared)  # the step begins here as on the other ranks
        values = torch.frombuffer(core.values(), dtype=torch.float64)
        sums = self._sum(values, is_refused, past())
        status = Status(has_deltas=bool(values.any()), is_finite=not sums[-5], is_one=_step.all_equal(self._world, sums[-2:]),
                        has_equal_deltas=_step.all_equal(self._world, sums[-4:-2]), overflowed=False)
        if status.is_one and status.is_finite:
            core.select(sums[:-5] / self._world)
        elif status.is_one:
            core.abandon()
        return status, sums.numel() * sums.element_size()

    def _send(self) -> int:
        core = self.core
        packed = torch.empty(core.sent_elements, dtype=torch.float32)
        core.pack(self._shared_arrays, self._own.arrays, packed)
        going, sent_bytes = self.owned.send(core.step, core.sent, packed)
        core.commit()
        self.under_way.append(going)
        self.last_choice = _step.choice_of(core.sent_bitmap)
        return sent_bytes

    def _hand_on(self, last: int) -> None:
        """Answers what was sent in the steps up to `last`. Not before the ranks know that they have one past: all must begin this."""
        for going in self.under_way:
            if going.step <= last:
                self.owned.hand_on(going)

    def _arrive(self, last: int) -> None:
        """Applies the updates of the steps up to `last`, in their order. They are on their way, so no other rank need begin anything."""
        while self.under_way and self.under_way[0].step <= last:
            first = self.under_way[0]
            self.core.apply(first.step, self.owned.update_of(first), self._shared_arrays, self._own.arrays)
            self.owned.applied(first)
            self.under_way.popleft()
            self.applied = first.step

    def settle(self) -> None:
        """What can be had of what is under way without the others doing anything more."""
        for going in self.under_way:
            self.owned.settle(going)

    def abandon(self) -> None:
        """What is under way is in the local deltas again."""
        self.core.abandon()
        while self.under_way:
            self.core.abandon(self.under_way.popleft().step)

    # --- what is not a step ---

    def finish(self) -> None:
        """Applies all that is under way."""
        self._hand_on(self.core.step)
        self._arrive(self.core.step)

    def average(self) -> Optional[List[torch.Tensor]]:
        """The shared parameters once all local deltas, and what rounding has left, are averaged into them, bitwise identical on all ranks. None
        if that is not finite."""
        deltas = torch.cat([shared - own for shared, own in zip(self.shared, self._own.flat)])
        if self._error_feedback:
            deltas += torch.frombuffer(self.core.rest(), dtype=torch.float32)
        self.owned.add_rounding(deltas)
        dist.all_reduce(deltas, group=self._group)
        if not torch.isfinite(deltas).all():
            return None
        deltas /= self._world
        return [shared - delta for shared, delta in zip(self.shared, torch.split(deltas, self.layout.sizes))]

    def set_all(self, parameters: Sequence[torch.Tensor]) -> None:
        for own, shared, each in zip(self._own.flat, self.shared, parameters):
            own.copy_(each)
            shared.copy_(each)
        self.owned.rounding.zero_()
        self.core.clear_rest()

    # --- checkpoints ---

    def save(self) -> Dict[str, Any]:
        """Once all that is under way is settled."""
        return {"step": self.step, "applied": self.applied, "last_choice": self.last_choice,
                "memory": torch.frombuffer(bytearray(self.core.save()), dtype=torch.uint8),
                "momentum": self.owned.momentum.clone(), "rounding": self.owned.rounding.clone(),
                "shared": [each.clone() for each in self.shared], "local": [each.clone() for each in self._own.flat],
                "under_way": [{"step": going.step, "fragments": list(going.fragments), **{name: _cloned(getattr(going, name)) for name in _KEPT}}
                              for going in self.under_way]}

    def own_slices(self, whole: torch.Tensor) -> torch.Tensor:
        """Of what joined_shards() has made, what this rank owns. ValueError for another model."""
        if whole.numel() not in (0, self.fragments.elements):
            raise ValueError(f"there are {whole.numel()} elements of all fragments, the model has {self.fragments.elements}")
        return self.owned.shard_of(whole)

    def check(self, saved: Dict[str, Any]) -> None:
        """ValueError for what is not of this model."""
        for name in ("step", "applied", "last_choice", "memory", "momentum", "rounding", "shared", "local", "under_way"):
            require(name in saved, f"'{name}' is missing")
        for name in ("step", "applied", "last_choice"):
            require(is_count(saved[name]), f"'{name}' is {saved[name]!r}")
        step, applied = saved["step"], saved["applied"]
        require(is_flat(saved["memory"], torch.uint8), "'memory' is no tensor of bytes")
        for name in ("momentum", "rounding"):
            require(is_flat(saved[name], torch.float32), f"'{name}' is no tensor of float32")
        self.owned.check(saved["momentum"], saved["rounding"])
        again = self._core_of(saved)
        require(again.step == step, f"'step' is {step}, and {again.step} in 'memory'")
        for which in ("shared", "local"):
            given = saved[which]
            require(isinstance(given, list) and all(is_flat(each, torch.float32) for each in given)
                    and [each.numel() for each in given] == self.layout.sizes, f"the {which} parameters have other sizes, or types")
            for number, each in enumerate(given):
                require(bool(torch.isfinite(each).all()), f"the {which} parameters of {self._names[number]} are not finite")
        require(isinstance(saved["under_way"], list) and again.steps_under_way == len(saved["under_way"]),
                "what is under way is not all there")
        require(applied <= step, f"'applied' is {applied}, of {step} steps")
        last, going_fragments = applied, cast(Set[int], set())
        for each in saved["under_way"]:
            require(isinstance(each, dict) and each.keys() == {"step", "fragments", *_KEPT} and is_count(each["step"])
                    and last < each["step"] <= step, f"what is under way are not steps from {applied + 1} to {step}, in their order")
            last = each["step"]
            try:
                again.abandon(last)
            except RuntimeError as error:
                raise ValueError(f"what is under way in 'memory' is not step {last}") from error
            self._check_going(each, step, going_fragments)

    def _core_of(self, saved: Dict[str, Any]) -> Any:
        core = lamina.LocalDelta(self.layout, fragment_elements=self._fragment_elements, error_feedback=self._error_feedback)
        core.load(memoryview(saved["memory"].cpu().contiguous().numpy()))
        return core

    def _check_going(self, each: Dict[str, Any], step: int, going_fragments: Set[int]) -> None:
        which, fragments, sizes = each["step"], each["fragments"], self.fragments.sizes
        require(isinstance(fragments, list) and all(is_count(fragment) and fragment < len(sizes) for fragment in fragments)
                and all(one < other for one, other in zip(fragments, fragments[1:])), f"what is under way of step {which} are no fragments")
        require(going_fragments.isdisjoint(fragments), f"a fragment of step {which} is under way of an earlier one, too")
        going_fragments.update(fragments)
        for name in _KEPT:
            require(each[name] is None and name in ("answer", "update")
                    or is_flat(each[name], torch.uint8 if name == "answer" else torch.float32),
                    f"'{name}' of what is under way of step {which} has another type")
            require(name == "answer" or each[name] is None or bool(torch.isfinite(each[name]).all()),
                    f"'{name}' of what is under way of step {which} is not finite")
        going = _under_way_of(each)
        require(self.owned.check_under_way(going), f"what is under way of step {which} has another size, or cannot be")
        is_handed_on = which <= step - self.delay // 2 or not any(sizes[fragment] for fragment in fragments)
        require((going.update is not None) == is_handed_on, f"what is under way of step {which} is at another point of its way")

    def load(self, saved: Dict[str, Any]) -> None:
        """What was checked."""
        self.core.load(memoryview(saved["memory"].cpu().contiguous().numpy()))
        for to, each in zip([self.owned.momentum, self.owned.rounding, *self.shared, *self._own.flat],
                            [saved["momentum"], saved["rounding"], *saved["shared"], *saved["local"]]):
            to.copy_(each)
        self.under_way = collections.deque(map(_under_way_of, saved["under_way"]))
        self.applied, self.last_choice, self.last_sent = saved["applied"], saved["last_choice"], None


def _under_way_of(saved: Dict[str, Any]) -> UnderWay:
    return UnderWay(saved["step"], list(saved["fragments"]), **{name: _cloned(saved[name]) for name in _KEPT})


def _cloned(tensor: Optional[torch.Tensor]) -> Any:
    return None if tensor is None else tensor.clone()
