# SPDX-License-Identifier: MIT
import dataclasses
from typing import Any, Callable, List, Optional, Sequence, Tuple, Union

import torch

import lamina
from lamina.torch._cpu import Place
from lamina.torch._foreach import Pieces, copy_all, joined, zero_all

Agree = Callable[[torch.Tensor], None]  # sums a tensor over the ranks, in place

# The representative value of a fragment: the order of a norm of its elements, and the power of their number that divides it.
NORMS = {"mean_abs": (1, 1.0), "l1_norm": (1, 0.0), "l2_norm": (2, 0.0), "root_mean_square": (2, 0.5),
         "max_abs": (float("inf"), 0.0)}


class DeviceBackend:
    """What TorchBackend and CudaBackend share: where the gradients lie, and the decision, which is C++ on the host."""

    looks_first = False  # gradients are added, or refused by the device, before the host knows whether they are finite

    def __init__(self, layout: lamina.Layout, options: lamina.Options, wire: str, device: torch.device) -> None:
        chosen = dataclasses.asdict(options)
        self._norm, self._power = NORMS[chosen.pop("value")]
        self._selector = lamina.Selector(layout, **chosen)
        self._wire = getattr(torch, wire)
        self.fragments, self.fragments_of = self._selector.fragments, self._selector.fragments_of
        self._sizes, self._device = layout.sizes, device
        self._divisors = torch.tensor(self.fragments.sizes, dtype=torch.float64, device=device).clamp_(min=1).pow_(self._power)
        self._buffers: List[torch.Tensor] = []
        self._sent: List[int] = []
        finite = torch.finfo(torch.float64).max
        self._limits = torch.tensor([finite, finite, torch.finfo(self._wire).max if self._wire is not torch.float32 else torch.inf,
                                     torch.finfo(torch.float16).max], dtype=torch.float64, device=device)
        self.left_out_elements = 0
        self._is_open = False
        self.step = 0
        self._arrange([layout.elements], [(0, sum(self._sizes[:layer])) for layer in range(len(self._sizes))])

    # --- where things lie ---

    def _arrange(self, buffer_sizes: List[int], places: Sequence[Place]) -> None:
        self._arrangement = (buffer_sizes, list(places))
        self._buffer_sizes = buffer_sizes
        in_bucket: List[List[Tuple[int, int]]] = [[] for _ in buffer_sizes]
        for layer, (bucket, begin) in enumerate(places):
            in_bucket[bucket].append((begin, layer))
        layers, fragments = [], []
        for elements, found in zip(buffer_sizes, in_bucket):
            at, pieces = 0, []
            for begin, layer in sorted(found):
                pieces += [(None, max(begin - at, 0)), (layer, self._sizes[layer])]  # an empty one lies anywhere
                at = max(at, begin + self._sizes[layer])
            pieces.append((None, elements - at))
            layers.append(pieces)
            fragments.append([each for layer, size in pieces for each in (
                [(None, size)] if layer is None else
                [(fragment, self.fragments.sizes[fragment]) for fragment in range(*self.fragments_of(layer))])])
        self._layers, self._fragments = Pieces(layers), Pieces(fragments)

    def take(self, buffers: Sequence[torch.Tensor], places: Sequence[Place]) -> None:
        """The gradients of this step: layer l is `places[l]`. DDP makes its buckets anew after the first step."""
        self._buffers = list(buffers)
        sizes = [buffer.numel() for buffer in buffers]
        if self._arrangement != (sizes, list(places)):
            self._rearrange(sizes, places)

    def _rearrange(self, buffer_sizes: List[int], places: Sequence[Place]) -> None:
        self._arrange(buffer_sizes, places)

    def release(self) -> None:
        self._buffers = []

    # --- a step ---

    def _observed(self, values: torch.Tensor, gradients: torch.Tensor, largest: Sequence[torch.Tensor]) -> torch.Tensor:
        """What the ranks sum up, float64: the values, whether each layer has a gradient, and four flags: of a gradient that is not
        finite, a sum that is not, one that may be beyond the wire's type, and a mean that may be beyond float16 gradients."""
        # NaN is the largest of all.
        return torch.cat([values, (gradients != 0).double(), (~(torch.stack(list(largest)) <= self._limits)).double()])

    def first_non_finite(self) -> Optional[int]:
        """The first layer of which the gradient that was taken is not finite. Waits."""
        bad = ~torch.isfinite(self._layers.norms(self._buffers, 1)).cpu()
        return int(bad.nonzero()[0]) if bad.any() else None

    def select(self, agreed: torch.Tensor, held: bytes) -> List[int]:
        self._sent = self._selector.decide(self.step, agreed, held)
        return self._sent

    def unpack(self, mean: torch.Tensor) -> None:
        zero_all(self._buffers)
        gradients = self._fragments.of(self._buffers)
        pieces = torch.split(mean, [self.fragments.sizes[fragment] for fragment in self._sent]) if self._sent else ()
        of_sent = [gradients[fragment] for fragment in self._sent]
        for dtype in {gradient.dtype for gradient in of_sent}:
            which = [number for number, gradient in enumerate(of_sent) if gradient.dtype is dtype]
            given = [pieces[number] for number in which]
            if dtype is not torch.float32:
                given = list(torch.split(_cut(torch.cat(given), dtype), [len(each) for each in given]))
            copy_all([of_sent[number] for number in which], given)

    # --- what happened ---

    @property
    def threshold(self) -> float:
        return self._selector.threshold

    @property
    def sent_elements(self) -> int:
        return self._selector.sent_elements

    @property
    def sent_bitmap(self) -> bytes:
        return self._selector.sent_bitmap


