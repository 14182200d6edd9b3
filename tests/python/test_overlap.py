# SPDX-License-Identifier: MIT
"""The hook with overlap=True: fragments chosen a step ahead, and allreduces that start in the backward pass."""

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import lamina
import models
import ranks

BACKENDS = ["cpu", "torch"]
SHAPES = [(64, 100), (100,), (9000,), (30, 7), (1,), (17, 3, 3)]
BUCKETS = {"bucket_cap_mb": 0.01}


class Workers:
    """All workers in one place by lamina.Worker. With overlap their steps begin with a selection made in the step before."""

    def __init__(self, world, overlap, wire="float32", **options):
        layout = lamina.Layout({f"all.{layer}": shape for layer, shape in enumerate(SHAPES)})
        self.overlap, self.wire, payload = overlap, getattr(torch, wire), "as_is" if wire == "float32" else wire
        self.workers = [lamina.Worker(layout, non_finite="skip", payload=payload, **options) for _ in range(world)]

    @staticmethod
    def agreed(those):
        return sum(torch.frombuffer(each.values(), dtype=torch.float64) for each in those) / len(those)

    def step(self, gradients):
        """gradients[w][l]; the mean of what is sent and zeros elsewhere, of each layer."""
        if self.overlap:
            agreed = self.agreed(self.workers)
            steps = [each.begin(each.plan(agreed) if each.steps else list(range(len(each.fragments)))) for each in self.workers]
            for step, own in zip(steps, gradients):
                step.add_all(own)
        else:
            steps = [worker.add(own) for worker, own in zip(self.workers, gradients)]
            agreed = self.agreed(steps)
            for step in steps:
                step.select(agreed)
        packed = [torch.empty(step.sent_elements, dtype=self.wire) for step in steps]
        for step, to in zip(steps, packed):
            step.pack(to)
            step.commit()
        means = [torch.zeros(shape) for shape in SHAPES]
        steps[0].unpack(sum(packed[1:], packed[0]).float() / len(steps), means)
        return means


RATIO, FRAGMENTS = {"drop_ratio": 0.8}, {"drop_ratio": 0.6, "fragment_elements": 4096}
MOMENTUM, BUDGET = {"drop_ratio": 0.8, "momentum": 0.5}, {"send_budget": 0.2, "at_least_every": 7, "momentum": 0.5}
LEAVES_OUT, SCALED, HALF = {"nonfinite": "leave_out"}, {"scaler": models.Scaler()}, {"wire": "bfloat16"}


@pytest.mark.parametrize("options, hook, backend, overlap, ddp_options", [
    ({"drop_ratio": 0.9}, {}, "cpu", True, BUCKETS), (FRAGMENTS, {}, "torch", True, BUCKETS), (FRAGMENTS, {}, "cpu", False, BUCKETS),
    (MOMENTUM, LEAVES_OUT, "torch", True, {}), (BUDGET, LEAVES_OUT, "cpu", True, {}), (MOMENTUM, LEAVES_OUT, "cpu", False, {}),
    (BUDGET, LEAVES_OUT, "torch", False, BUCKETS), ({**BUDGET, "momentum": 0}, {}, "cpu", False, BUCKETS), (RATIO, SCALED, "torch", False, {}), (RATIO, SCALED, "cpu", True, {}),
    (MOMENTUM, HALF, "cpu", False, {}), (MOMENTUM, HALF, "torch", False, {}), (RATIO, HALF, "cpu", True, {}), (RATIO, HALF, "torch", True, {}),
    *(({**FRAGMENTS, "momentum": 0.5, "value": value}, {}, "torch", False, {}) for value in ("l1_norm", "max_abs")),
    *(({**RATIO, "value": value}, {}, "torch", False, BUCKETS) for value in ("l2_norm", "root_mean_square"))])
