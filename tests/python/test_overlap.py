# SPDX-License-Identifier: MIT
"""The hook with overlap=True: fragments chosen a step ahead, and allreduces that start in the backward pass."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import lamina
import lamina.torch
import models
import ranks
import test_state

BACKENDS = ["cpu", "torch"]
SHAPES = [(64, 100), (100,), (9000,), (30, 7), (1,), (17, 3, 3)]
BUCKETS = {"bucket_cap_mb": 0.01}


class Workers:
    """All workers in one place by lamina.Worker. With overlap their steps begin with a selection made in the step before."""

    def __init__(self, world, overlap, **options):
        layout = lamina.Layout({f"all.{layer}": shape for layer, shape in enumerate(SHAPES)})
        self.overlap, self.workers = overlap, [lamina.Worker(layout, non_finite="skip", **options) for _ in range(world)]

    @staticmethod
    def agreed(those):
        return sum(torch.frombuffer(each.values(), dtype=torch.float64) for each in those) / len(those)

    def step(self, gradients):
        """gradients[w][l]; the mean of what is sent and zeros elsewhere, of each layer."""
        world = len(self.workers)
        plans = [self.agreed(self.workers)] * self.overlap
        steps = []
        for worker, own in zip(self.workers, gradients):
            own = [each.flatten() for each in own]
            if plans:
                steps.append(worker.begin(worker.plan(plans[0]) if worker.steps else list(range(len(worker.fragments)))))
                steps[-1].add_all(own)
            else:
                steps.append(worker.add(own))
        if not plans:
            agreed = self.agreed(steps)
            for step in steps:
                step.select(agreed)
        packed = [torch.empty(step.sent_elements) for step in steps]
        for step, to in zip(steps, packed):
            step.pack(to, 1 / world)
            step.commit()
        means = [torch.zeros(shape).flatten() for shape in SHAPES]
        steps[0].unpack(sum(packed[1:], packed[0]), means)
        return means


MOMENTUM, BUDGET = {"drop_ratio": 0.8, "momentum": 0.5}, {"send_budget": 0.2, "at_least_every": 7}
FRAGMENTS = {"drop_ratio": 0.6, "fragment_elements": 4096}


@pytest.mark.parametrize("options, backend, overlap, ddp_options", [
    ({"drop_ratio": 0.9}, "cpu", True, BUCKETS), (FRAGMENTS, "torch", True, BUCKETS), (MOMENTUM, "torch", True, {}), (BUDGET, "cpu", True, {}),
    (FRAGMENTS, "cpu", False, BUCKETS), (MOMENTUM, "cpu", False, {}), (BUDGET, "torch", False, BUCKETS),
    *(({**FRAGMENTS, "momentum": 0.5, "value": value}, "torch", False, {}) for value in ("l1_norm", "max_abs")),
    *(({"drop_ratio": 0.8, "value": value}, "torch", False, BUCKETS) for value in ("l2_norm", "root_mean_square"))])
@ranks.on(2)
def test_every_gradient_is_that_of_the_workers(options, backend, overlap, ddp_options):
    rank, world = dist.get_rank(), dist.get_world_size()
    ddp, state = models.dropping(models.Weights(*SHAPES), ddp_options, backend=backend, overlap=overlap, **options)
    others, kept = Workers(world, overlap, **options), 0
    for step in range(1, 13):
        given = [models.whole_numbers(SHAPES, step, each) for each in range(world)]
        for one, other in zip(models.backward(ddp, given[rank]), others.step(given)):
            assert torch.equal(one.flatten(), other)
        assert state.last.step == step == state.step
        if overlap and step == 1:
            assert state.last.sent_fragments == len(state.backend.fragments)  # nothing is known yet
        kept += state.last.sent_fragments
        for layer, name in enumerate(state.names):
            assert torch.equal(state.residual(name).flatten(), torch.frombuffer(others.workers[rank].residual(layer), dtype=torch.float32))
    assert 0 < kept < 12 * len(state.backend.fragments)


@pytest.mark.parametrize("overlap", [True, False])
@ranks.on(2)
def test_allreduces_start_before_the_last_bucket_is_there(overlap):
    """The first allreduce of gradients starts while gradients of other buckets are still to come, or not."""
    ddp, state = models.dropping(models.Weights(*SHAPES), BUCKETS, drop_ratio=0.0, overlap=overlap)
    models.backward(ddp, models.whole_numbers(SHAPES, 1, dist.get_rank()))
    events, all_reduce, take = [], dist.all_reduce, state.take

    def told(bucket):
        events.append("last bucket" if bucket.is_last() else "bucket")
        return take(bucket)

    def noted(tensor, *arguments, **options):
        if tensor.dtype == torch.float32:
            events.append("gradients, " + ("async" if options.get("async_op") else "waited for"))
        return all_reduce(tensor, *arguments, **options)

    state.take = told
    with mock.patch.object(dist, "all_reduce", noted):
        models.backward(ddp, models.whole_numbers(SHAPES, 2, dist.get_rank()))
    assert "bucket" in events  # besides the last one
    first = next(index for index, event in enumerate(events) if event.startswith("gradients"))
    assert (first < events.index("last bucket")) == overlap
    assert events[first] == "gradients, " + ("async" if overlap else "waited for")


@pytest.mark.parametrize("backend", BACKENDS)
@ranks.on(2)
def test_a_rank_that_fails_before_its_first_bucket_is_not_a_step_behind(backend):
    """The forward pass of rank 1 fails, when rank 0 is in its backward pass already: their states load together, and what rank 0 has
    added comes later."""
    rank, options = dist.get_rank(), {"backend": backend, "send_budget": 0.3, "at_least_every": 5, "overlap": True}
    ddp, state = models.dropping(models.Weights(*SHAPES), BUCKETS, **options)
    for step in (1, 2):
        models.backward(ddp, models.whole_numbers(SHAPES, step, rank))
    ddp.zero_grad()
    if rank == 0:
        class Broken:
            def wait(self):
                raise RuntimeError("connection closed by peer")

        with mock.patch.object(dist, "all_reduce", lambda *_, **__: Broken()), pytest.raises(RuntimeError, match="closed by peer"):
            ddp(models.whole_numbers(SHAPES, 3, rank)).backward()
    assert state.step == 2
    fresh = models.Weights(*SHAPES)
    second, again = models.dropping(fresh, BUCKETS, **options)
    again.load_state_dict(state.state_dict())
    for step in range(4, 9):
        models.backward(second, models.whole_numbers(SHAPES, step, rank))
    assert again.step == 7 and not again.last.skipped
    others = ranks.gathered(torch.cat([parameter.grad.flatten() for parameter in fresh.all]))
    assert torch.equal(*others)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("overlap", [False, True])
@ranks.on(2)
def test_when_a_collective_fails_a_layer_has_all_of_its_gradient_or_nothing(overlap, backend):
    given = models.whole_numbers(SHAPES, 4, dist.get_rank())
    calls, all_reduce = [], dist.all_reduce

    def counted(*arguments, **options):
        calls.append(1)
        if len(calls) == counted.fails_at:
            raise RuntimeError("connection closed by peer")
        return all_reduce(*arguments, **options)

    def begun():
        """With overlap the first step has one bucket and sends everything."""
        counted.fails_at = 0
        ddp, state = models.dropping(models.Weights(*SHAPES), BUCKETS, drop_ratio=0.3, overlap=overlap, backend=backend)
        if overlap:
            models.backward(ddp, given)
            ddp.zero_grad()
        calls.clear()
        return ddp, state

    with mock.patch.object(dist, "all_reduce", counted):
        ddp, _ = begun()
        ddp(given).backward()
        collectives, least = len(calls), {"cpu": 3, "torch": 2}[backend]  # values, is all finite, what is sent
        assert collectives > least + 1 if overlap else collectives == least  # do the ranks agree, and some buckets
        for fails_at in range(1, collectives + 1):
            ddp, state = begun()
            counted.fails_at = fails_at
            with pytest.raises(RuntimeError, match="closed by peer"):
                ddp(given).backward()
            # What was added stays; nothing was delivered.
            for layer, each in enumerate(given):
                waits = state.residual(f"all.{layer}")
                assert torch.equal(waits, each) or not waits.any() and (overlap or backend == "cpu" and fails_at == 1)
            is_done = overlap and backend == "cpu" and fails_at == collectives  # what fails are the values of the next step
            assert state.state_dict()["step"] == overlap + is_done


@pytest.mark.parametrize("backend", BACKENDS)
@ranks.on(2)
def test_a_state_saved_in_the_middle_of_a_backward_pass_says_so(backend):
    """state_dict() between two buckets gives the step up, and says so when the next bucket comes."""
    model = models.Weights(*SHAPES)
    ddp, state = models.dropping(model, BUCKETS, drop_ratio=0.0, overlap=True, backend=backend)
    for step in (1, 2):
        models.backward(ddp, models.whole_numbers(SHAPES, step, dist.get_rank()))
    model.all[1].register_hook(lambda gradient: state.state_dict() and None)
    ddp.zero_grad()
    with pytest.raises(RuntimeError, match="given up between two buckets"):
        ddp(models.whole_numbers(SHAPES, 3, dist.get_rank())).backward()
    whole = models.whole_numbers(SHAPES, 3, dist.get_rank())
    for layer, each in enumerate(whole):
        waits = state.residual(f"all.{layer}")
        assert torch.equal(waits, each) or not waits.any()
    assert state.state_dict()["step"] == 2


@ranks.on(2)
def test_what_does_not_go_together_is_refused_by_name():
    _, _, state = test_state.weights({"drop_ratio": 0.8}, 2)
    _, _, ahead = test_state.weights({"drop_ratio": 0.8, "overlap": True}, 2)
    ranks.refused(
        (ValueError, "overlap=True needs every parameter in every step.*find_unused_parameters=True",
         lambda: models.dropping(models.small(), {"find_unused_parameters": True}, overlap=True)),
        (ValueError, "static_graph=True", lambda: models.dropping(models.small(), {"static_graph": True}, overlap=True)),
        (TypeError, "overlap=True needs the DDP object itself.*got Weights",
         lambda: lamina.torch.LayerDropping(overlap=True).bind(models.Weights(*SHAPES))),
        (ValueError, "overlap was False and is True", lambda: ahead.load_state_dict(state.state_dict())),
        (ValueError, "overlap was True and is False", lambda: state.load_state_dict(ahead.state_dict())),
        (RuntimeError, "overlap is False on rank 0 and True on rank 1",
         lambda: models.dropping(models.small(), overlap=dist.get_rank() == 1)))
