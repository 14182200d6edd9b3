# SPDX-License-Identifier: MIT
"""The hook on a device that is pretended: what it launches, what the host waits for, and that nothing is mixed with the CPU."""

import ctypes
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lamina
import models
import pretended
import ranks
from lamina.torch import _step
from lamina.torch._cuda import CudaBackend
from lamina.torch._device import TorchBackend
from lamina.torch._state import LayerDropping


def resnet50(width=16):
    """The shapes of its 161 layers, of a quarter of its width."""
    shapes, channels = [(width, 3, 7, 7), (width,), (width,)], width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = width * 2 ** stage
        for block in range(blocks):
            shapes += [(inner, channels, 1, 1), (inner,), (inner,), (inner, inner, 3, 3), (inner,), (inner,), (4 * inner, inner, 1, 1),
                       (4 * inner,), (4 * inner,)]
            if block == 0:
                shapes += [(4 * inner, channels, 1, 1), (4 * inner,), (4 * inner,)]
            channels = 4 * inner
    return shapes + [(1000, channels), (1000,)]


def buckets_of(shapes, step, dtype, of=5):
    """As DDP makes them: in the reverse order of the layers."""
    generator = torch.Generator().manual_seed(100 * step)
    layers, count, buckets = list(range(len(shapes)))[::-1], -(-len(shapes) // of), []
    for some in (layers[begin:begin + count] for begin in range(0, len(layers), count)):
        sizes = [torch.Size(shapes[layer]).numel() for layer in some]
        numbers = [torch.randn(size, generator=generator) * 1e-3 * (1 + layer % 7) for layer, size in zip(some, sizes)]
        buffer = pretended.Tensor(torch.cat(numbers).to(dtype))
        gradients = [each.view(shapes[layer]) for each, layer in zip(torch.split(buffer, sizes), some)]
        buckets.append(_step.Bucket(buffer, some, gradients, torch.futures.Future()))
    return buckets


class Scaler(models.Scaler):
    def __init__(self):
        self._scale = pretended.Tensor(torch.tensor(1024.0))

    def get_scale(self):
        return self._scale.item()


class Kernels:
    """In place of lamina._cuda.Worker: launches are counted, and do nothing but give values that grow with the layer."""

    prefix_bytes = 64

    def __init__(self, shapes, **_):
        self._layers, self.largest_frame_bytes = len(shapes), 64 + 4 * sum(torch.Size(shape).numel() for shape in shapes.values())

    def copy_values(self, stream, to):
        ctypes.memmove(to, (ctypes.c_double * self._layers)(*range(1, self._layers + 1)), 8 * self._layers)
        pretended.note("launches")

    def last_step(self, stream):
        return {"left_out_elements": 0}

    def __getattr__(self, name):
        assert name in ("bind", "accumulate", "select", "encode", "commit", "restore")
        return lambda *_, **__: pretended.note("launches")


VARIANTS = {
    "momentum, fragments": {"momentum": 0.9, "fragment_elements": 4096},
    "scaled and clipped": {"scaler": True, "max_norm": 0.1}, "leave_out, l2_norm": {"nonfinite": "leave_out", "value": "l2_norm"},
    "float16, max_abs": {"dtype": torch.float16, "value": "max_abs"}, "bfloat16": {"dtype": torch.bfloat16},
    "bfloat16 on the wire": {"wire": "bfloat16"}, "kernels": {"by_kernels": True, "scaler": True, "momentum": 0.9}, "overlap": {"overlap": True, "momentum": 0.9, "fragment_elements": 4096}}


@pytest.mark.parametrize("variant", VARIANTS)
@ranks.on(1)
def test_a_step_waits_once_and_launches_little(variant):
    given = dict(VARIANTS[variant])
    shapes, overlap, dtype = resnet50(), given.pop("overlap", False), given.pop("dtype", torch.float32)
    by_kernels = given.pop("by_kernels", False)
    options = {name: given.pop(name) for name in ("momentum", "fragment_elements", "value") if name in given}
    all_reduce = dist.all_reduce

    def of_any_type(each, *arguments, **named):
        """That of PyTorch's process group may not take bfloat16."""
        return each if each.dtype is torch.bfloat16 else all_reduce(each, *arguments, **named)

    with mock.patch.object(dist, "all_reduce", of_any_type), pretended.cuda(Kernels):
        with pretended.device():
            if given.get("scaler"):
                given["scaler"] = Scaler()
            model = nn.ParameterList(nn.Parameter(pretended.Tensor(torch.zeros(shape, dtype=dtype))) for shape in shapes)
            state = LayerDropping(lamina.Options(**options), **given).bind(model)
            if by_kernels:
                layout = lamina.Layout(dict(zip(state.names, state.shapes)))
                state.backend = CudaBackend(layout, state.options, state.wire, pretended.DEVICE)
            state.overlap = overlap  # which bind() allows only of a DDP object
            for step in range(1, 3):
                buckets = buckets_of(shapes, step, dtype)
                pretended.forget()
                if overlap:
                    for index, bucket in enumerate(buckets):
                        state._start_allreduce(bucket, index)
                    state._finish_overlapped(buckets)
                else:
                    _step.run(state, buckets)
            assert type(state.backend) is (CudaBackend if by_kernels else TorchBackend)
            assert 0 < state.last.sent_fragments < len(state.backend.fragments)
            assert pretended.counts["waits"] <= (2 if overlap else 1), pretended.where
            assert 0 < pretended.counts["launches"] <= 150, pretended.where
            assert pretended.counts["copies to the device"] <= 4, pretended.where