@ranks.on(2, sends_bfloat16=lambda hook, **_: "wire" in hook)
def test_every_gradient_is_that_of_the_workers(options, hook, backend, overlap, ddp_options):
    """Also where an element is not finite and left out, the loss is scaled, or bfloat16 is sent; whatever PyTorch's default type is."""
    rank, world, scaler = dist.get_rank(), dist.get_world_size(), hook.get("scaler", models.Scaler())
    default = torch.float64 if overlap else torch.float32
    with models.default_type(default):
        ddp, state = models.dropping(models.Weights(*SHAPES).float(), ddp_options, backend=backend, overlap=overlap, **hook, **options)
    others, kept = Workers(world, overlap, hook.get("wire", "float32"), **options), 0
    unit = 1 + 2 ** -9 if "wire" in hook else 1  # of which bfloat16 rounds each multiple
    for step in range(1, 13):
        given = [[unit * each for each in models.whole_numbers(SHAPES, step, of)] for of in range(world)]
        if "nonfinite" in hook and step == 4:
            given[1][0][3, 5], given[1][2][7] = torch.nan, torch.inf
        if "scaler" in hook:
            scaler.scale = 2.0 ** (step % 4)
        with models.default_type(default):
            found = models.backward(ddp, [each * scaler.scale for each in given[rank]])
        assert all(torch.equal(one / scaler.scale, other) for one, other in zip(found, others.step(given)))
        assert state.last.step == step == state.step and not state.last.skipped
        if overlap and step == 1:
            assert state.last.sent_fragments == len(state.backend.fragments)  # nothing is known yet
        kept += state.last.sent_fragments
        for layer, name in enumerate(state.names):
            assert torch.equal(state.residual(name).flatten(), torch.frombuffer(others.workers[rank].residual(layer), dtype=torch.float32))
    assert 0 < kept < 12 * len(state.backend.fragments)
    assert state.last.left_out_elements == (2 if "nonfinite" in hook and rank == 1 else 0)
    assert state.last.sent_bytes < (0.6 if "wire" in hook else 1.1) * state.last.dense_bytes
    memory = state.state_dict()["memory"]
    with models.default_type(default):
        state.load_state_dict(state.state_dict())
        assert torch.equal(state.state_dict()["memory"], memory)


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
    if rank == 0:
        broken = mock.Mock(**{"wait.side_effect": RuntimeError("connection closed by peer")})
        with mock.patch.object(dist, "all_reduce", lambda *_, **__: broken), pytest.raises(RuntimeError, match="closed by peer"):
            models.backward(ddp, models.whole_numbers(SHAPES, 3, rank))
    assert state.step == 2
    fresh = models.Weights(*SHAPES)
    second, again = models.dropping(fresh, BUCKETS, **options)
    again.load_state_dict(state.state_dict())
    for step in range(4, 9):
        models.backward(second, models.whole_numbers(SHAPES, step, rank))
    assert again.step == 7 and not again.last.skipped and ranks.agree([parameter.grad for parameter in fresh.all])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("overlap", [False, True])
@ranks.on(2)
def test_when_a_collective_fails_a_layer_has_all_of_its_gradient_or_nothing(overlap, backend):
    given = models.whole_numbers(SHAPES, 4, dist.get_rank())

    def begun():
        """With overlap the first step has one bucket and sends everything."""
        all_reduce.side_effect = None
        ddp, state = models.dropping(models.Weights(*SHAPES), BUCKETS, drop_ratio=0.3, overlap=overlap, backend=backend)
        if overlap:
            models.backward(ddp, given)
        all_reduce.reset_mock()
        return ddp, state

    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        models.backward(begun()[0], given)
        collectives, least = all_reduce.call_count, {"cpu": 3, "torch": 2}[backend]  # values, is all finite, what is sent
        assert collectives > least + 1 if overlap else collectives == least  # do the ranks agree, and some buckets
        for fails_at in range(1, collectives + 1):
            ddp, state = begun()
            calls = [*[mock.DEFAULT] * (fails_at - 1), RuntimeError("connection closed by peer")]
            all_reduce.side_effect = itertools.chain(calls, itertools.repeat(mock.DEFAULT))
            with pytest.raises(RuntimeError, match="closed by peer"):
                models.backward(ddp, given)
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
    given = models.whole_numbers(SHAPES, 3, dist.get_rank())
    with pytest.raises(RuntimeError, match="given up between two buckets"):
        models.backward(ddp, given)
    for layer, each in enumerate(given):
        waits = state.residual(f"all.{layer}")
        assert torch.equal(waits, each) or not waits.any()
    assert state.state_dict()["step"] == 2
