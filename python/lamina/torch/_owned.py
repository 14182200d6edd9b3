# SPDX-License-Identifier: MIT
from __future__ import annotations

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
    fragments: List[int]
    work: Any = None  # of the half that is on its way
    received: Optional[torch.Tensor] = None  # by that half
    answer: Optional[torch.Tensor] = None  # the bytes of what all subtract of this rank's fragments, and a last one: 1 for a failure
    # Of this rank's fragments, once the update is applied: the outer momentum, and what rounding took away.
    momentum: torch.Tensor = _NOTHING
    rounding: torch.Tensor = _NOTHING
    update: Optional[torch.Tensor] = None

    @property
    def handed_on(self) -> bool:
        """The answers are on their way."""
        return self.answer is not None and self.work is not None


class ShardOwners:
    """The server's part in local updates, shared out: rank r of W owns the fragments r, r + W, r + 2 W, ..., and is the server of them.
    What the others sent of them comes to this rank as payload, is summed in the order of the ranks, goes through the outer optimizer, and
    goes to all as payload; what rounding takes away of that stays here, and comes later. So the update is bitwise identical on all ranks,
    those that one server would have made, and each rank sends and receives 2 (W - 1) / W of a payload in the mean, whatever W is.

    Nothing has happened to the outer optimizer until applied(): what was abandoned can be forgotten. Fragments under way are not sent again,
    so that steps do not meet.

    Source: the owners' reduce-scatter and allgather of an allreduce (Rabenseifner 2004), with docs/algorithm.md, Local updates.
    """

    def __init__(self, fragments: lamina.Layout, group: Optional[dist.ProcessGroup], payload: str, outer: Dict[str, Any]) -> None:
        self._group, self._payload, self._options = group, payload, outer
        self._world_size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._fragments, self._sizes = fragments, fragments.sizes
        self._begins, elements = {}, 0  # of this rank's fragments, in what it has of all
        for fragment in self._shard(self._rank, list(range(len(self._sizes)))):
            self._begins[fragment] = elements
            elements += self._sizes[fragment]
        fresh = self._outer_optimizer(list(self._begins))
        self.momentum, self.rounding = (_floats(len(each)).zero_() for each in (fresh.momentum(), fresh.rounding()))

    def _shard(self, owner: int, fragments: List[int]) -> List[int]:
        return [fragment for fragment in fragments if fragment % self._world_size == owner]

    def _sizes_of(self, fragments: List[int]) -> List[int]:
        return [self._sizes[fragment] for fragment in fragments]

    def _outer_optimizer(self, shard: List[int]) -> lamina.OuterOptimizer:
        layout = lamina.Layout({str(fragment): (self._sizes[fragment],) for fragment in shard})
        return lamina.OuterOptimizer(layout, payload=self._payload, **self._options)

    # --- a step, on all ranks in one order ---

    def send(self, step: int, fragments: List[int], packed: torch.Tensor) -> Tuple[UnderWay, int]:
        """Begins the way to the owners of what this rank has of these fragments, one behind the other, as its payload can say it; and the
        bytes of it."""
        going = UnderWay(step, fragments)
        if packed.numel() == 0:
            going.update = packed
            return going, 0
        of_fragment = dict(zip(fragments, torch.split(packed, self._sizes_of(fragments))))
        pieces = []
        for owner in range(self._world_size):
            shard = self._shard(owner, fragments)
            elements = _joined([of_fragment[fragment] for fragment in shard])
            pieces.append(_tensor_of(lamina.encode_payload(self._fragments, shard, elements, self._payload)))
        own = pieces[self._rank].numel()
        self._exchange(going, pieces, [own] * self._world_size)
        return going, sum(piece.numel() for piece in pieces)

    def answer(self, going: UnderWay) -> None:
        """Waits for what the others have sent, unless that was done, and makes of it what all will subtract of this rank's fragments."""
        if going.answer is not None or going.update is not None:
            return
        shard = self._shard(self._rank, going.fragments)
        mean = self._mean_of(shard, self._received(going))
        failed = not self._take_outer(going, shard, mean)
        answer = lamina.encode_payload(self._fragments, shard, mean.zero_() if failed else mean, self._payload)
        going.answer = torch.cat([_tensor_of(answer), torch.tensor([failed], dtype=torch.uint8)])

    def hand_on(self, going: UnderWay) -> None:
        """Begins the way of the answers to all, unless that was done."""
        if going.update is not None or going.handed_on:
            return
        self.answer(going)
        assert going.answer is not None
        self._exchange(going, [going.answer] * self._world_size, self._bytes_of_answers(going.fragments))

    def settle(self, going: UnderWay) -> None:
        """What can be had without the others doing anything more: the update, if the answers are on their way, or the own answer."""
        if going.handed_on:
            self.update_of(going)
        else:
            self.answer(going)

    def update_of(self, going: UnderWay) -> torch.Tensor:
        """What all subtract of the fragments, one behind the other, once the answers of all owners are there. OverflowError, on all ranks
        alike, if any owner's is not finite."""
        if going.update is not None:
            return going.update
        received = torch.split(self._received(going), self._bytes_of_answers(going.fragments))
        for owner, answer in enumerate(received):
            if answer[-1] != 0:
                raise OverflowError(f"LocalUpdates: the sum of what step {going.step} sent is not finite, on rank {owner} of the group")
        of_fragment: Dict[int, torch.Tensor] = {}
        for owner, answer in enumerate(received):
            shard = self._shard(owner, going.fragments)
            of_fragment.update(zip(shard, torch.split(self._decoded(shard, answer[:-1]), self._sizes_of(shard))))
        going.update, going.answer = _joined([of_fragment[fragment] for fragment in going.fragments]), None
        return going.update

    def applied(self, going: UnderWay) -> None:
        """The update is in the shared parameters: what was made for it of the outer optimizer counts."""
        shard = self._shard(self._rank, going.fragments)
        for whole, piece in ((self.momentum, going.momentum), (self.rounding, going.rounding)):
            if piece.numel():
                for to, each in zip(self._places(whole, shard), torch.split(piece, self._sizes_of(shard))):
                    to.copy_(each)

    def add_rounding(self, elements: torch.Tensor) -> None:
        """Adds to `elements`, of the whole model, what rounding has taken from this rank's fragments: as often as there are ranks, for a
        mean over them."""
        if self.rounding.numel():
            fragments = torch.split(elements, self._sizes)
            for fragment, kept in zip(self._begins, self._places(self.rounding, self._begins)):
                fragments[fragment].add_(kept, alpha=self._world_size)

    # --- checkpoints ---

    def shard_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's fragments, of what joined_shards() has made."""
        return _joined(list(torch.split(whole, self._sizes))[self._rank::self._world_size]) if whole.numel() else whole

    def check(self, momentum: torch.Tensor, rounding: torch.Tensor) -> None:
        """ValueError for what cannot take the place of momentum and rounding."""
        self._outer_optimizer(list(self._begins)).restore(momentum.contiguous(), rounding.contiguous())

    def check_under_way(self, going: UnderWay) -> bool:
        """Whether it is what settle() leaves: an answer or an update, and what follows from it here."""
        elements = sum(self._sizes_of(self._shard(self._rank, going.fragments)))
        return ((going.update is None) != (going.answer is None)
                and (going.update is None or going.update.numel() == sum(self._sizes_of(going.fragments)))
                and (going.answer is None or self._is_answer(going.answer, going.fragments))
                and going.momentum.numel() == (elements if self.momentum.numel() else 0)
                and going.rounding.numel() == (elements if self.rounding.numel() else 0))

    def _is_answer(self, answer: torch.Tensor, fragments: List[int]) -> bool:
        if answer.numel() != self._bytes_of_answers(fragments)[self._rank] or answer[-1] > 1:
            return False
        return bool(torch.isfinite(self._decoded(self._shard(self._rank, fragments), answer[:-1])).all())

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

    def _decoded(self, fragments: List[int], given: torch.Tensor) -> torch.Tensor:
        elements = _floats(sum(self._sizes_of(fragments)))
        lamina.decode_payload(self._fragments, fragments, given.contiguous(), self._payload, elements)
        return elements

    def _mean_of(self, shard: List[int], received: torch.Tensor) -> torch.Tensor:
        mean = _floats(sum(self._sizes_of(shard))).zero_()
        for rank, piece in enumerate(torch.split(received, received.numel() // self._world_size) if received.numel() else ()):
            mean = mean + self._decoded(shard, piece) if rank else self._decoded(shard, piece)
        return mean.div_(self._world_size)

    def _take_outer(self, going: UnderWay, shard: List[int], mean: torch.Tensor) -> bool:
        """The mean of this rank's fragments to what all subtract, in place, and what becomes of the outer optimizer. False, and the outer optimizer
        stays what it is, if a number is not finite, or might become infinite."""
        if not shard:
            return True
        going.momentum, going.rounding = (torch.cat(list(self._places(whole, shard))) if whole.numel() else _NOTHING
                                          for whole in (self.momentum, self.rounding))
        outer = self._outer_optimizer(shard)
        outer.restore(going.momentum, going.rounding)
        try:
            outer(list(range(len(shard))), mean)
        except ValueError:
            return False
        momentum, rounding = (torch.frombuffer(each, dtype=torch.float32) if len(each) else _NOTHING
                              for each in (outer.momentum(), outer.rounding()))
        going.momentum, going.rounding = momentum, rounding
        return True

    def _places(self, whole: torch.Tensor, fragments: Iterable[int]) -> Iterable[torch.Tensor]:
        """These fragments of this rank's, in what it has of all."""
        return (whole[self._begins[fragment]:self._begins[fragment] + self._sizes[fragment]] for fragment in fragments)

    def _bytes_of_answers(self, fragments: List[int]) -> List[int]:
        return [lamina.payload_bytes(self._fragments, self._shard(owner, fragments), self._payload) + 1
                for owner in range(self._world_size)]


def joined_shards(shards: List[torch.Tensor], sizes: List[int]) -> torch.Tensor:
    """What each rank has of its own fragments, as one tensor of the whole model; empty if they have nothing."""
    if not any(shard.numel() for shard in shards):
        return _floats(0)
    world_size = len(shards)
    of_rank = [iter(torch.split(shard, sizes[rank::world_size])) for rank, shard in enumerate(shards)]
    return _joined([next(of_rank[fragment % world_size]) for fragment in range(len(sizes))])


def _floats(elements: int) -> torch.Tensor:
    """Whatever the default type is."""
    return torch.empty(elements, dtype=torch.float32)


def _joined(pieces: List[torch.Tensor]) -> torch.Tensor:
    return torch.cat(pieces) if pieces else _floats(0)


def _tensor_of(given: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(given), dtype=torch.uint8) if given else torch.empty(0, dtype=torch.uint8)
