# SPDX-License-Identifier: MIT
"""Layer dropping for distributed training: the layers of a gradient that matter are sent whole, the others stay in a residual
and lose nothing.

`lamina.torch` is a communication hook for PyTorch's DistributedDataParallel. What is here works over arrays of numpy, jax,
torch or whatever else speaks DLPack or the buffer protocol, and needs none of them:

    layout = lamina.Layout({"weight": (512, 256), "bias": (512,)})
    worker = lamina.Worker(layout, drop_ratio=0.95)
    step = worker.add([weight_gradient, bias_gradient])
    send(step.frame())             # bytes
    step.commit()
"""

import dataclasses
import importlib.util
import operator
import struct
from typing import Any, Literal, TYPE_CHECKING, get_args

HAS_EXTENSION = importlib.util.find_spec("lamina._core") is not None  #: False of an installation with LAMINA_PURE=1
HAS_CUDA = importlib.util.find_spec("lamina._cuda") is not None  #: of one that was built with LAMINA_PYTHON_CUDA=ON
if TYPE_CHECKING or HAS_EXTENSION:
    from lamina._core import (Arrays, DecodeError, LocalDelta, Frame, Layout, OuterOptimizer, Reply, Selector, Server, Step,
                              Worker, decode, decode_payload, encode_payload, largest_frame_bytes, merge_states, payload_bytes,
                              version as __version__)
else:
    from lamina._pure import DecodeError, Layout, Selector, version as __version__

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'lamina' has no attribute {name!r}")
        require_extension(f"lamina.{name}")

__all__ = ["Arrays", "DecodeError", "LocalDelta", "Frame", "Layout", "Options", "OuterOptimizer", "Reply", "Selector", "Server",
           "Step", "Worker", "decode", "decode_payload", "encode_payload", "largest_frame_bytes", "merge_states",
           "payload_bytes", "__version__"]


def require_extension(what: str) -> None:
    """ImportError, naming what needs it, where there is none."""
    if not HAS_EXTENSION:
        raise ImportError(f"{what} needs the extension lamina._core, which this installation was made without (LAMINA_PURE=1): install "
                          "lamina again, without that variable and with a C++ compiler")


def require_cuda(what: str) -> None:
    """The same of lamina._cuda."""
    if not HAS_CUDA:
        raise ImportError(f"{what} needs the extension lamina._cuda, which this installation was made without: build lamina from its repository "
                          "with -DLAMINA_PYTHON_CUDA=ON and nvcc (docs/pytorch/hook.md)")


Value = Literal["mean_abs", "l1_norm", "l2_norm", "root_mean_square", "max_abs"]


@dataclasses.dataclass(frozen=True)
class Options:
    """How layers are chosen, where all workers choose the same. ValueError, naming the option, for one outside its range."""

    drop_ratio: float = 0.95  #: R in [0, 1): the share of the elements to drop in a step; 0 sends everything
    warm_up_steps: int = 0  #: steps in which R grows to drop_ratio
    search_every: int = 1  #: steps between searches of the threshold, at least 1
    send_budget: "float | None" = None  #: in place of R the share to send, in (0, 1], as a mean over the steps
    #: A layer is sent at least every so many steps; 0: no limit. In lamina.torch a layer whose gradient is zero on all ranks is
    #: dropped all the same: DDP would throw away what is sent for it.
    at_least_every: int = 0
    fragment_elements: int = 0  #: larger layers are cut into fragments of this size, a multiple of 4,096; 0: whole layers
    momentum: float = 0.0  #: momentum correction in the residual, in [0, 1); the optimizer is then plain SGD
    value: Value = "mean_abs"  #: the representative value

    def __post_init__(self) -> None:
        # As Python's own numbers, which checkpoints hold: numpy's scalars do not load with weights_only.
        for field in dataclasses.fields(self):
            given = getattr(self, field.name)
            try:
                if field.type is int:
                    object.__setattr__(self, field.name, operator.index(given))
                elif field.type is float or (field.name == "send_budget" and given is not None):
                    if isinstance(given, str):
                        raise TypeError("a string")
                    object.__setattr__(self, field.name, float(given))
            except TypeError:
                raise TypeError(f"{field.name} must be a number, got {given!r}") from None
            if field.type is int and not 0 <= getattr(self, field.name) < 2**63:
                raise ValueError(f"{field.name} must lie in [0, 2^63), got {given}")
        if not 0 <= self.drop_ratio < 1:
            raise ValueError(f"drop_ratio must be a share in [0, 1), got {self.drop_ratio:g}")
        if self.send_budget is not None and not 0 < self.send_budget <= 1:
            raise ValueError(f"send_budget must be a share in (0, 1], got {self.send_budget:g}")
        if not (0 <= self.momentum < 1 and struct.unpack("f", struct.pack("f", self.momentum))[0] < 1):  # as the residual has it
            raise ValueError(f"momentum must lie in [0, 1), got {self.momentum:g}")
        if self.value not in get_args(Value):
            raise ValueError(f"value must be one of {', '.join(get_args(Value))}, got {self.value!r}")
        Selector(Layout({"a": (1,)}), **{name: value for name, value in dataclasses.asdict(self).items() if name != "value"})