class TorchBackend(DeviceBackend):
    """The step's numbers by torch's operators, on whatever device the gradients are; the decision is C++ on the host. On a GPU
    everything is enqueued on the current stream, in few launches, and the host waits once a step: for what observe() gives, summed
    over the ranks. It waits again where a gradient or a sum is not finite, or may be beyond the range of a 16-bit type, and with
    overlap for what says that the ranks have not parted.

    The residual lies in memory as the gradients do in DDP's buckets, so that one operation adds a bucket. A step writes it anew: the
    old one stays until the ranks know that all gradients are finite. Memory: two tensors as large as the model, four with momentum,
    half of them from the last bucket to the end of the step only."""

    def __init__(self, layout: lamina.Layout, options: lamina.Options, wire: str, device: torch.device) -> None:
        super().__init__(layout, options, wire, device)
        self._momentum = options.momentum
        self._residual = torch.zeros(layout.elements, dtype=torch.float32, device=device)
        self._velocity = torch.zeros(layout.elements if options.momentum else 0, dtype=torch.float32, device=device)
        self._after: Optional[torch.Tensor] = None  # the residual that an open step leaves, unless its gradients are not finite
        self._moved: Optional[torch.Tensor] = None  # likewise the velocity
        self._values: Optional[torch.Tensor] = None  # of this rank, on the host
        self._expected = torch.full((len(self.fragments),), torch.inf, dtype=torch.float64)
        self._looked_at, self._found_good = 0, torch.zeros(1, dtype=torch.float64, device=device)

    # --- where things lie ---

    def _split(self, flat: torch.Tensor) -> List[torch.Tensor]:
        return list(torch.split(flat, self._buffer_sizes))

    def _fragments_in(self, flat: torch.Tensor, which: Sequence[int]) -> List[torch.Tensor]:
        views = self._fragments.of(self._split(flat))
        return [views[fragment] for fragment in which]

    def _layers_in(self, flat: torch.Tensor) -> List[torch.Tensor]:
        return self._layers.of(self._split(flat))

    def _rearrange(self, buffer_sizes: List[int], places: Sequence[Place]) -> None:
        kept = [self._layers_in(flat) if flat.numel() else [] for flat in (self._residual, self._velocity)]
        self._arrange(buffer_sizes, places)
        self._residual, self._velocity = (torch.zeros(sum(buffer_sizes) if layers else 0, dtype=torch.float32, device=self._device)
                                          for layers in kept)
        for flat, layers in zip((self._residual, self._velocity), kept):
            if layers:
                copy_all(self._layers_in(flat), layers)

    # --- a step ---

    def add_all(self, scale: Union[float, torch.Tensor], agree: Optional[Agree] = None) -> int:
        """Begins a step with the gradients that were taken. Returns the bytes that `agree` summed up."""
        self.step += 1
        self._is_open, self._values = True, None
        after = torch.empty_like(self._residual)
        added = [_scaled(buffer, scale) for buffer in self._buffers]
        if self._momentum:
            self._moved = self._velocity * self._momentum
            for moved, each in zip(self._split(self._moved), added):
                moved.add_(each)
            torch.add(self._residual, self._moved, out=after)
        else:
            for to, before, each in zip(self._split(after), self._split(self._residual), added):
                torch.add(before, each, out=to)
        self._after = after
        return 0

    def leave_out(self) -> None:
        """What is not finite of the step does not come into the residual, which is the only copy of what was not sent. Waits."""
        self._take_over()
        self._count_left_out(float(self._found_good))

    def _count_left_out(self, good: float) -> None:
        self.left_out_elements += self._looked_at - int(good)
        self._looked_at = 0
        self._found_good.zero_()

    def _take_over(self) -> None:
        if self._after is None:
            return
        flats = (self._residual, self._velocity)[:2 if self._momentum else 1]
        self._residual, *moved = self._guarded(flats, (self._after, self._moved)[:len(flats)])
        if moved:
            self._velocity, = moved
        self._after = self._moved = None

    def _guarded(self, before: Sequence[torch.Tensor], after: Sequence[Any]) -> List[torch.Tensor]:
        is_good = after[0].abs() < torch.inf  # where a velocity is not finite the residual is not, either
        self._looked_at += is_good.numel()
        self._found_good += is_good.sum()
        return [torch.where(is_good, *each) for each in zip(after, before)]

    def begin(self, sent: Optional[List[int]]) -> List[int]:
        """Begins a step that sends these fragments, or everything."""
        self.step += 1
        self._is_open, self._values = True, None
        self._sent = [fragment for fragment, size in enumerate(self.fragments.sizes) if size] if sent is None else sent
        self._selector.take(self.step, self._sent)
        return self._sent

    def add(self, layers: Sequence[int], gradients: torch.Tensor, scale: Union[float, torch.Tensor]) -> None:
        """Adds the gradients of some layers, one behind the other, of a step that has begun, but for what is not finite."""
        flats = (self._residual, self._velocity)[:2 if self._momentum else 1]
        views = [[of[layer] for layer in layers] for of in map(self._layers_in, flats)]
        before = [torch.cat(each) for each in views]
        added = _scaled(gradients, scale)
        moved = [before[1] * self._momentum + added] if self._momentum else []
        after = [before[0] + (moved[0] if moved else added), *moved]
        sizes = [self._sizes[layer] for layer in layers]
        for to, each in zip(views, self._guarded(before, after)):
            copy_all(to, torch.split(each, sizes))

    def pack_layers(self, layers: Sequence[int], scale: float) -> torch.Tensor:
        """What is sent of layers that have their gradients."""
        is_sent = set(self._sent)
        return self._packed([fragment for layer in layers for fragment in range(*self.fragments_of(layer)) if fragment in is_sent], scale)

    def _packed(self, fragments: Sequence[int], scale: float) -> torch.Tensor:
        residual = self._residual if self._after is None else self._after
        packed = joined(self._fragments_in(residual, fragments), residual)
        return packed.mul_(scale) if self._wire is torch.float32 else _cut(packed, self._wire)

    def pack(self, world_size: int) -> torch.Tensor:
        return self._packed(self._sent, 1 / world_size)

    def observe(self, world_size: int, scale: Union[float, torch.Tensor]) -> torch.Tensor:
        """A value is not finite where an element is not."""
        residual = self._residual if self._after is None else self._after
        gradients = self._layers.norms(self._buffers, 1)
        norms = self._fragments.norms(self._split(residual), self._norm)  # a norm is as large as its largest element, or larger
        return self._observed(norms / self._divisors, gradients, [gradients.max(), norms.max(), norms.max() * world_size,
                                                                  self._largest_mean(residual, scale)])

    def _largest_mean(self, residual: torch.Tensor, scale: Union[float, torch.Tensor]) -> torch.Tensor:
        """At most, of float16 gradients."""
        largest = [torch.linalg.vector_norm(of, torch.inf, dtype=torch.float64) for of, buffer in
                   zip(self._split(residual), self._buffers) if buffer.dtype is torch.float16 and buffer.numel()]
        return torch.stack(largest).max() * scale if largest else self._limits[3]

    def fetch(self, sums: torch.Tensor, own: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Both on the host, which waits for them."""
        host = torch.cat([sums, own, self._found_good]).cpu()
        self._values = host[len(sums):][:len(self.fragments)].clone()
        self._count_left_out(float(host[-1]))
        return host[:len(sums)], host[len(sums):-1]

    def forecast(self, values: torch.Tensor) -> torch.Tensor:
        """The values to expect in the next step, by those of this one. Before commit()."""
        return torch.frombuffer(self._selector.forecast(self.step, values), dtype=torch.float64)

    def plan(self, agreed: torch.Tensor) -> List[int]:
        """What the next step sends, by the values that the ranks expect."""
        return self._selector.decide(self.step + 1, agreed)

    def commit(self) -> None:
        if self._after is not None:
            self._residual, self._after = self._after, None
            if self._moved is not None:
                self._velocity, self._moved = self._moved, None
        if self._values is None:
            self._values = (self._fragments.norms(self._split(self._residual), self._norm) / self._divisors).cpu()
        self._expected = self.forecast(self._values)
        sent = self._fragments_in(self._residual, self._sent)
        if self._wire is torch.float32 or not sent:
            zero_all(sent)
        else:
            packed = torch.cat(sent)
            copy_all(sent, torch.split(packed - _cut(packed, self._wire).float(), [len(each) for each in sent]))
        if self._momentum:
            zero_all(self._fragments_in(self._velocity, self._sent))
        self._selector.commit(self.step)
        self._is_open = False

    def refuse(self) -> None:
        """The step ends here, with the residual as it was before, but for what add() has added."""
        self._after = self._moved = None
        self.abandon()

    def abandon(self) -> None:
        """The step ends here; what was added stays in the residual, and the next step has the same number."""
        self._take_over()
        if self._is_open:
            self.step -= 1
            self._is_open = False
        self.release()

    # --- checkpoints ---

    def save(self) -> bytes:
        residual, velocity = (torch.cat(self._layers_in(flat)).cpu() if flat.numel() else None for flat in (self._residual, self._velocity))
        return self._selector.save(self.step, torch.empty(0) if residual is None else residual, velocity, self._expected)

    def load(self, memory: memoryview) -> None:
        self.step, residual, velocity, expected = self._selector.load(memory)
        # CudaBackend, which has no overlap, saves none.
        self._expected = torch.frombuffer(expected, dtype=torch.float64) if len(expected) else torch.full_like(self._expected, torch.inf)
        for flat, numbers in ((self._residual, residual), (self._velocity, velocity)):
            if flat.numel():
                copy_all(self._layers_in(flat), torch.split(torch.frombuffer(numbers, dtype=torch.float32).to(self._device), self._sizes))

    def residual(self, layer: int) -> torch.Tensor:
        return self._layers_in(self._residual)[layer].clone()


def _scaled(gradient: torch.Tensor, scale: Union[float, torch.Tensor]) -> torch.Tensor:
    if not isinstance(scale, torch.Tensor) and scale == 1:
        return gradient
    return gradient.float() * scale


def _cut(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In another type, whose largest number stands for what is beyond it."""
    limits = torch.finfo(dtype)
    return numbers.clamp(limits.min, limits.max).to(dtype)
