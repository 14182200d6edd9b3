# SPDX-License-Identifier: MIT
"""NaN and infinity, loss scaling, half-width types."""

import pytest
import torch
import torch.distributed as dist

import lamina.torch
import models
import ranks

SHAPES = [(5000,), (300,), (64, 64)]


def backward(ddp, model, given):
    ddp.zero_grad()
    ddp(given).backward()
    return [parameter.grad.clone() for parameter in model.all]


def nonfinite(policy, backend, bad):
    rank = dist.get_rank()
    model, twin = models.Weights(*SHAPES), models.Weights(*SHAPES)
    ddp, state = models.dropping(model, nonfinite=policy, backend=backend, drop_ratio=0.6)
    other, _ = models.dropping(twin, backend=backend, drop_ratio=0.6)
    for step in (1, 2):
        for each, of in ((ddp, model), (other, twin)):
            backward(each, of, models.whole_numbers(SHAPES, step, rank))
    before = state.state_dict()["memory"]
    given = models.whole_numbers(SHAPES, 3, rank)
    if rank == 1:
        given[1][7] = bad
    gradients = backward(ddp, model, given)
    assert state.last.skipped and state.step == 2 and state.totals.skipped == 1
    assert torch.equal(state.state_dict()["memory"], before)
    for gradient in gradients:
        assert torch.isnan(gradient).all() if policy == "propagate" else not gradient.any()
    # The next step goes on as if the batch had not been.
    given = models.whole_numbers(SHAPES, 4, rank)
    assert all(torch.equal(*pair) for pair in zip(backward(ddp, model, given), backward(other, twin, given)))
    assert not state.last.skipped and state.step == 3


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("policy, bad", [("propagate", float("inf")), ("skip", float("nan")), ("skip", -float("inf"))])
def test_a_batch_with_a_bad_gradient_is_skipped_by_all(policy, bad, backend):
    ranks.run(2, nonfinite, policy, backend, bad)


def in_another_default_type(backend):
    results = []
    for default in (torch.float32, torch.float64):
        torch.set_default_dtype(default)
        try:
            model = models.Weights(*SHAPES).float()
            ddp, state = models.dropping(model, backend=backend, drop_ratio=0.6, momentum=0.5)
            gradients = [backward(ddp, model, models.whole_numbers(SHAPES, step, dist.get_rank())) for step in range(1, 5)]
            results.append((gradients, state.state_dict()["memory"]))
        finally:
            torch.set_default_dtype(torch.float32)
    for one, other in zip(*(each[0] for each in results)):
        assert all(torch.equal(*pair) for pair in zip(one, other))
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_whatever_the_default_type_is(backend):
    ranks.run(2, in_another_default_type, backend)


def left_out(backend):
    model = models.Weights(*SHAPES)
    ddp, state = models.dropping(model, nonfinite="leave_out", backend=backend, drop_ratio=0.0)
    given = [torch.ones(shape) for shape in SHAPES]
    if dist.get_rank() == 1:
        given[1][7], given[2][0, 0] = float("nan"), float("inf")
    gradients = backward(ddp, model, given)
    assert not state.last.skipped and state.last.left_out_elements == 2 * dist.get_rank()
    assert gradients[1][7] == 0.5 and gradients[2][0, 0] == 0.5 and gradients[1][8] == 1


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_bad_elements_can_be_left_out(backend):
    ranks.run(2, left_out, backend)


def left_out_of_velocity(backend):
    model = models.Weights(*SHAPES)
    ddp, state = models.dropping(model, nonfinite="leave_out", backend=backend, drop_ratio=0.5, momentum=0.5)
    # The first layer goes out in each step, the others wait.
    of_good, of_bad = [1.0, 2.5, 4.25], [1.0, 1.0, 2.5]
    for step, (good, bad) in enumerate(zip(of_good, of_bad)):
        given = [torch.full(SHAPES[0], 10.0), torch.ones(SHAPES[1]), torch.ones(SHAPES[2])]
        if step == 1:
            given[1][7] = float("inf")
        backward(ddp, model, given)
        residual = state.residual("all.1")
        assert (residual[8], residual[7]) == (good, bad)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_an_element_left_out_moves_neither_velocity_nor_residual(backend):
    ranks.run(1, left_out_of_velocity, backend)


