# SPDX-License-Identifier: MIT
from typing import Any, Dict, List, Optional, Sequence, TYPE_CHECKING, Tuple

import torch
import torch.distributed as dist

import lamina
from lamina.torch._foreach import copy_all, is_gapless
from lamina.torch._options import uses_cpu
from lamina.torch._sharded import is_dtensor, local_of, require_replicas

if TYPE_CHECKING:
    from lamina.torch._local_device import DeviceExchange

_TYPES = (torch.float32, torch.bfloat16)


class OwnParameters:
    """A rank's own parameters as flat float32 tensors, in the order in which their elements lie in memory. Those are the memory of the
    parameters themselves, or masters: of a bfloat16 parameter, whose type would round away what others have done, and, where one flat
    tensor holds all of a device's, of a DTensor, which cannot be moved there. A master of bfloat16 follows what the optimizer has
    changed, and keeps what the parameter cannot say."""

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.Tensor], group: Optional[dist.ProcessGroup], backend: str) -> None:
        """backend: 'cpu', 'torch' or 'auto'. Errors as of LocalUpdates."""
        self._names, self._parameters = names, list(parameters)
        self._shards = any(is_dtensor(each) for each in parameters)
        local = self._local()
        self.device = local[0].device if local else torch.device("cpu")
        self.uses_cpu = uses_cpu(backend, self.device)
        for name, given, each in zip(names, parameters, local):
            require_replicas(f"LocalUpdates: {name}", given, group)
            why = (f"is {each.dtype}, LocalUpdates takes float32 and bfloat16" if each.dtype not in _TYPES
                   else f"is on {each.device}, which backend 'cpu' cannot read" if self.uses_cpu and each.device.type != "cpu"
                   else f"is on {each.device}, and others on {self.device}: LocalUpdates takes one device" if each.device != self.device
                   else "is sparse" if each.layout is not torch.strided
                   else "has gaps or overlaps in memory" if not is_gapless(each) else None)
            if why is not None:
                raise TypeError(f"LocalUpdates: {name} {why}")
        if not any(each.numel() for each in local):
            raise ValueError("LocalUpdates: the optimizer has no parameters")
        self._require_apart(local)
        self.shapes, self.strides = [list(each.shape) for each in local], [_strides_of(each) for each in local]
        self.types = [str(each.dtype) for each in local]
        self.dense_bytes = sum(each.numel() * each.element_size() for each in local)  # of an all-reduce of the gradients
        self._copied = [number for number, each in enumerate(local) if each.dtype is not torch.float32
                        or (not self.uses_cpu and is_dtensor(parameters[number]))]
        self._masters: Dict[int, torch.Tensor] = {}
        self._exchange: "Optional[DeviceExchange]" = None
        self._seen: List[Any] = []
        self._in_place: List[torch.Tensor] = []  # of the parameters that have masters: flat, as they lie
        self.flat: List[torch.Tensor] = []  #: after take() and until the parameters are laid out anew
        self.arrays: Any = None  #: the same for lamina._core, where that makes the numbers
        self.are_lost = False  #: masters hold numbers that are not finite, and are to be made anew

    def lie_in(self, exchange: "DeviceExchange") -> None:
        """From now on they are in the flat tensor of a device's exchange, and those of rank 0."""
        self._exchange = exchange
        exchange.adopt(self._local(), self._copied)
        self._masters = {number: exchange.layers(exchange.local)[number] for number in self._copied}
        self._lay_out()
        self.give()

    def lie_here(self) -> None:
        """They stay where they are, on the CPU."""
        self._masters = {number: _flat(self._local()[number]).float() for number in self._copied}
        self._lay_out()

    def take(self, what: str) -> None:
        """Before `flat` is used: follows what the optimizer, or a loaded module, has done. RuntimeError, naming the parameter, if one is laid
        out otherwise than it was: local deltas are taken and sent by places in memory."""
        if _places(self._local()) != self._seen:
            self._require_as_wrapped(what)
            self._lay_out()
        masters = list(self._masters.values())
        is_wide = [each.dtype is torch.float32 or self.are_lost for each in self._in_place]
        copy_all(*_where(is_wide, masters, self._in_place))
        narrow, now = _where([not each for each in is_wide], masters, self._in_place)
        if narrow:
            said, was, change = ([torch.empty_like(each) for each in like] for like in (now, narrow, narrow))
            for to, given in ((said, narrow), (was, said), (change, now)):
                copy_all(to, given)
            torch._foreach_sub_(change, was)
            torch._foreach_add_(narrow, change)
        self.are_lost = False

    def give(self) -> None:
        """After `flat` was changed."""
        copy_all(self._in_place, list(self._masters.values()))

    def _local(self) -> List[torch.Tensor]:
        return [local_of(each) for each in self._parameters] if self._shards else self._parameters

    def _lay_out(self) -> None:
        if self._exchange is not None:
            self._exchange.hold(self._local(), self._copied)
        local = self._local()
        self._in_place = [_flat(local[number]) for number in self._copied]
        self.flat = (self._exchange.layers(self._exchange.local) if self._exchange is not None else
                     [self._masters[number] if number in self._masters else _flat(each) for number, each in enumerate(local)])
        self._seen = _places(local)
        if self.uses_cpu:
            self.arrays = arrays_of(self._names, self.flat)

    def _require_as_wrapped(self, what: str) -> None:
        for number, (name, each) in enumerate(zip(self._names, self._local())):
            if each.device != self.device or str(each.dtype) != self.types[number]:
                raise RuntimeError(f"{what}: {name} is {each.dtype} on {each.device} now; wrap its optimizer after that")
            for field, was, now in (("shape", tuple(self.shapes[number]), tuple(each.shape)),
                                    ("strides", self.strides[number], _strides_of(each))):
                if now != was:
                    raise RuntimeError(f"{what}: {name} has {field} {now}, and had {was} when its optimizer was wrapped; change the "
                                       "memory format before that")

    def _require_apart(self, local: Sequence[torch.Tensor]) -> None:
        places = sorted((each.data_ptr(), number) for number, each in enumerate(local) if each.numel())
        for (begin, number), (next_begin, other) in zip(places, places[1:]):
            if begin + local[number].element_size() * local[number].numel() > next_begin:
                first, second = sorted((number, other))
                raise TypeError(f"LocalUpdates: {self._names[first]} and {self._names[second]} share memory")


def arrays_of(names: Sequence[str], flat: Sequence[torch.Tensor]) -> "lamina.Arrays":
    """So that each is looked at once, and not in every call."""
    layout = lamina.Layout({name: (len(each),) for name, each in zip(names, flat)})
    return lamina.Arrays(layout, list(flat), [(number, 0) for number in range(len(flat))])


def _places(local: Sequence[torch.Tensor]) -> List[Any]:
    return [(each.data_ptr(), each.shape, each.stride()) for each in local]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _where(flags: Sequence[bool], *lists: Sequence[torch.Tensor]) -> List[List[torch.Tensor]]:
    return [[each for each, flag in zip(of, flags) if flag] for of in lists]


def _strides_of(parameter: torch.Tensor) -> Tuple[int, ...]:
    """Those that matter: where there is one element at most a dimension may have any."""
    return tuple(stride if size > 1 else 1 for stride, size in zip(parameter.stride(), parameter.shape))
