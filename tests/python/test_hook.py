# SPDX-License-Identifier: MIT
"""The hook under DDP, on two and three ranks: what gradients, and replicas, it gives."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import lamina
import lamina.torch
import models
import literal
import ranks

BACKENDS = ["cpu", "torch"]


# --- R = 0 is DDP ---

DENSE = {
    "plain": {}, "bucket view": {"gradient_as_bucket_view": True}, "static graph": {"static_graph": True},
    "find unused": {"find_unused_parameters": True}, "small buckets": {"bucket_cap_mb": 0.05},
}


def dense(ddp_options, backend):
    plain, dropped = models.small(), models.small()
    ours, _ = models.dropping(dropped, ddp_options, drop_ratio=0.0, backend=backend)
    theirs = DDP(plain, **ddp_options)
    theirs.register_comm_hook(None, allreduce_hook)
    models.train(ours, 8)
    models.train(theirs, 8)
    assert models.bits(dropped) == models.bits(plain)
    half = models.small()
    models.train(models.dropping(half, ddp_options, drop_ratio=0.5, backend=backend)[0], 8)
    assert models.bits(half) != models.bits(plain)  # the comparison can fail


@pytest.mark.parametrize("options", DENSE)
@pytest.mark.parametrize("backend", BACKENDS)
def test_ratio_zero_is_ddp_bit_for_bit(options, backend):
    ranks.run(2, dense, DENSE[options], backend)


def dense_otherwise():
    def by(make_optimizer=None, accumulate=1, memory_format=None):
        results = []
        for drops in (True, False):
            model = models.small()
            if memory_format is not None:
                model = model.to(memory_format=memory_format)
            ddp = models.dropping(model, drop_ratio=0.0)[0] if drops else DDP(model)
            optimizer = make_optimizer(ddp.parameters()) if make_optimizer else torch.optim.SGD(ddp.parameters(), 0.05)
            for step in range(8):
                optimizer.zero_grad()
                for micro in range(accumulate):
                    images, labels = models.batch(10 * step + micro, dist.get_rank())
                    if memory_format is not None:
                        images = images.to(memory_format=memory_format)
                    if micro + 1 < accumulate:
                        with ddp.no_sync():
                            nn.functional.cross_entropy(ddp(images), labels).backward()
                    else:
                        nn.functional.cross_entropy(ddp(images), labels).backward()
                optimizer.step()
            results.append(models.bits(model))
        return results

    for result in (by(accumulate=3), by(memory_format=torch.channels_last), by(torch.optim.Adam)):
        assert result[0] == result[1]


def test_ratio_zero_is_ddp_with_accumulation_channels_last_and_adam():
    ranks.run(2, dense_otherwise)


# --- against the literal method ---

SHAPES = [(64, 100), (100,), (9000,), (30, 7), (1,), (17, 3, 3)]


def against_literal(world_gradients, options, backend):
    shapes, rank, world = SHAPES, dist.get_rank(), dist.get_world_size()
    model = models.Weights(*shapes)
    ddp, state = models.dropping(model, {"bucket_cap_mb": 0.01}, backend=backend, **options)
    paper = literal.Workers(world, [int(np.prod(shape)) for shape in shapes], options["drop_ratio"],
                           options.get("fragment_elements", 0))
    kept = 0
    for step in range(1, 31):
        given = [world_gradients(shapes, step, each) for each in range(world)]
        ddp.zero_grad()
        ddp(given[rank]).backward()
        means, sent = paper.step([[each.flatten().numpy() for each in own] for own in given])
        for parameter, mean in zip(model.all, means):
            np.testing.assert_array_equal(parameter.grad.flatten().numpy(), mean)
        assert (state.last.step, state.last.sent_fragments) == (step, len(sent))
        kept += len(sent)
        for layer in range(len(shapes)):
            np.testing.assert_array_equal(state.residual(f"all.{layer}").flatten().numpy(), paper.residuals[rank][layer])
    assert 0 < kept < 30 * len(state.backend.fragments)  # some waited, some did not


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{"drop_ratio": 0.9}, {"drop_ratio": 0.6, "fragment_elements": 4096}], ids=["whole", "fragments"])
def test_every_gradient_is_that_of_the_literal_method(options, backend):
    ranks.run(2, against_literal, models.whole_numbers, options, backend)


def by_bucket():
    """The negative control: the threshold of each bucket gives other gradients than that of the whole model."""
    sizes = [int(np.prod(shape)) for shape in SHAPES]
    whole = literal.Workers(2, sizes, 0.9)
    single = [literal.Workers(2, [size], 0.9) for size in sizes]
    differs = False
    for step in range(1, 31):
        given = [[each.flatten().numpy() for each in models.whole_numbers(SHAPES, step, rank)] for rank in range(2)]
        means, _ = whole.step(given)
        alone = [each.step([[own[layer]] for own in given])[0][0] for layer, each in enumerate(single)]
        differs |= any(np.any(mean != other) for mean, other in zip(means, alone))
    return differs


def test_the_literal_method_by_bucket_is_another():
    assert by_bucket()


# --- replicas ---

def replicas(options):
    model = models.small()
    ddp, state = models.dropping(model, **options)
    losses = models.train(ddp, 80)
    assert sum(losses[-20:]) < 0.9 * sum(losses[:20])
    assert len(set(ranks.gathered(models.bits(model)))) == 1
    reports = ranks.gathered({**vars(state.last), "seconds": None, "left_out_elements": None})
    assert all(report == reports[0] for report in reports)
    assert state.totals.steps == 80 and 0 < state.totals.ratio < 1


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("options", [{"drop_ratio": 0.9, "fragment_elements": 4096},
                                     {"send_budget": 0.1, "at_least_every": 20, "fragment_elements": 4096, "momentum": 0.5}],
                         ids=["ratio", "budget"])
def test_replicas_stay_identical_and_learn(world, options):
    ranks.run(world, replicas, options)


def parted():
    model = models.Weights((5000,), (5000,), (10,))
    ddp, state = models.dropping(model, drop_ratio=0.7)
    if dist.get_rank() == 1:
        select = state.backend.select

        def swapped(agreed, held):
            return select(agreed[[1, 0, 2]], held)

        state.backend.select = swapped
    given = [torch.full((5000,), 1.0), torch.full((5000,), 2.0), torch.full((10,), 0.5)]
    ddp(given).backward()
    with pytest.raises(RuntimeError, match="the ranks selected different fragments in step 1"):
        ddp.zero_grad()
        ddp(given).backward()


def test_ranks_that_part_notice_it_in_the_next_step():
    ranks.run(2, parted)


# --- nothing is lost ---

def conserved(options, uses, backend, holds):
    shapes, rank = [(40, 50), (300,), (4096, 2), (9,)], dist.get_rank()
    model = models.Weights(*shapes)
    ddp, state = models.dropping(model, {"find_unused_parameters": True, "bucket_cap_mb": 0.01}, backend=backend, **options)
    if not holds:
        select = state.backend.select
        state.backend.select = lambda agreed, held: select(agreed, bytes(len(held)))
    returned, given = [torch.zeros(shape) for shape in shapes], [torch.zeros(shape) for shape in shapes]
    for step in range(1, 25):
        own = models.whole_numbers(shapes, step, rank)
        own = [each if uses(layer, step, rank) else None for layer, each in enumerate(own)]
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


def all_used(layer, step, rank):
    return True


def not_by_rank_0(layer, step, rank):
    return layer != 1 or rank == 1


def not_in_odd_steps(layer, step, rank):
    return layer not in (0, 2) or step % 2 == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("uses", [all_used, not_by_rank_0, not_in_odd_steps])
@pytest.mark.parametrize("options", [{"drop_ratio": 0.8}, {"send_budget": 0.3}, {"drop_ratio": 0.9, "at_least_every": 3}],
                         ids=["ratio", "budget", "age"])
def test_what_is_returned_and_what_waits_is_what_was_given(options, uses, backend):
    ranks.run(2, conserved, options, uses, backend, True)


def test_without_holding_parameters_that_nobody_used_gradients_are_lost():
    ranks.run(2, conserved, {"drop_ratio": 0.9, "at_least_every": 3}, not_in_odd_steps, "cpu", False)


class Scaler:
    def is_enabled(self):
        return True

    def get_scale(self):
        return 1024.0


def clipped(backend, by_hook, scaler):
    shapes, rank, max_norm = [(40, 50), (300,), (4096, 2), (9,)], dist.get_rank(), 3000.0
    model = models.Weights(*shapes)
    options = {"max_norm": max_norm} if by_hook else {}
    ddp, state = models.dropping(model, {"bucket_cap_mb": 0.01}, drop_ratio=0.8, backend=backend, scaler=scaler, **options)
    delivered, given, factors = [torch.zeros(shape) for shape in shapes], [torch.zeros(shape) for shape in shapes], []
    scale = scaler.get_scale() if scaler else 1
    for step in range(1, 25):
        own = [each * (1 + step % 3) for each in models.whole_numbers(shapes, step, rank)]
        ddp.zero_grad()
        ddp([each * scale for each in own]).backward()
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scaler", [None, Scaler()], ids=["", "scaler"])
def test_what_the_hook_clips_is_all_delivered_or_in_the_residual(backend, scaler):
    ranks.run(2, clipped, backend, True, scaler)


def test_clipping_after_backward_loses_what_the_residual_delivers():
    ranks.run(2, clipped, "cpu", False, None)


# --- DDP's own ways ---

def buckets():
    results = []
    for cap in (0.05, 1, 1000):
        model = models.small()
        models.train(models.dropping(model, {"bucket_cap_mb": cap}, drop_ratio=0.9)[0], 12)
        results.append(models.bits(model))
    assert results[0] == results[1] == results[2]


def test_the_layout_of_buckets_does_not_matter():
    ranks.run(2, buckets)


def backends():
    for options in ({"drop_ratio": 0.8}, {"drop_ratio": 0.5, "fragment_elements": 4096, "momentum": 0.5},
                    {"send_budget": 0.2, "at_least_every": 7}, {"drop_ratio": 0.8, "value": "max_abs"},
                    {"drop_ratio": 0.8, "value": "root_mean_square"}, {"drop_ratio": 0.8, "value": "l2_norm"},
                    {"drop_ratio": 0.8, "value": "l1_norm"}):
        both = []
        for backend in BACKENDS:
            model = models.Weights(*SHAPES)
            ddp, state = models.dropping(model, backend=backend, **options)
            seen = []
            for step in range(1, 31):
                ddp.zero_grad()
                ddp(models.whole_numbers(SHAPES, step, dist.get_rank())).backward()
                seen.append((state.last.sent_elements, [each.grad.clone() for each in model.all]))
            both.append((seen, [state.residual(name) for name in state.names]))
        for (sent, gradients), (other_sent, others) in zip(both[0][0], both[1][0]):
            assert sent == other_sent
            assert all(torch.equal(one, other) for one, other in zip(gradients, others))
        assert all(torch.equal(one, other) for one, other in zip(both[0][1], both[1][1]))


def test_both_backends_do_the_same():
    ranks.run(2, backends)


def joined(overlap):
    model = models.small()
    ddp, state = models.dropping(model, drop_ratio=0.9, overlap=overlap)
    with ddp.join():
        models.train(ddp, 6 + 4 * dist.get_rank())
    assert len(set(ranks.gathered(models.bits(model)))) == 1
    assert state.step == 10


def test_ranks_with_fewer_batches_join():
    ranks.run(2, joined, False)


def two_models():
    first, second = models.small(0), models.small(1)
    (one, state), (other, other_state) = models.dropping(first, drop_ratio=0.9), models.dropping(second, drop_ratio=0.5)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.05)
    for step in range(10):
        images, labels = models.batch(step, dist.get_rank())
        optimizer.zero_grad()
        nn.functional.cross_entropy(one(images) + other(images), labels).backward()
        optimizer.step()
    for model in (first, second):
        assert len(set(ranks.gathered(models.bits(model)))) == 1
    assert state.step == other_state.step == 10 and state.totals.ratio < other_state.totals.ratio


def test_two_models_in_one_backward():
    ranks.run(2, two_models)


def compiled():
    model, same = models.small(), models.small()
    models.train(models.dropping(same, drop_ratio=0.9)[0], 6)
    ddp, _ = models.dropping(model, drop_ratio=0.9)
    models.train(torch.compile(ddp, backend="eager"), 6, torch.optim.SGD(model.parameters(), 0.05))
    assert models.bits(model) == models.bits(same)


@pytest.mark.skipif(not hasattr(torch, "compile"), reason="torch.compile came with PyTorch 2.0")
def test_a_compiled_model():
    ranks.run(2, compiled)


def bytes_counted(forgets):
    model = models.small()
    ddp, state = models.dropping(model, drop_ratio=0.9, fragment_elements=4096)
    seen, all_reduce = [], dist.all_reduce

    def counting(tensor, *arguments, **options):
        if not (forgets and tensor.dtype == torch.int32):
            seen.append(tensor.numel() * tensor.element_size())
        return all_reduce(tensor, *arguments, **options)

    dist.all_reduce = counting
    try:
        models.train(ddp, 1)
    finally:
        dist.all_reduce = all_reduce
    assert (sum(seen) == state.last.sent_bytes) != forgets
    fragments, layers = state.last.fragments, len(state.names)
    assert state.last.dense_bytes == 4 * state.last.elements
    assert state.last.sent_bytes <= 0.1 * state.last.dense_bytes + 4 * 4096 + 8 * (fragments + layers + 2) + 4


@pytest.mark.parametrize("forgets", [False, True])
def test_the_bytes_reported_are_those_that_allreduce_saw(forgets):
    ranks.run(2, bytes_counted, forgets)
