# SPDX-License-Identifier: MIT
import dataclasses
from typing import Any, Dict, Iterable, List, Optional, Tuple

import torch
import torch.distributed as dist

import lamina

_NOTHING = torch.empty(0, dtype=torch.float32)


@dataclasses.dataclass
class UnderWay:
    """What one step has sent, until its update is applied. On its way to the owners, then as the answer of this rank, then on its way
    from the owners, then as the update."""

    step: int
    parts: List[int]
    work: Any = None  # of the half that is on its way
    received: Optional[torch.Tensor] = None  # by that half
    answer: Optional[torch.Tensor] = None  # the bytes of what all subtract of this rank's slices, and a last one: 1 for a failure
    # Of this rank's slices, once the update is applied: the outer momentum, and what rounding took away.
    momentum: torch.Tensor = _NOTHING
    rounding: torch.Tensor = _NOTHING
    update: Optional[torch.Tensor] = None

    @property
    def handed_on(self) -> bool:
        """The answers are on their way."""
        return self.answer is not None and self.work is not None


class OwnedSlices:
    """The server's part in local updates, shared out: each rank owns a slice of every part, and is the server of it. What the others
    sent of it comes to this rank as payload, is added up in the order of the ranks, goes through the outer step, and goes to all as
    payload; what rounding takes away of that stays here, and comes later. So the update is the same bits on all ranks, those that
    one server would have made, and each rank sends and receives 2 (W - 1) / W of a payload: less than two, whatever W is.

    Nothing has happened to the outer step until applied(): what was abandoned can be forgotten. Parts under way are not sent again,
    so that steps do not meet.

    Source: the owners' reduce-scatter and allgather of an allreduce (Rabenseifner 2004), with docs/scheme/beyond.md, Local updates.
    """

    def __init__(self, parts: lamina.Layout, group: Optional[dist.ProcessGroup], payload: str, outer: Dict[str, Any]) -> None:
        self._group, self._payload, self._options = group, payload, outer
        self._world_size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._slices, self._part_sizes = lamina.Slices(parts, self._world_size), parts.sizes
        self._layouts = [self._slices.of(owner) for owner in range(self._world_size)]
        self._sizes_of = [layout.sizes for layout in self._layouts]
        self._own, self._sizes = self._layouts[self._rank], self._sizes_of[self._rank]
        self._begins = [0]
        for size in self._sizes:
            self._begins.append(self._begins[-1] + size)
        fresh = self._outer_step(self._own)
        self.momentum, self.rounding = (_floats(len(each)).zero_() for each in (fresh.momentum(), fresh.rounding()))

    def _outer_step(self, layout: lamina.Layout) -> lamina.OuterStep:
        return lamina.OuterStep(layout, payload=self._payload, **self._options)

    # --- a step, on all ranks in one order ---

    def send(self, step: int, parts: List[int], packed: torch.Tensor) -> Tuple[UnderWay, int]:
        """Begins the way to the owners of what this rank has of these parts, one behind the other, as its payload can say it; and the
        bytes of it."""
        going = UnderWay(step, parts)
        if packed.numel() == 0:
            going.update = packed
            return going, 0
        pieces = []
        for owner, (layout, sizes) in enumerate(zip(self._layouts, self._sizes_of)):
            slices = _floats(_elements(sizes, parts))
            self._slices.take(owner, parts, packed, slices)
            pieces.append(_tensor_of(lamina.encode_payload(layout, parts, slices, self._payload)))
        own = pieces[self._rank].numel()
        self._exchange(going, pieces, [own] * self._world_size)
        return going, sum(piece.numel() for piece in pieces)

    def answer(self, going: UnderWay) -> None:
        """Waits for what the others have sent, unless that was done, and makes of it what all will subtract of this rank's slices."""
        if going.answer is not None or going.update is not None:
            return
        mean = self._mean_of(going.parts, self._received(going))
        failed = not self._take_outer_step(going, mean)
        answer = lamina.encode_payload(self._own, going.parts, mean.zero_() if failed else mean, self._payload)
        going.answer = torch.cat([_tensor_of(answer), torch.tensor([failed], dtype=torch.uint8)])

    def hand_on(self, going: UnderWay) -> None:
        """Begins the way of the answers to all, unless that was done."""
        if going.update is not None or going.handed_on:
            return
        self.answer(going)
        assert going.answer is not None
        self._exchange(going, [going.answer] * self._world_size, self._bytes_of_answers(going.parts))

    def settle(self, going: UnderWay) -> None:
        """What can be had without the others doing anything more: the update, if the answers are on their way, or the own answer."""
        if going.handed_on:
            self.update_of(going)
        else:
            self.answer(going)

    def update_of(self, going: UnderWay) -> torch.Tensor:
        """What all subtract of the parts, one behind the other, once the answers of all owners are there. OverflowError, on all ranks
        alike, if any owner's is not finite."""
        if going.update is not None:
            return going.update
        received = torch.split(self._received(going), self._bytes_of_answers(going.parts))
        for owner, answer in enumerate(received):
            if answer[-1] != 0:
                raise OverflowError(f"LocalUpdates: the sum of what step {going.step} sent is not finite, on rank {owner} of the group")
        update = _floats(_elements(self._part_sizes, going.parts))
        for owner, (answer, layout, sizes) in enumerate(zip(received, self._layouts, self._sizes_of)):
            slices = _floats(_elements(sizes, going.parts))
            lamina.decode_payload(layout, going.parts, answer[:-1], self._payload, slices)
            self._slices.put(owner, going.parts, slices, update)
        going.update, going.answer = update, None
        return update

    def applied(self, going: UnderWay) -> None:
        """The update is in the shared parameters: what was made for it of the outer step counts."""
        for whole, piece in ((self.momentum, going.momentum), (self.rounding, going.rounding)):
            if piece.numel():
                for to, each in zip(self._places(whole, going.parts), torch.split(piece, [self._sizes[part] for part in going.parts])):
                    to.copy_(each)

    # --- checkpoints ---

    def check(self, momentum: torch.Tensor, rounding: torch.Tensor) -> None:
        """ValueError for what cannot take the place of momentum and rounding."""
        self._outer_step(self._own).restore(momentum.contiguous(), rounding.contiguous())

    def check_under_way(self, going: UnderWay) -> bool:
        """Whether it is what settle() leaves: an answer or an update, and what follows from it here."""
        elements = _elements(self._sizes, going.parts)
        return ((going.update is None) != (going.answer is None)
                and (going.update is None or going.update.numel() == _elements(self._part_sizes, going.parts))
                and (going.answer is None or self._is_answer(going.answer, going.parts))
                and going.momentum.numel() == (elements if self.momentum.numel() else 0)
                and going.rounding.numel() == (elements if self.rounding.numel() else 0))

    def _is_answer(self, answer: torch.Tensor, parts: List[int]) -> bool:
        if answer.numel() != self._bytes_of_answers(parts)[self._rank] or answer[-1] > 1:
            return False
        numbers = _floats(_elements(self._sizes, parts))
        lamina.decode_payload(self._own, parts, answer[:-1].contiguous(), self._payload, numbers)
        return bool(torch.isfinite(numbers).all())

    # --- within ---

    def _exchange(self, going: UnderWay, pieces: List[torch.Tensor], expected: List[int]) -> None:
        going.received = torch.empty(sum(expected), dtype=torch.uint8)
        going.work = dist.all_to_all_single(going.received, torch.cat(pieces), expected, [piece.numel() for piece in pieces],
                                            group=self._group, async_op=True)

    def _received(self, going: UnderWay) -> torch.Tensor:
        going.work.wait()
        received, going.work, going.received = going.received, None, None
        assert received is not None
        return received

    def _mean_of(self, parts: List[int], received: torch.Tensor) -> torch.Tensor:
        mean, next_one = (_floats(_elements(self._sizes, parts)) for _ in range(2))
        for rank, piece in enumerate(torch.split(received, received.numel() // self._world_size) if received.numel() else ()):
            lamina.decode_payload(self._own, parts, piece, self._payload, next_one if rank else mean)
            if rank:
                mean += next_one
        return mean.div_(self._world_size)

    def _take_outer_step(self, going: UnderWay, mean: torch.Tensor) -> bool:
        """The mean of this rank's slices to what all subtract, in place, and what becomes of the outer step. False, and the outer step
        stays what it is, if a number is not finite, or might become infinite."""
        going.momentum, going.rounding = (torch.cat(list(self._places(whole, going.parts))) if whole.numel() else _NOTHING
                                          for whole in (self.momentum, self.rounding))
        layout = lamina.Layout({str(part): (self._sizes[part],) for part in going.parts})
        outer = self._outer_step(layout)
        outer.restore(going.momentum, going.rounding)
        try:
            outer(list(range(len(going.parts))), mean)
        except ValueError:
            return False
        momentum, rounding = (torch.frombuffer(each, dtype=torch.float32) if len(each) else _NOTHING
                              for each in (outer.momentum(), outer.rounding()))
        going.momentum, going.rounding = momentum, rounding
        return True

    def _places(self, whole: torch.Tensor, parts: Iterable[int]) -> Iterable[torch.Tensor]:
        """The slices that this rank owns of the parts, in what it has of all."""
        return (whole[self._begins[part]:self._begins[part + 1]] for part in parts)

    def _bytes_of_answers(self, parts: List[int]) -> List[int]:
        return [lamina.payload_bytes(layout, parts, self._payload) + 1 for layout in self._layouts]


def _floats(elements: int) -> torch.Tensor:
    """Whatever the default type is."""
    return torch.empty(elements, dtype=torch.float32)


def _elements(sizes: List[int], parts: List[int]) -> int:
    return sum(sizes[part] for part in parts)


def _tensor_of(given: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(given), dtype=torch.uint8) if given else torch.empty(0, dtype=torch.uint8)
