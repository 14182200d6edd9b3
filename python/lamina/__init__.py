# SPDX-License-Identifier: MIT
"""Layer dropping for distributed training: the layers of a gradient that matter go out whole, the others wait in a residual
and lose nothing.

`lamina.torch` is a communication hook for PyTorch's DistributedDataParallel. What is here works over arrays of numpy, jax,
torch or whatever else speaks DLPack or the buffer protocol, and needs none of them:

    layout = lamina.Layout({"weight": (512, 256), "bias": (512,)})
    worker = lamina.Compressor(layout, drop_ratio=0.95)
    worker.accumulate_all([weight_gradient, bias_gradient])
    send(worker.encode())          # bytes
    worker.commit()
"""

import dataclasses
import operator

from lamina._core import (Aggregator, Compressor, DecodeError, DriftCompressor, Frame, Gradients, Layout, OuterStep, Publisher,
                          Selector, Slices, decode, decode_payload, encode_payload, largest_frame_bytes, merge_states,
                          payload_bytes, version as __version__)

__all__ = ["Aggregator", "Compressor", "DecodeError", "DriftCompressor", "Frame", "Gradients", "Layout", "Options", "OuterStep",
           "Publisher", "Selector", "Slices", "decode", "decode_payload", "encode_payload", "largest_frame_bytes",
           "merge_states", "payload_bytes", "__version__"]


@dataclasses.dataclass(frozen=True)
class Options:
    """How layers are chosen, where all workers choose the same. ValueError, naming the option, for one outside its range."""

    drop_ratio: float = 0.95  #: R in [0, 1): the share of the elements to hold back in a step; 0 sends everything
    warm_up_steps: int = 0  #: steps in which R grows to drop_ratio
    refresh_every: int = 1  #: steps between searches of the threshold, at least 1
    byte_budget: "float | None" = None  #: in place of R the share to send, in (0, 1], as a mean over the steps
    #: A layer goes out at least every so many steps; 0: it may wait for ever. In lamina.torch a layer whose gradient is zero on
    #: all ranks waits all the same: DDP would throw away what is sent for it.
    max_age: int = 0
    part_elements: int = 0  #: larger layers are decided in parts of so many elements, a multiple of 4,096; 0: whole
    momentum: float = 0.0  #: momentum correction in the residual, in [0, 1); the optimizer is then plain SGD
    value: str = "mean_abs"  #: what stands for a layer: mean_abs, l1_norm, l2_norm, root_mean_square or max_abs

    def __post_init__(self) -> None:
        # As Python's own numbers, which checkpoints hold: numpy's scalars do not load with weights_only.
        for field in dataclasses.fields(self):
            given = getattr(self, field.name)
            try:
                if field.type is int:
                    object.__setattr__(self, field.name, operator.index(given))
                elif field.type is float or (field.name == "byte_budget" and given is not None):
                    if isinstance(given, str):
                        raise TypeError("a string")
                    object.__setattr__(self, field.name, float(given))
            except TypeError:
                raise TypeError(f"{field.name} must be a number, got {given!r}") from None
            if field.type is int and not 0 <= getattr(self, field.name) < 2**63:
                raise ValueError(f"{field.name} must lie in [0, 2^63), got {given}")
        if not 0 <= self.drop_ratio < 1:
            raise ValueError(f"drop_ratio must be a share in [0, 1), got {self.drop_ratio:g}")
        if self.byte_budget is not None and not 0 < self.byte_budget <= 1:
            raise ValueError(f"byte_budget must be a share in (0, 1], got {self.byte_budget:g}")
        Compressor(Layout({"a": (1,)}), **dataclasses.asdict(self))
