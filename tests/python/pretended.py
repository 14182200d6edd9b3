# SPDX-License-Identifier: MIT
"""A device that is not there: its tensors compute on the CPU, and refuse to be mixed with those of the CPU. What would be launches, and
what the host would wait for, is counted; collectives refuse what NCCL does."""

import collections
import contextlib
import math
import sys
import traceback
import types
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

DEVICE = torch.device("meta")  # stands for one: not the CPU, and its tensors need no driver

# Of NCCL, as PyTorch gives it: no bool, no integers of 16 bits.
COLLECTIVE_TYPES = {torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64}
_WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::equal", "aten::is_nonzero")
_NO_KERNELS = ("aten::empty", "aten::new_empty", "aten::set_", "aten::detach", "aten::alias", "aten::lift_fresh", "aten::resize_")
_AT_ONCE = {"aten::cat": 128, "aten::stack": 128}  # tensors that one launch takes
_FOREACH_AT_ONCE = 48

counts = collections.Counter()
where = collections.Counter()  # the same, with the line of lamina


class Tensor(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl  # whose results would be of this class, too

    @staticmethod
    def __new__(cls, inner, requires_grad=False):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(),
                                                   dtype=inner.dtype, device=DEVICE, requires_grad=requires_grad)
        made.inner = inner
        return made

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, other):
        self.inner = other.inner

    def data_ptr(self):
        return self.inner.data_ptr()

    def __repr__(self):
        return f"pretended.{self.inner!r}"

    @classmethod
    def __torch_dispatch__(cls, operator, types, arguments=(), named=None):
        return _called(operator, arguments, named or {})


class Mode(TorchDispatchMode):
    """Within it factories make tensors of the device, too."""

    def __torch_dispatch__(self, operator, types, arguments=(), named=None):
        return _called(operator, arguments, named or {})


def _tensors_in(arguments):
    found = []
    tree_map(lambda each: found.append(each) if isinstance(each, torch.Tensor) else None, arguments)
    return found


def _called(operator, arguments, named):
    name = operator._schema.name
    given = _tensors_in((arguments, named))
    ours, hosts = [each for each in given if isinstance(each, Tensor)], [each for each in given if not isinstance(each, Tensor)]
    to = named.get("device")
    on_device = bool(ours) if to is None else torch.device(to) == DEVICE
    _count(name, operator, arguments, named, ours, hosts, on_device)
    wrappers = {id(each.inner): each for each in ours}
    options = dict(named)
    if to is not None:
        options["device"] = torch.device("cpu")
    inner = tree_map(lambda each: each.inner if isinstance(each, Tensor) else each, (arguments, options))
    if name == "aten::_to_copy" and to is not None:
        result = inner[0][0].to(inner[1].get("dtype") or inner[0][0].dtype, copy=True)
    else:
        try:
            result = operator(*inner[0], **inner[1])
        except RuntimeError as error:
            if "instead found type" not in str(error):
                raise
            result = operator.overloadpacket(*inner[0], **inner[1])  # PyTorch 1.13 gives a number where its own operator takes a tensor

    def wrapped(each):
        if not isinstance(each, torch.Tensor) or isinstance(each, Tensor):
            return each
        if id(each) in wrappers:
            return wrappers[id(each)]
        return Tensor(each) if on_device else each
    return tree_map(wrapped, result)


def _count(name, operator, arguments, named, ours, hosts, on_device):
    if name in ("aten::_to_copy", "aten::copy_"):
        from_device = isinstance(arguments[1 if name == "aten::copy_" else 0], Tensor)
        to_device = isinstance(arguments[0], Tensor) if name == "aten::copy_" else on_device
        if from_device and not to_device:
            is_asked_later = named.get("non_blocking") or (name == "aten::copy_" and len(arguments) > 2 and arguments[2])
            return note("copies to the host" if is_asked_later else "waits")
        if to_device and not from_device and _tensors_in(arguments[-1:] if name == "aten::copy_" else arguments):
            return note("copies to the device")
    elif ours and any(each.dim() for each in hosts):
        raise RuntimeError(f"{name} mixes tensors of the device with tensors of the CPU, at {_site()}")
    if name in _WAITS and ours:
        return note("waits")
    is_view = operator._schema.returns and all(each.alias_info is not None and not each.alias_info.is_write
                                               for each in operator._schema.returns)
    if on_device and not is_view and not name.startswith(_NO_KERNELS):
        lists = max([len(each) for each in (*arguments, *named.values()) if isinstance(each, (list, tuple)) and _tensors_in(each)] or [1])
        note("launches", math.ceil(lists / _AT_ONCE.get(name, _FOREACH_AT_ONCE)))
    return None


def note(what, times=1):
    counts[what] += times
    where[f"{what}: {_site()}"] += times


def _site():
    for frame in reversed(traceback.extract_stack()):
        if "lamina/torch/" in frame.filename:
            return f"{frame.filename.split('/')[-1]}:{frame.lineno} {frame.line}"
    return "elsewhere"


@contextlib.contextmanager
def device():
    """Counts begin at zero."""
    make, all_reduce, all_to_all_single, broadcast = torch.tensor, dist.all_reduce, dist.all_to_all_single, dist.broadcast

    def tensor(*arguments, device=None, **named):
        made = make(*arguments, **named)
        if device is None or torch.device(device) != DEVICE:
            return made
        note("copies to the device")
        return Tensor(made)

    def given(*tensors):
        for each in tensors:
            assert isinstance(each, Tensor), f"a collective of host memory, at {_site()}"
            assert each.dtype in COLLECTIVE_TYPES, f"a collective of {each.dtype}, at {_site()}"
            assert each.inner.is_contiguous()
        note("collectives")
        return [each.inner for each in tensors]

    def all_gather_into_tensor(output, given_one, group=None, async_op=False):
        to, own = given(output, given_one)
        assert to.numel() == own.numel() * dist.get_world_size(group)
        return dist.all_gather(list(to.view(-1, *own.shape).unbind(0)), own, group=group, async_op=async_op)

    collectives = {
        "all_reduce": lambda each, *arguments, **named: all_reduce(*given(each), *arguments, **named),
        "all_to_all_single": lambda to, own, *splits, **named: all_to_all_single(*given(to, own), *splits, **named),
        "broadcast": lambda each, *arguments, **named: broadcast(*given(each), *arguments, **named),
        "all_gather_into_tensor": all_gather_into_tensor, "get_backend": lambda *_: "nccl"}
    with mock.patch.object(torch, "tensor", tensor), mock.patch.multiple(dist, **collectives), Mode():
        forget()
        yield


def forget():
    counts.clear()
    where.clear()


def on_host(tensor):
    """Not counted."""
    return tensor.inner if isinstance(tensor, Tensor) else tensor


@contextlib.contextmanager
def cuda(worker):
    """lamina._cuda with this class of its own as Worker, and a torch.cuda without devices that has a stream."""
    with mock.patch.dict(sys.modules, {"lamina._cuda": types.SimpleNamespace(Worker=worker)}), \
            mock.patch("torch.cuda.device", lambda _: contextlib.nullcontext()), \
            mock.patch("torch.cuda.current_stream", lambda _: types.SimpleNamespace(cuda_stream=0)):
        yield
