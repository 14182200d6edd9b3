# SPDX-License-Identifier: MIT
"""The hook with overlap=True: fragments chosen a step ahead, and allreduces that start in the backward pass."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import lamina
import lamina.torch
from lamina.torch._cpu import CpuBackend
from lamina.torch._device import TorchBackend
import models
import ranks
import test_hook
import test_state

BACKENDS = ["cpu", "torch"]
SHAPES = [(64, 100), (100,), (9000,), (30, 7), (1,), (17, 3, 3)]
BUCKETS = {"bucket_cap_mb": 0.01}


def backward(ddp, model, given):
    ddp.zero_grad()
    ddp(given).backward()
    return [parameter.grad.clone() for parameter in model.all]


class Workers:
    """All workers in one place by lamina.Worker, whose steps begin with a selection made in the step before."""

    def __init__(self, world, **options):
        layout = lamina.Layout({f"all.{layer}": shape for layer, shape in enumerate(SHAPES)})
        self.workers = [lamina.Worker(layout, non_finite="skip", **options) for _ in range(world)]

    def step(self, gradients):
        """gradients[w][l]; the mean of what is sent and zeros elsewhere, of each layer."""
        world = len(self.workers)
        agreed = sum(torch.frombuffer(worker.values(), dtype=torch.float64) for worker in self.workers) / world
        total, steps = None, []
        for worker, own in zip(self.workers, gradients):
            step = worker.begin(worker.plan(agreed) if worker.steps else list(range(len(worker.fragments))))
            steps.append(step)
            step.add_all([each.flatten() for each in own])
            packed = torch.empty(step.sent_elements)
            step.pack(packed, 1 / world)
            total = packed if total is None else total + packed
        for step in steps:
            step.commit()
        means = [torch.zeros(shape).flatten() for shape in SHAPES]
        steps[0].unpack(total, means)
        return means


def against_workers(options, backend):
    rank, world = dist.get_rank(), dist.get_world_size()
    model = models.Weights(*SHAPES)
    ddp, state = models.dropping(model, BUCKETS, backend=backend, overlap=True, **options)
    others = Workers(world, **options)
    kept = 0
    for step in range(1, 31):
        given = [models.whole_numbers(SHAPES, step, each) for each in range(world)]
        gradients = backward(ddp, model, given[rank])
        for one, other in zip(gradients, others.step(given)):
            assert torch.equal(one.flatten(), other)
        assert state.last.step == step == state.step
        if step == 1:
            assert state.last.sent_fragments == len(state.backend.fragments)  # nothing is known yet
        kept += state.last.sent_fragments
        assert torch.equal(state.residual("all.2"), torch.frombuffer(others.workers[rank].residual(2), dtype=torch.float32))
    assert 0 < kept < 30 * len(state.backend.fragments)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{"drop_ratio": 0.9}, {"drop_ratio": 0.6, "fragment_elements": 4096},
                                     {"drop_ratio": 0.8, "momentum": 0.5}, {"send_budget": 0.2, "at_least_every": 7}],
                         ids=["whole", "fragments", "momentum", "budget"])
def test_every_gradient_is_that_of_workers_that_wait_for_the_end(options, backend):
    ranks.run(2, against_workers, options, backend)


def not_at_end():
    given = [[models.whole_numbers(SHAPES, step, rank) for rank in range(2)] for step in range(1, 31)]
    model = models.Weights(*SHAPES)
    ddp, _ = models.dropping(model, BUCKETS, drop_ratio=0.9)
    others = Workers(2, drop_ratio=0.9)
    alike = [all(torch.equal(one.flatten(), other) for one, other in zip(backward(ddp, model, own[dist.get_rank()]),
                                                                        others.step(own))) for own in given]
    assert not all(alike)


def test_the_choice_at_the_end_is_another():
    ranks.run(2, not_at_end)


def dense(ddp_options):
    plain, dropped = models.small(), models.small()
    ours, _ = models.dropping(dropped, ddp_options, drop_ratio=0.0, overlap=True)
    theirs = DDP(plain, **ddp_options)
    theirs.register_comm_hook(None, allreduce_hook)
    models.train(ours, 8)
    models.train(theirs, 8)
    assert models.bits(dropped) == models.bits(plain)


@pytest.mark.parametrize("options", ["plain", "bucket view", "small buckets"])
def test_ratio_zero_is_ddp_bit_for_bit(options):
    ranks.run(2, dense, test_hook.DENSE[options])


def started_when(overlap):
    """The first allreduce of gradients starts while gradients of other buckets are still to come, or not."""
    model = models.Weights(*SHAPES)
    ddp, state = models.dropping(model, BUCKETS, drop_ratio=0.0, overlap=overlap)
    backward(ddp, model, models.whole_numbers(SHAPES, 1, dist.get_rank()))
    events, all_reduce, take = [], dist.all_reduce, state.take

    def told(bucket):
        events.append("last bucket" if bucket.is_last() else "bucket")
        return take(bucket)

    def noted(tensor, *arguments, **options):
        if tensor.dtype == torch.float32:
            events.append("gradients, " + ("async" if options.get("async_op") else "waited for"))
        return all_reduce(tensor, *arguments, **options)

    state.take, dist.all_reduce = told, noted
    try:
        backward(ddp, model, models.whole_numbers(SHAPES, 2, dist.get_rank()))
    finally:
        dist.all_reduce = all_reduce
    assert "bucket" in events  # besides the last one
    first = next(index for index, event in enumerate(events) if event.startswith("gradients"))
    assert (first < events.index("last bucket")) == overlap
    assert events[first] == "gradients, " + ("async" if overlap else "waited for")


@pytest.mark.parametrize("overlap", [True, False])
def test_allreduces_start_before_the_last_bucket_is_there(overlap):
    ranks.run(2, started_when, overlap)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("options", [{"drop_ratio": 0.9, "fragment_elements": 4096},
                                     {"send_budget": 0.1, "at_least_every": 20, "fragment_elements": 4096, "momentum": 0.5}],
                         ids=["ratio", "budget"])
def test_replicas_stay_identical_and_learn(world, options):
    ranks.run(world, test_hook.replicas, {**options, "overlap": True})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{"drop_ratio": 0.8}, {"send_budget": 0.3}], ids=["ratio", "budget"])
def test_what_is_returned_and_what_waits_is_what_was_given(options, backend):
    ranks.run(2, conserved, options, backend)


def conserved(options, backend):
    model = models.Weights(*SHAPES)
    ddp, state = models.dropping(model, BUCKETS, overlap=True, backend=backend, **options)
    returned, given = [torch.zeros(shape) for shape in SHAPES], [torch.zeros(shape) for shape in SHAPES]
    for step in range(1, 25):
        own = models.whole_numbers(SHAPES, step, dist.get_rank())
        for layer, gradient in enumerate(backward(ddp, model, own)):
            given[layer] += own[layer]
            returned[layer] += gradient
    waited = 0
    for layer in range(len(SHAPES)):
        waits = sum(ranks.gathered(state.residual(f"all.{layer}"))) / 2
        waited += waits.abs().sum().item()
        assert torch.equal(returned[layer] + waits, sum(ranks.gathered(given[layer])) / 2)
    assert waited > 0


def bad_batch(policy, backend, bad, layer):
    """Of a batch with one bad number on one rank nothing is delivered, and what was finite stays in the residuals."""
    rank = dist.get_rank()
    model = models.Weights(*SHAPES)
    ddp, state = models.dropping(model, BUCKETS, nonfinite=policy, backend=backend, overlap=True, drop_ratio=0.6)
    given, returned = [torch.zeros(shape) for shape in SHAPES], [torch.zeros(shape) for shape in SHAPES]
    for step in range(1, 6):
        own = models.whole_numbers(SHAPES, step, rank)
        is_bad = torch.zeros(())
        if step == 3 and rank == 1:
            own[layer].view(-1)[-1] = bad
        gradients = backward(ddp, model, own)
        if step == 3:
            for gradient in gradients:
                assert torch.isnan(gradient).all() if policy == "propagate" else not gradient.any()
            assert state.last.skipped and state.totals.skipped == 1
        for to, each in zip(given, own):
            to += torch.where(torch.isfinite(each), each, is_bad)
        if step != 3:
            assert not state.last.skipped
            for to, each in zip(returned, gradients):
                to += each
    for number in range(len(SHAPES)):
        waits = sum(ranks.gathered(state.residual(f"all.{number}"))) / 2
        assert torch.equal(returned[number] + waits, sum(ranks.gathered(given[number])) / 2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layer", [0, 5], ids=["last bucket", "first bucket"])
@pytest.mark.parametrize("policy, bad", [("propagate", float("inf")), ("skip", float("nan"))])
def test_a_batch_with_a_bad_gradient_is_skipped_by_all(policy, bad, layer, backend):
    ranks.run(2, bad_batch, policy, backend, bad, layer)


def left_out(backend):
    model = models.Weights((5000,), (300,), (64, 64))
    ddp, state = models.dropping(model, nonfinite="leave_out", backend=backend, drop_ratio=0.0, overlap=True)
    given = [torch.ones(shape) for shape in ((5000,), (300,), (64, 64))]
    if dist.get_rank() == 1:
        given[1][7], given[2][0, 0] = float("nan"), float("inf")
    gradients = backward(ddp, model, given)
    assert not state.last.skipped and state.last.left_out_elements == 2 * dist.get_rank()
    assert gradients[1][7] == 0.5 and gradients[2][0, 0] == 0.5 and gradients[1][8] == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_elements_can_be_left_out(backend):
    ranks.run(2, left_out, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{"drop_ratio": 0.9}, {"drop_ratio": 0.9, "momentum": 0.9, "fragment_elements": 4096},
                                     {"send_budget": 0.2, "at_least_every": 9, "warm_up_steps": 20}],
                         ids=["ratio", "momentum", "budget"])
def test_a_resumed_run_is_the_same_bit_for_bit(options, backend):
    ranks.run(2, test_state.resumed, {**options, "overlap": True}, torch.float32, backend, "load")


def test_a_resumed_run_in_other_ways():
    ranks.run(2, test_state.resumed, {"drop_ratio": 0.9, "overlap": True}, torch.float32, "cpu", "pickle")
    ranks.run(2, test_state.resumed, {"drop_ratio": 0.9, "overlap": True}, torch.float32, "cpu", "empty")


def across_backends():
    for one, other in (BACKENDS, BACKENDS[::-1]):
        _, _, state = test_state.weights({"drop_ratio": 0.8, "momentum": 0.5, "overlap": True}, 5, one)
        _, _, again = test_state.weights({"drop_ratio": 0.8, "momentum": 0.5, "overlap": True}, 0, other)
        again.load_state_dict(state.state_dict())
        assert torch.equal(again.state_dict()["memory"], state.state_dict()["memory"])


def test_a_state_goes_from_one_backend_to_the_other():
    ranks.run(2, across_backends)


def on_the_wire(backend):
    """bfloat16: what rounding took away waits."""
    model = models.Weights(*SHAPES)
    ddp, state = models.dropping(model, BUCKETS, backend=backend, drop_ratio=0.6, wire="bfloat16", overlap=True)
    generator = torch.Generator().manual_seed(dist.get_rank())
    before = [torch.zeros(shape) for shape in SHAPES]
    for _ in range(12):
        given = [torch.randn(shape, generator=generator) * 2.0 ** layer for layer, shape in enumerate(SHAPES)]
        gradients = backward(ddp, model, given)
        for layer, each in enumerate(given):
            before[layer] = before[layer] + each
            is_sent = f"all.{layer}" not in state.held_parameters()
            rounded = before[layer].bfloat16() if is_sent else torch.zeros(SHAPES[layer]).bfloat16()
            before[layer] = before[layer] - rounded.float()
            assert torch.equal(state.residual(f"all.{layer}"), before[layer])
            assert torch.equal(gradients[layer], sum(each.float() for each in ranks.gathered(rounded)).bfloat16().float() / 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_on_the_wire_loses_nothing_of_a_ranks_own(backend):
    ranks.needs_bfloat16()
    ranks.run(2, on_the_wire, backend)


def scaled():
    class Scaler:
        scale = 1.0

        def is_enabled(self):
            return True

        def get_scale(self):
            return self.scale

    scaler, rank = Scaler(), dist.get_rank()
    model, plain = models.Weights(*SHAPES), models.Weights(*SHAPES)
    ddp, _ = models.dropping(model, BUCKETS, drop_ratio=0.8, overlap=True, scaler=scaler)
    other, _ = models.dropping(plain, BUCKETS, drop_ratio=0.8, overlap=True)
    for step in range(1, 13):
        scaler.scale = 2.0 ** (step % 4)
        given = models.whole_numbers(SHAPES, step, rank)
        ours = backward(ddp, model, [each * scaler.scale for each in given])
        theirs = backward(other, plain, given)
        assert all(torch.equal(one / scaler.scale, another) for one, another in zip(ours, theirs))


def test_a_change_of_the_scale_does_not_change_what_waits():
    ranks.run(2, scaled)


def interrupted(backend):
    """A backward pass that ends between two buckets, on all ranks: nothing of it is delivered, what was added stays, and the next goes on."""
    rank = dist.get_rank()
    model = models.Weights(*SHAPES)
    ddp, state = models.dropping(model, BUCKETS, backend=backend, drop_ratio=0.0, overlap=True)
    for step in (1, 2):
        backward(ddp, model, models.whole_numbers(SHAPES, step, rank))
    state._finish_overlapped = failing
    third = models.whole_numbers(SHAPES, 3, rank)
    with pytest.raises(RuntimeError, match="somebody pressed a key"):
        backward(ddp, model, third)
    # DDP's reducer wants a new DDP after an exception in a hook.
    fresh = models.Weights(*SHAPES)
    second, again = models.dropping(fresh, BUCKETS, backend=backend, drop_ratio=0.0, overlap=True)
    again.load_state_dict(state.state_dict())
    given = models.whole_numbers(SHAPES, 4, rank)
    sums = [one + other for one, other in zip(third, given)]
    expected = [sum(ranks.gathered(each)) / 2 for each in sums]
    assert all(torch.equal(*pair) for pair in zip(backward(second, fresh, given), expected))


def failing(buckets):
    raise RuntimeError("somebody pressed a key")


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_interrupted_backward_loses_nothing(backend):
    ranks.run(2, interrupted, backend)


def one_begins(backend):
    """The forward pass of rank 1 fails, when rank 0 is in its backward pass already: their states load together, and what rank 0 has
    added comes later."""
    rank, options = dist.get_rank(), {"backend": backend, "send_budget": 0.3, "at_least_every": 5, "overlap": True}
    model = models.Weights(*SHAPES)
    ddp, state = models.dropping(model, BUCKETS, **options)
    for step in (1, 2):
        backward(ddp, model, models.whole_numbers(SHAPES, step, rank))
    ddp.zero_grad()
    if rank == 0:
        class Broken:
            def wait(self):
                raise RuntimeError("connection closed by peer")

        all_reduce, dist.all_reduce = dist.all_reduce, lambda *arguments, **options: Broken()
        try:
            with pytest.raises(RuntimeError, match="closed by peer"):
                ddp(models.whole_numbers(SHAPES, 3, rank)).backward()
        finally:
            dist.all_reduce = all_reduce
    assert state.step == 2
    fresh = models.Weights(*SHAPES)
    second, again = models.dropping(fresh, BUCKETS, **options)
    again.load_state_dict(state.state_dict())
    for step in range(4, 9):
        backward(second, fresh, models.whole_numbers(SHAPES, step, rank))
    assert again.step == 7 and not again.last.skipped
    others = ranks.gathered(torch.cat([parameter.grad.flatten() for parameter in fresh.all]))
    assert torch.equal(*others)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_fails_before_its_first_bucket_is_not_a_step_behind(backend):
    ranks.run(2, one_begins, backend)


def a_rank_dies():
    given = models.whole_numbers(SHAPES, 4, dist.get_rank())
    calls, all_reduce = [], dist.all_reduce

    def counted(*arguments, **options):
        calls.append(1)
        if len(calls) == counted.fails_at:
            raise RuntimeError("connection closed by peer")
        return all_reduce(*arguments, **options)

    def after_a_step():
        """The first step has one bucket and sends everything."""
        counted.fails_at = 0
        model = models.Weights(*SHAPES)
        ddp, state = models.dropping(model, BUCKETS, drop_ratio=0.3, overlap=True)
        backward(ddp, model, given)
        ddp.zero_grad()
        calls.clear()
        return ddp, state

    dist.all_reduce = counted
    try:
        ddp, _ = after_a_step()
        ddp(given).backward()
        collectives = len(calls)
        assert collectives > 4  # do the ranks agree, some buckets, is all finite, values
        for fails_at in range(1, collectives + 1):
            ddp, state = after_a_step()
            counted.fails_at = fails_at
            with pytest.raises(RuntimeError, match="closed by peer"):
                ddp(given).backward()
            # What was added stays; nothing was delivered.
            for layer, each in enumerate(given):
                waits = state.residual(f"all.{layer}")
                assert torch.equal(waits, each) or not waits.any()
            state.state_dict()
    finally:
        dist.all_reduce = all_reduce


def test_when_a_collective_fails_a_layer_has_all_of_its_gradient_or_nothing():
    ranks.run(2, a_rank_dies)


def saved_midway():
    """state_dict() between two buckets gives the step up, and says so when the next bucket comes."""
    model = models.Weights(*SHAPES)
    ddp, state = models.dropping(model, BUCKETS, drop_ratio=0.0, overlap=True)
    for step in (1, 2):
        backward(ddp, model, models.whole_numbers(SHAPES, step, dist.get_rank()))
    model.all[1].register_hook(lambda gradient: state.state_dict() and None)
    ddp.zero_grad()
    with pytest.raises(RuntimeError, match="given up between two buckets"):
        ddp(models.whole_numbers(SHAPES, 3, dist.get_rank())).backward()
    whole = models.whole_numbers(SHAPES, 3, dist.get_rank())
    for layer, each in enumerate(whole):
        waits = state.residual(f"all.{layer}")
        assert torch.equal(waits, each) or not waits.any()


def test_a_state_saved_in_the_middle_of_a_backward_pass_says_so():
    ranks.run(2, saved_midway)


def loaded_alone():
    options = {"drop_ratio": 0.8, "warm_up_steps": 20, "overlap": True}
    _, _, state = test_state.weights(options, 4)
    _, ddp, again = test_state.weights(options, 0)
    if dist.get_rank() == 0:
        again.load_state_dict(state.state_dict())
    gradients, all_reduce = [], dist.all_reduce

    def noted(tensor, *arguments, **more):
        gradients.extend([1] if tensor.dtype == torch.float32 else [])
        return all_reduce(tensor, *arguments, **more)

    dist.all_reduce = noted
    try:
        with pytest.raises(RuntimeError, match="step is 5 on rank 0 and 1 on rank 1; was a state loaded, or did a step fail, on one of them alone"):
            ddp(models.whole_numbers(test_state.SHAPES, 5, dist.get_rank())).backward()
    finally:
        dist.all_reduce = all_reduce
    assert not gradients  # of different sizes, in which a process group hangs or aborts


def test_a_state_that_one_rank_alone_has_loaded_is_noticed_before_gradients_are_summed():
    ranks.run(2, loaded_alone)


def refused():
    with pytest.raises(ValueError, match="overlap=True needs every parameter in every step.*find_unused_parameters=True"):
        models.dropping(models.small(), {"find_unused_parameters": True}, overlap=True)
    with pytest.raises(ValueError, match="static_graph=True"):
        models.dropping(models.small(), {"static_graph": True}, overlap=True)
    with pytest.raises(TypeError, match="overlap=True needs the DDP object itself.*got Weights"):
        lamina.torch.LayerDropping(overlap=True).bind(models.Weights(*SHAPES))
    _, _, state = test_state.weights({"drop_ratio": 0.8}, 2)
    _, _, ahead = test_state.weights({"drop_ratio": 0.8, "overlap": True}, 2)
    with pytest.raises(ValueError, match="overlap was False and is True"):
        ahead.load_state_dict(state.state_dict())
    with pytest.raises(ValueError, match="overlap was True and is False"):
        state.load_state_dict(ahead.state_dict())
    with pytest.raises(RuntimeError, match="overlap is False on rank 0 and True on rank 1"):
        models.dropping(models.small(), overlap=dist.get_rank() == 1)


def test_what_does_not_go_together_is_refused_by_name():
    ranks.run(2, refused)


def in_other_ways():
    """Gradients of several passes, two models in one backward, batches that end early."""
    results = []
    for overlap in (True, False):
        model = models.small()
        ddp, _ = models.dropping(model, drop_ratio=0.0, overlap=overlap)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.05)
        for step in range(6):
            optimizer.zero_grad()
            for micro in range(3):
                images, labels = models.batch(10 * step + micro, dist.get_rank())
                if micro < 2:
                    with ddp.no_sync():
                        nn.functional.cross_entropy(ddp(images), labels).backward()
                else:
                    nn.functional.cross_entropy(ddp(images), labels).backward()
            optimizer.step()
        results.append(models.bits(model))
    assert results[0] == results[1]
    test_hook.joined(overlap=True)


def test_passes_without_synchronisation_and_batches_that_end_early():
    ranks.run(2, in_other_ways)


@pytest.mark.parametrize("kind", [CpuBackend, TorchBackend])
def test_what_is_sent_lacks_what_is_left_out(kind):
    """It moves neither velocity nor residual."""
    backend = kind(lamina.Layout({"a": (4,), "b": (6,)}), lamina.Options(drop_ratio=0.5, momentum=0.5), "float32",
                   torch.device("cpu"))
    # All in the first step, then the second layer, then the first.
    for step, sent in ((1, None), (2, [1]), (3, [0])):
        buffer = torch.full((10,), float(step))
        if step == 3:
            buffer[1] = float("inf")
        backend.take([buffer], [(0, 0), (0, 4)])
        assert backend.begin(sent) == [[0, 1], [1], [0]][step - 1]
        packed = {}
        for layer, (begin, end) in enumerate(((0, 4), (4, 10))):
            backend.add([layer], buffer[begin:end], 1.0)
            if sent is None or layer in sent:
                packed[layer] = backend.pack_layers([layer], 1.0)
                assert torch.equal(packed[layer], backend.residual(layer))
        if step == 3:
            assert packed[0].tolist() == [2.0 + 4.0, 2.0, 6.0, 6.0]
        backend.commit()
        backend.release()
        backend.plan(torch.zeros(2, dtype=torch.float64))
