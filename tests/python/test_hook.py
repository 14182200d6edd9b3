# SPDX-License-Identifier: MIT
"""The hook under DDP, on two and three ranks: what gradients, and replicas, it gives."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import models
import ranks

BACKENDS = ["cpu", "torch"]
SHAPES = [(64, 100), (100,), (9000,), (30, 7), (1,), (17, 3, 3)]


# --- R = 0 is DDP ---

@pytest.mark.parametrize("ddp_options, backend, overlap", [
    ({}, "cpu", False), ({"gradient_as_bucket_view": True}, "torch", False), ({"static_graph": True}, "cpu", False),
    ({"find_unused_parameters": True}, "torch", False), ({"bucket_cap_mb": 0.05}, "cpu", False), ({"bucket_cap_mb": 0.05}, "torch", True),
    ({"gradient_as_bucket_view": True}, "cpu", True)])
@ranks.on(2)
def test_ratio_zero_is_ddp_bit_for_bit(ddp_options, backend, overlap):
    def trained(drop_ratio):
        model = models.small()
        models.train(models.dropping(model, ddp_options, drop_ratio=drop_ratio, backend=backend, overlap=overlap)[0], 8)
        return models.bits(model)

    plain = models.small()
    theirs = DDP(plain, **ddp_options)
    theirs.register_comm_hook(None, allreduce_hook)
    models.train(theirs, 8)
    assert trained(drop_ratio=0.0) == models.bits(plain)
    assert ddp_options or trained(drop_ratio=0.5) != models.bits(plain)  # the comparison can fail


@ranks.on(2)
def test_ratio_zero_is_ddp_with_accumulation_channels_last_and_adam():
    def by(make_optimizer=None, accumulate=1, memory_format=None, **options):
        results = []
        for drops in (True, False):
            model = models.small()
            if memory_format is not None:
                model = model.to(memory_format=memory_format)
            ddp = models.dropping(model, drop_ratio=0.0, **options)[0] if drops else DDP(model)
            optimizer = make_optimizer(ddp.parameters()) if make_optimizer else torch.optim.SGD(ddp.parameters(), 0.05)
            for step in range(8):
                optimizer.zero_grad()
                for micro in range(accumulate):
                    images, labels = models.batch(10 * step + micro, dist.get_rank())
                    if memory_format is not None:
                        images = images.to(memory_format=memory_format)
                    with ddp.no_sync() if micro + 1 < accumulate else contextlib.nullcontext():
                        nn.functional.cross_entropy(ddp(images), labels).backward()
                optimizer.step()
            results.append(models.bits(model))
        return results

    for result in (by(accumulate=3), by(accumulate=3, overlap=True), by(memory_format=torch.channels_last), by(torch.optim.Adam)):
        assert result[0] == result[1]


# --- replicas ---

RATIO = {"drop_ratio": 0.9, "fragment_elements": 4096}
BUDGET = {"send_budget": 0.1, "at_least_every": 20, "fragment_elements": 4096, "momentum": 0.5}


@pytest.mark.parametrize("world, options, overlap", [(2, RATIO, False), (3, BUDGET, False), (2, BUDGET, True), (3, RATIO, True)])
@ranks.on()
def test_replicas_stay_identical_and_learn(world, options, overlap):
    model = models.small()
    ddp, state = models.dropping(model, overlap=overlap, **options)
    losses = models.train(ddp, 60)
    assert sum(losses[-20:]) < 0.9 * sum(losses[:20])
    assert ranks.agree(models.bits(model))
    reports = ranks.gathered({**vars(state.last), "seconds": None, "left_out_elements": None})
    assert all(report == reports[0] for report in reports)
    assert state.totals.steps == 60 and 0 < state.totals.ratio < 1


@ranks.on(2)
def test_ranks_that_part_notice_it_in_the_next_step():
    ddp, state = models.dropping(models.Weights((5000,), (5000,), (10,)), drop_ratio=0.7)
    if dist.get_rank() == 1:
        select = state.backend.select

        def swapped(agreed, held):
            return select(agreed[[1, 0, 2]], held)

        state.backend.select = swapped
    given = [torch.full((5000,), 1.0), torch.full((5000,), 2.0), torch.full((10,), 0.5)]
    ddp(given).backward()
    with pytest.raises(RuntimeError, match="the ranks selected different fragments in step 1"):
        models.backward(ddp, given)


# --- nothing is lost ---

@pytest.mark.parametrize("options, backend, holds", [
    *(({"drop_ratio": 0.9, "at_least_every": 3}, backend, True) for backend in BACKENDS), ({"drop_ratio": 0.8}, "cpu", True),
    ({"send_budget": 0.3}, "torch", True), ({"drop_ratio": 0.9, "at_least_every": 3}, "cpu", False)])
@ranks.on(2)
def test_what_is_returned_and_what_waits_is_what_was_given(options, backend, holds):
    """Where some parameters are not used by any rank in every other step, and one never by rank 0. Without holding them it is lost."""
    shapes, rank = [(40, 50), (300,), (4096, 2), (9,)], dist.get_rank()
    model = models.Weights(*shapes)
    ddp, state = models.dropping(model, {"find_unused_parameters": True, "bucket_cap_mb": 0.01}, backend=backend, **options)
    if not holds:
        select = state.backend.select
        state.backend.select = lambda agreed, held: select(agreed, bytes(len(held)))
    returned, given = [torch.zeros(shape) for shape in shapes], [torch.zeros(shape) for shape in shapes]
    for step in range(1, 25):
        own = models.whole_numbers(shapes, step, rank)
        is_left_out = [step % 2 == 1, rank == 0, step % 2 == 1, False]
        own = [None if out else each for out, each in zip(is_left_out, own)]
        ddp.zero_grad(set_to_none=True)
        ddp(own).backward()
        for layer, parameter in enumerate(model.all):
            if own[layer] is not None:
                given[layer] += own[layer]
            if parameter.grad is not None:
                returned[layer] += parameter.grad
    lost = 0
    for layer in range(len(shapes)):
        mean = sum(ranks.gathered(given[layer])) / 2
        waits = sum(ranks.gathered(state.residual(f"all.{layer}"))) / 2
        lost += (returned[layer] + waits - mean).abs().sum().item()
    assert (lost == 0) == holds


@pytest.mark.parametrize("backend, by_hook, scaler", [("cpu", True, None), ("torch", True, models.Scaler(1024.0)), ("cpu", False, None)])
@ranks.on(2)
def test_what_the_hook_clips_is_all_delivered_or_in_the_residual(backend, by_hook, scaler):
    """And what is clipped after backward is lost."""
    shapes, rank, max_norm = [(40, 50), (300,), (4096, 2), (9,)], dist.get_rank(), 3000.0
    model = models.Weights(*shapes)
    options = {"max_norm": max_norm} if by_hook else {}
    ddp, state = models.dropping(model, {"bucket_cap_mb": 0.01}, drop_ratio=0.8, backend=backend, scaler=scaler, **options)
    delivered, given, factors = [torch.zeros(shape) for shape in shapes], [torch.zeros(shape) for shape in shapes], []
    scale = scaler.get_scale() if scaler else 1
    for step in range(1, 25):
        own = [each * (1 + step % 3) for each in models.whole_numbers(shapes, step, rank)]
        models.backward(ddp, [each * scale for each in own])
        for parameter in model.all:
            parameter.grad /= scale
        if not by_hook:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        own = [nn.Parameter(each) for each in own]
        for each in own:
            each.grad = each.detach().clone()
        factors.append(min(1.0, max_norm / nn.utils.clip_grad_norm_(own, max_norm).item()))
        for layer, parameter in enumerate(model.all):
            given[layer] += own[layer].grad
            delivered[layer] += parameter.grad
    assert min(factors) < 0.9 and max(factors) == 1
    lost = total = 0
    for layer in range(len(shapes)):
        mean = sum(ranks.gathered(given[layer])) / 2
        residual = sum(ranks.gathered(state.residual(f"all.{layer}"))) / 2
        lost += (delivered[layer] + residual - mean).abs().sum().item()
        total += mean.abs().sum().item()
    assert (lost < 1e-5 * total) == by_hook


# --- DDP's own ways ---

@ranks.on(2)
def test_the_layout_of_buckets_does_not_matter():
    results = []
    for cap in (0.05, 1, 1000):
        model = models.small()
        models.train(models.dropping(model, {"bucket_cap_mb": cap}, drop_ratio=0.9)[0], 12)
        results.append(models.bits(model))
    assert results[0] == results[1] == results[2]


@ranks.on(2)
def test_both_backends_do_the_same():
    for options in ({"drop_ratio": 0.8}, {"drop_ratio": 0.5, "fragment_elements": 4096, "momentum": 0.5},
                    {"send_budget": 0.2, "at_least_every": 7}, {"drop_ratio": 0.8, "value": "max_abs"},
                    {"drop_ratio": 0.8, "value": "root_mean_square"}, {"drop_ratio": 0.8, "value": "l2_norm"},
                    {"drop_ratio": 0.8, "value": "l1_norm"}):
        both = []
        for backend in BACKENDS:
            ddp, state = models.dropping(models.Weights(*SHAPES), backend=backend, **options)
            seen = []
            for step in range(1, 16):
                gradients = models.backward(ddp, models.whole_numbers(SHAPES, step, dist.get_rank()))
                seen.append((state.last.sent_elements, gradients))
            both.append((seen, [state.residual(name) for name in state.names]))
        for (sent, gradients), (other_sent, others) in zip(both[0][0], both[1][0]):
            assert sent == other_sent
            assert all(torch.equal(one, other) for one, other in zip(gradients, others))
        assert all(torch.equal(one, other) for one, other in zip(both[0][1], both[1][1]))


@pytest.mark.parametrize("overlap", [False, True])
@ranks.on(2)
def test_ranks_with_fewer_batches_join(overlap):
    model = models.small()
    ddp, state = models.dropping(model, drop_ratio=0.9, overlap=overlap)
    with ddp.join():
        models.train(ddp, 6 + 4 * dist.get_rank())
    assert ranks.agree(models.bits(model))
    assert state.step == 10


@ranks.on(2)
def test_two_models_in_one_backward():
    first, second = models.small(0), models.small(1)
    (one, state), (other, other_state) = models.dropping(first, drop_ratio=0.9), models.dropping(second, drop_ratio=0.5)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.05)
    for step in range(10):
        images, labels = models.batch(step, dist.get_rank())
        optimizer.zero_grad()
        nn.functional.cross_entropy(one(images) + other(images), labels).backward()
        optimizer.step()
    for model in (first, second):
        assert ranks.agree(models.bits(model))
    assert state.step == other_state.step == 10 and state.totals.ratio < other_state.totals.ratio


@pytest.mark.skipif(not hasattr(torch, "compile"), reason="torch.compile came with PyTorch 2.0")
@ranks.on(2)
def test_a_compiled_model():
    model, same = models.small(), models.small()
    models.train(models.dropping(same, drop_ratio=0.9)[0], 6)
    ddp, _ = models.dropping(model, drop_ratio=0.9)
    models.train(torch.compile(ddp, backend="eager"), 6, torch.optim.SGD(model.parameters(), 0.05))
    assert models.bits(model) == models.bits(same)


@pytest.mark.parametrize("forgets", [False, True])
@ranks.on(2)
def test_the_bytes_reported_are_those_that_allreduce_saw(forgets):
    ddp, state = models.dropping(models.small(), drop_ratio=0.9, fragment_elements=4096)
    seen, all_reduce = [], dist.all_reduce

    def counting(tensor, *arguments, **options):
        if not (forgets and tensor.dtype == torch.int32):
            seen.append(tensor.numel() * tensor.element_size())
        return all_reduce(tensor, *arguments, **options)

    with mock.patch.object(dist, "all_reduce", counting):
        models.train(ddp, 1)
    assert (sum(seen) == state.last.sent_bytes) != forgets
    fragments, layers = state.last.fragments, len(state.names)
    assert state.last.dense_bytes == 4 * state.last.elements
    assert state.last.sent_bytes <= 0.1 * state.last.dense_bytes + 4 * 4096 + 8 * (fragments + layers + 2) + 4