class Scaler:
    """A GradScaler whose scale is what the test says."""

    def __init__(self):
        self.scale = 1.0

    def is_enabled(self):
        return True

    def get_scale(self):
        return self.scale


def scaled(with_scaler, backend):
    rank, scaler = dist.get_rank(), Scaler()
    model, plain = models.Weights(*SHAPES), models.Weights(*SHAPES)
    ddp, _ = models.dropping(model, backend=backend, drop_ratio=0.8, scaler=scaler if with_scaler else None)
    other, _ = models.dropping(plain, backend=backend, drop_ratio=0.8)
    alike = True
    for step in range(1, 13):
        scaler.scale = 2.0 ** (step % 4)
        given = models.whole_numbers(SHAPES, step, rank)
        ours = backward(ddp, model, [each * scaler.scale for each in given])
        theirs = backward(other, plain, given)
        alike &= all(torch.equal(one / scaler.scale, another) for one, another in zip(ours, theirs))
    assert alike == with_scaler


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("with_scaler", [True, False])
def test_a_change_of_the_scale_does_not_change_what_waits(with_scaler, backend):
    ranks.run(2, scaled, with_scaler, backend)


def grad_scaler():
    rank = dist.get_rank()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    model = models.small()
    ddp, state = models.dropping(model, drop_ratio=0.8, scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(1, 9):
        images, labels = models.batch(step, rank)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(ddp(images), labels)
        if step == 5 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        assert state.last.skipped == (step == 5)
        scaler.step(optimizer)
        scaler.update()
        assert len(set(ranks.gathered(scaler.get_scale()))) == 1
    assert scaler.get_scale() == 2048.0  # doubled in step 3, halved in step 5, doubled in step 8
    assert len(set(ranks.gathered(models.bits(model)))) == 1


@pytest.mark.skipif(not hasattr(getattr(torch, "amp", None), "GradScaler"),
                    reason="GradScaler on the CPU came with PyTorch 2.3")
def test_a_grad_scaler_backs_off_on_all_ranks():
    ranks.run(2, grad_scaler)


def disabled_scaler():
    scaler = torch.cuda.amp.GradScaler(enabled=False)
    model, plain = models.small(), models.small()
    models.train(models.dropping(model, drop_ratio=0.8, scaler=scaler)[0], 4)
    models.train(models.dropping(plain, drop_ratio=0.8)[0], 4)
    assert models.bits(model) == models.bits(plain)


@pytest.mark.filterwarnings("ignore")
def test_a_disabled_scaler_is_none():
    ranks.run(2, disabled_scaler)


def types(dtypes, backend):
    rank = dist.get_rank()
    model = models.Weights(*SHAPES)
    for parameter, dtype in zip(model.all, dtypes):
        parameter.data = parameter.data.to(dtype)
    ddp, state = models.dropping(model, backend=backend, drop_ratio=0.6)
    returned, given_all = [torch.zeros(shape) for shape in SHAPES], [torch.zeros(shape) for shape in SHAPES]
    for step in range(1, 13):
        given = [each.clamp(-100, 100) for each in models.whole_numbers(SHAPES, step, rank, most=4)]
        ddp.zero_grad()
        sum((parameter.float() * each).sum() for parameter, each in zip(ddp.module.all, given))  # the graph is DDP's
        ddp(given).backward()
        for layer, (parameter, each) in enumerate(zip(model.all, given)):
            assert parameter.grad.dtype == dtypes[layer]
            returned[layer] += parameter.grad.float()
            given_all[layer] += each
    for layer in range(len(SHAPES)):
        waits = sum(ranks.gathered(state.residual(f"all.{layer}"))) / 2
        mean = sum(ranks.gathered(given_all[layer])) / 2
        assert torch.equal(returned[layer] + waits, mean)
    assert state.last.dense_bytes == sum(shape.numel() * dtype.itemsize if hasattr(dtype, "itemsize") else
                                         shape.numel() * torch.empty(0, dtype=dtype).element_size()
                                         for shape, dtype in zip(map(torch.Size, SHAPES), dtypes))


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("dtypes", [[torch.float16] * 3, [torch.bfloat16] * 3, [torch.float32, torch.bfloat16, torch.float32]],
                         ids=["float16", "bfloat16", "mixed"])
def test_half_width_gradients_lose_nothing(dtypes, backend):
    if torch.bfloat16 in dtypes:
        ranks.needs_bfloat16()
    ranks.run(2, types, dtypes, backend)


def beyond(backend):
    model = models.Weights((100,), (100,)).half()
    ddp, state = models.dropping(model, backend=backend, drop_ratio=0.0)
    ddp.zero_grad()
    ddp([torch.full((100,), 60000.0).half(), torch.ones(100).half()]).backward()
    assert state.last.left_out_elements == 0
    state.backend.add_all, add_all = lambda scale: (state.backend.add_more(scale / 2), state.backend.add_more(scale)), state.backend.add_all
    ddp.zero_grad()
    ddp([torch.full((100,), 60000.0).half(), torch.ones(100).half()]).backward()
    assert state.last.left_out_elements == 100 and model.all[0].grad[0] == 65504


def test_what_is_beyond_float16_is_counted():
    ranks.run(2, beyond, "cpu")


def overflow(backend):
    model = models.Weights((100,), (100,))
    ddp, state = models.dropping(model, backend=backend, drop_ratio=0.5)
    for _ in range(3):
        ddp.zero_grad()
        ddp([torch.full((100,), 2e38), torch.full((100,), 3e38)]).backward()
        assert torch.isfinite(state.residual("all.0")).all() and torch.isfinite(model.all[1].grad).all()


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_a_sum_that_would_overflow_never_comes_in(backend):
    ranks.run(2, overflow, backend)


def on_the_wire(backend, momentum):
    rank = dist.get_rank()
    model = models.Weights(*SHAPES)
    ddp, state = models.dropping(model, backend=backend, drop_ratio=0.6, wire="bfloat16", momentum=momentum)
    generator = torch.Generator().manual_seed(rank)
    before = [torch.zeros(shape) for shape in SHAPES]
    velocity = [torch.zeros(shape) for shape in SHAPES]
    for step in range(1, 13):
        given = [torch.randn(shape, generator=generator) * 2.0 ** layer for layer, shape in enumerate(SHAPES)]
        gradients = backward(ddp, model, given)
        for layer, each in enumerate(given):
            velocity[layer] = momentum * velocity[layer] + each if momentum else each
            before[layer] = before[layer] + velocity[layer]
            after = state.residual(f"all.{layer}")
            is_sent = f"all.{layer}" not in state.held_parameters()
            rounded = before[layer].bfloat16() if is_sent else torch.zeros(SHAPES[layer]).bfloat16()
            # What rounding took away waits here, and the mean is of what went out, as bfloat16 adds it.
            torch.testing.assert_close(after, before[layer] - rounded.float(), rtol=0, atol=0)
            expected = sum(each.float() for each in ranks.gathered(rounded)).bfloat16().float() / 2
            torch.testing.assert_close(gradients[layer], expected, rtol=0, atol=0)
            before[layer] = after
            if is_sent:
                velocity[layer] = torch.zeros(SHAPES[layer])
    assert state.last.sent_bytes < 0.3 * state.last.dense_bytes


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_bfloat16_on_the_wire_loses_nothing_of_a_ranks_own(backend, momentum):
    ranks.needs_bfloat16()
    ranks.run(2, on_the_wire, backend, momentum)
