# SPDX-License-Identifier: MIT
"""The hook on a device that is pretended: what it launches, what the host waits for, and that nothing is mixed with the CPU."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lamina
import pretended
import ranks
from lamina.torch import _step
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


class Parameters(nn.Module):
    def __init__(self, shapes, made, dtype=torch.float32):
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(made(torch.zeros(shape, dtype=dtype))) for shape in shapes)


def buckets_of(shapes, step, made, dtype, rank=0, of=5, bad=None):
    """As DDP makes them: in the reverse order of the layers."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    layers, buckets = list(range(len(shapes)))[::-1], []
    for some in (layers[begin::1][:-(-len(layers) // of)] for begin in range(0, len(layers), -(-len(layers) // of))):
        sizes = [torch.Size(shapes[layer]).numel() for layer in some]
        buffer = torch.cat([torch.randn(size, generator=generator) * 1e-3 * (1 + layer % 7) for layer, size in zip(some, sizes)]).to(dtype)
        if bad is not None and bad in some:
            buffer[sum(sizes[:some.index(bad)])] = torch.inf
        buffer = made(buffer)
        gradients = [each.view(shapes[layer]) for each, layer in zip(torch.split(buffer, sizes), some)]
        buckets.append(_step.Bucket(buffer, some, gradients, torch.futures.Future()))
    return buckets


class Scaler:
    def __init__(self, made):
        self._scale = made(torch.tensor(1024.0))

    def is_enabled(self):
        return True

    def get_scale(self):
        return self._scale.item()


def a_step(state, buckets):
    if not state.overlap:
        return _step.run(state, buckets)
    for index, bucket in enumerate(buckets):
        state._start_allreduce(bucket, index)
    return state._finish_overlapped(buckets)


def with_overlap(state):
    state.overlap = True  # which bind() allows only of a DDP object
    return state


VARIANTS = {
    "plain": {}, "momentum": {"momentum": 0.9}, "fragments": {"fragment_elements": 4096}, "max_norm": {"max_norm": 0.1},
    "scaler": {"scaler": True}, "scaled and clipped": {"scaler": True, "max_norm": 0.1}, "leave_out": {"nonfinite": "leave_out"},
    "l2_norm": {"value": "l2_norm"}, "max_abs": {"value": "max_abs"}, "float16": {"dtype": torch.float16},
    "bfloat16": {"dtype": torch.bfloat16}, "bfloat16 on the wire": {"wire": "bfloat16"}, "overlap": {"overlap": True},
    "overlap, momentum, fragments": {"overlap": True, "momentum": 0.9, "fragment_elements": 4096}}


def budgets(variant):
    given = dict(VARIANTS[variant])
    shapes, overlap, dtype = resnet50(), given.pop("overlap", False), given.pop("dtype", torch.float32)
    if "wire" in given or dtype is torch.bfloat16:  # the process group of this PyTorch may not add it
        add = dist.all_reduce
        dist.all_reduce = lambda each, *arguments, **named: each if each.dtype is torch.bfloat16 else add(each, *arguments, **named)
    options = {name: given.pop(name) for name in ("momentum", "fragment_elements", "value") if name in given}
    try:
        with pretended.device():
            if given.get("scaler"):
                given["scaler"] = Scaler(pretended.Tensor)
            state = LayerDropping(lamina.Options(**options), **given).bind(Parameters(shapes, pretended.Tensor, dtype))
            state = with_overlap(state) if overlap else state
            for step in range(1, 5):
                buckets = buckets_of(shapes, step, pretended.Tensor, dtype)
                pretended.forget()
                a_step(state, buckets)
            assert type(state.backend).__name__ == "TorchBackend" and state.last.sent_fragments < len(state.backend.fragments)
            assert pretended.counts["waits"] <= (2 if overlap else 1), pretended.where
            assert 0 < pretended.counts["launches"] <= 150, pretended.where
            assert pretended.counts["copies to the device"] <= 4, pretended.where
    finally:
        if "wire" in given or dtype is torch.bfloat16:
            dist.all_reduce = add


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_waits_once_and_launches_little(variant):
    ranks.run(1, budgets, variant)


def alike(variant):
    """On two ranks, with the CPU's: the same is sent, and what waits is the same."""
    given, rank = dict(VARIANTS[variant]), dist.get_rank()
    shapes, dtype = [(70, 100), (3,), (33, 4), (0,), (9000,), (1,)], given.pop("dtype", torch.float32)
    overlap, is_scaled = given.pop("overlap", False), given.pop("scaler", False)
    options = {name: given.pop(name) for name in ("momentum", "fragment_elements", "value") if name in given}

    def trained(backend, made):
        scaler = {"scaler": Scaler(made)} if is_scaled else {}
        state = LayerDropping(lamina.Options(drop_ratio=0.6, **options), backend=backend, **scaler, **given).bind(
            Parameters(shapes, made, dtype))
        state = with_overlap(state) if overlap else state
        sent, delivered = [], []
        for step in range(1, 9):
            buckets = buckets_of(shapes, step, made, dtype, rank, 1 if step == 1 else 3, bad=4 if step == 5 and rank == 1 else None)
            a_step(state, buckets)
            sent.append(list(state._sent))
            delivered.append([pretended.on_host(bucket.buffer) for bucket in buckets])
        assert state.last.left_out_elements == (given.get("nonfinite") == "leave_out" or overlap) * rank
        return sent, delivered, [pretended.on_host(state.backend.residual(layer)) for layer in range(len(shapes))], state.step

    expected = trained("cpu", lambda tensor: tensor)
    with pretended.device():
        found = trained("torch", pretended.Tensor)
    assert (expected[0], expected[3]) == (found[0], found[3])
    for one, other in zip([each for of in expected[1] for each in of] + expected[2], [each for of in found[1] for each in of] + found[2]):
        torch.testing.assert_close(one, other, rtol=1e-6 if "max_norm" in given else 0, atol=0, equal_nan=True)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if "bfloat16" not in name])
def test_the_choices_and_the_residual_are_those_of_the_cpu(variant):
    ranks.run(2, alike, variant)
