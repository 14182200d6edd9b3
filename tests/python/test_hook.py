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

import lamina.torch
import models
import ranks


# --- R = 0 is DDP ---

ROWS, CHANNELS = torch.contiguous_format, torch.channels_last


@pytest.mark.parametrize("ddp_options, backend, overlap, accumulate, memory_format", [
    ({}, "cpu", False, 3, CHANNELS), ({"gradient_as_bucket_view": True}, "torch", False, 1, ROWS), ({"static_graph": True}, "cpu", False, 1, ROWS),
    ({"find_unused_parameters": True}, "torch", False, 1, ROWS), ({"bucket_cap_mb": 0.05}, "torch", True, 3, ROWS),
    ({"gradient_as_bucket_view": True}, "cpu", True, 1, ROWS)])
@ranks.on(2)
def test_ratio_zero_is_ddp_bit_for_bit(ddp_options, backend, overlap, accumulate, memory_format):
    def trained(drop_ratio):
        model = models.small().to(memory_format=memory_format)
        ddp, optimizer = DDP(model, **ddp_options), torch.optim.SGD(model.parameters(), 0.05)
        if drop_ratio is None:
            ddp.register_comm_hook(None, allreduce_hook)
        else:
            lamina.torch.register(ddp, drop_ratio=drop_ratio, backend=backend, overlap=overlap)
        for step in range(4):
            optimizer.zero_grad()
            for micro in range(accumulate):
                images, labels = models.batch(10 * step + micro, dist.get_rank())
                with ddp.no_sync() if micro + 1 < accumulate else contextlib.nullcontext():
                    nn.functional.cross_entropy(ddp(images.to(memory_format=memory_format)), labels).backward()
            optimizer.step()
        return models.bits(model)

    plain = trained(None)
    assert trained(0.0) == plain
    assert ddp_options or trained(0.5) != plain  # the comparison can fail


# --- replicas ---

RATIO = {"drop_ratio": 0.9, "fragment_elements": 4096}
BUDGET = {"send_budget": 0.1, "at_least_every": 5, "fragment_elements": 4096, "momentum": 0.5}


@pytest.mark.parametrize("options, overlap", [(BUDGET, False), (RATIO, True)])
@ranks.on(3)
def test_replicas_stay_identical_where_ranks_with_fewer_batches_join(options, overlap):
    model = models.small()
    ddp, state = models.dropping(model, overlap=overlap, **options)
    with ddp.join():
        models.train(ddp, 6 + 4 * dist.get_rank())
    assert ranks.agree(models.bits(model))
    reports = ranks.gathered({**vars(state.last), "seconds": None, "left_out_elements": None})
    assert all(report == reports[0] for report in reports)
    assert state.step == state.totals.steps == 14 and 0 < state.totals.ratio < 1


@ranks.on(2)
def test_ranks_that_part_notice_it_in_the_next_step():
    ddp, state = models.dropping(models.Weights((5000,), (5000,), (10,)), drop_ratio=0.7)
    if dist.get_rank() == 1:
        select = state.backend.select
        state.backend.select = lambda agreed, held: select(agreed[[1, 0, 2]], held)
    given = [torch.full((5000,), 1.0), torch.full((5000,), 2.0), torch.full((10,), 0.5)]
    ddp(given).backward()
    with pytest.raises(RuntimeError, match="the ranks selected different fragments in step 1"):
        models.backward(ddp, given)


# --- nothing is lost ---

@pytest.mark.parametrize("options, backend, holds", [
    ({"drop_ratio": 0.9, "at_least_every": 3}, "cpu", True), ({"send_budget": 0.3}, "torch", True), ({"drop_ratio": 0.9, "at_least_every": 3}, "cpu", False)])
@ranks.on(2)
def test_what_is_returned_and_what_waits_is_what_was_given(options, backend, holds):
    """Where some parameters are not used by any rank in every other step, and one never by rank 0. Without holding them it is lost."""
    shapes, rank = [(40, 50), (300,), (4096, 2), (9,)], dist.get_rank()
    model, ledger = models.Weights(*shapes), models.Ledger(shapes)
    ddp, state = models.dropping(model, {"find_unused_parameters": True, "bucket_cap_mb": 0.01}, backend=backend, **options)
    if not holds:
        select = state.backend.select
        state.backend.select = lambda agreed, held: select(agreed, bytes(len(held)))
    for step in range(1, 13):
        is_left_out = [step % 2 == 1, rank == 0, step % 2 == 1, False]
        own = [None if out else each for out, each in zip(is_left_out, models.whole_numbers(shapes, step, rank))]
        ddp.zero_grad(set_to_none=True)
        ddp(own).backward()
        ledger.add(own, [parameter.grad for parameter in model.all])
    assert (ledger.lost(state) == 0) == holds


@pytest.mark.parametrize("backend, by_hook, scaler", [("cpu", True, None), ("torch", True, models.Scaler(1024.0)), ("cpu", False, None)])
@ranks.on(2)
def test_what_the_hook_clips_is_all_delivered_or_in_the_residual(backend, by_hook, scaler):
    """And what is clipped after backward is lost."""
    shapes, rank, max_norm = [(40, 50), (300,), (4096, 2), (9,)], dist.get_rank(), 3000.0
    model, ledger, factors = models.Weights(*shapes), models.Ledger(shapes), []
    options = {"max_norm": max_norm} if by_hook else {}
    ddp, state = models.dropping(model, {"bucket_cap_mb": 0.01}, drop_ratio=0.8, backend=backend, scaler=scaler, **options)
    scale = scaler.get_scale() if scaler else 1
    for step in range(1, 13):
        own = [nn.Parameter(each * (1 + step % 3)) for each in models.whole_numbers(shapes, step, rank)]
        models.backward(ddp, [each.detach() * scale for each in own])
        if not by_hook:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        for each in own:
            each.grad = each.detach().clone()
        factors.append(min(1.0, max_norm / nn.utils.clip_grad_norm_(own, max_norm).item()))
        ledger.add([each.grad for each in own], [parameter.grad / scale for parameter in model.all])
    assert min(factors) < 0.9 and max(factors) == 1
    assert (ledger.lost(state) < 1e-5) == by_hook


# --- DDP's own ways ---

@ranks.on(2)
def test_two_models_in_one_backward():
    first, second = models.small(0), models.small(1)
    (one, state), (other, other_state) = models.dropping(first, drop_ratio=0.9), models.dropping(second, drop_ratio=0.5)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.05)
    for step in range(5):
        images, labels = models.batch(step, dist.get_rank())
        optimizer.zero_grad()
        nn.functional.cross_entropy(one(images) + other(images), labels).backward()
        optimizer.step()
    for model in (first, second):
        assert ranks.agree(models.bits(model))
    assert state.step == other_state.step == 5 and state.totals.ratio < other_state.totals.ratio


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
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        models.train(ddp, 1)
    seen = [call.args[0] for call in all_reduce.call_args_list if not (forgets and call.args[0].dtype == torch.int32)]
    assert (sum(each.numel() * each.element_size() for each in seen) == state.last.sent_bytes) != forgets
    fragments, layers = state.last.fragments, len(state.names)
    assert state.last.dense_bytes == 4 * state.last.elements
    assert state.last.sent_bytes <= 0.1 * state.last.dense_bytes + 4 * 4096 + 8 * (fragments + layers + 2) + 4
