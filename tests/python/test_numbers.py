# SPDX-License-Identifier: MIT
"""NaN and infinity, loss scaling, half-width types."""

import pytest
import torch
import torch.distributed as dist

import models
import ranks

SHAPES = [(5000,), (300,), (64, 64)]


@pytest.mark.parametrize("policy, backend, bad, layer, overlap", [  # the first layer is in the last bucket
    ("propagate", "cpu", float("inf"), 1, False), ("skip", "torch", -float("inf"), 1, False),
    ("skip", "cpu", float("nan"), 2, True), ("propagate", "torch", float("nan"), 0, True)])
@ranks.on(2)
def test_a_batch_with_a_bad_gradient_is_skipped_by_all(policy, backend, bad, layer, overlap):
    """Of a batch with one bad number on one rank nothing is delivered, and nothing is left; with overlap what was finite stays in the
    residuals."""
    rank, ledger = dist.get_rank(), models.Ledger(SHAPES)
    ddp, state = models.dropping(models.Weights(*SHAPES), {"bucket_cap_mb": 0.01}, nonfinite=policy, backend=backend, overlap=overlap,
                                 drop_ratio=0.6)
    for step in range(1, 6):
        own = models.whole_numbers(SHAPES, step, rank)
        if step == 3 and rank == 1:
            own[layer].view(-1)[-1] = bad
        before = state.state_dict()["memory"]
        gradients = models.backward(ddp, own)
        assert state.last.skipped == (step == 3)
        if step != 3:
            ledger.add(own, gradients)
            continue
        for gradient in gradients:
            assert torch.isnan(gradient).all() if policy == "propagate" else not gradient.any()
        if overlap:
            ledger.add([each.masked_fill(~torch.isfinite(each), 0) for each in own], [])
        else:
            assert torch.equal(state.state_dict()["memory"], before)
    assert ledger.lost(state) == 0
    assert (state.step, state.totals.skipped) == (4, 1)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@ranks.on(2)
def test_whatever_the_default_type_is(backend):
    results = []
    for default in (torch.float32, torch.float64):
        torch.set_default_dtype(default)
        try:
            ddp, state = models.dropping(models.Weights(*SHAPES).float(), backend=backend, drop_ratio=0.6, momentum=0.5)
            gradients = [models.backward(ddp, models.whole_numbers(SHAPES, step, dist.get_rank())) for step in range(1, 5)]
            results.append((gradients, state.state_dict()["memory"]))
        finally:
            torch.set_default_dtype(torch.float32)
    for one, other in zip(*(each[0] for each in results)):
        assert all(torch.equal(*pair) for pair in zip(one, other))
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("backend", ["cpu", "torch"])
@ranks.on(2)
def test_bad_elements_can_be_left_out(backend, overlap):
    """They move neither velocity nor residual."""
    ddp, state = models.dropping(models.Weights(*SHAPES), nonfinite="leave_out", backend=backend, drop_ratio=0.5, momentum=0.5, overlap=overlap)
    # The first layer goes out in each step, and with overlap all do in the first; then the others wait.
    of_good, of_bad = ([0.0] * overlap + each for each in ([1.0, 2.5, 4.25], [1.0, 1.0, 2.5]))
    for step, (good, bad) in enumerate(zip(of_good, of_bad)):
        given = [torch.full(SHAPES[0], 10.0), torch.ones(SHAPES[1]), torch.ones(SHAPES[2])]
        if step == 1 + overlap and dist.get_rank() == 1:
            given[0][3] = float("nan")
            given[1][7] = float("inf")
        first, *_ = models.backward(ddp, given)
        residual = state.residual("all.1")
        assert (residual[8], residual[7]) == (good, bad if dist.get_rank() == 1 else good)
        assert (first[2], first[3]) == (10.0, 5.0 if step == 1 + overlap else 10.0)
    assert not state.last.skipped and state.last.left_out_elements == 2 * dist.get_rank()


@pytest.mark.parametrize("with_scaler, backend, overlap", [(True, "torch", False), (True, "cpu", True), (False, "cpu", False)])
@ranks.on(2)
def test_a_change_of_the_scale_does_not_change_what_waits(with_scaler, backend, overlap):
    rank, scaler = dist.get_rank(), models.Scaler()
    model, plain = models.Weights(*SHAPES), models.Weights(*SHAPES)
    ddp, _ = models.dropping(model, backend=backend, drop_ratio=0.8, overlap=overlap, scaler=scaler if with_scaler else None)
    other, _ = models.dropping(plain, backend=backend, drop_ratio=0.8, overlap=overlap)
    alike = True
    for step in range(1, 13):
        scaler.scale = 2.0 ** (step % 4)
        given = models.whole_numbers(SHAPES, step, rank)
        ours = models.backward(ddp, [each * scaler.scale for each in given])
        theirs = models.backward(other, given)
        alike &= all(torch.equal(one / scaler.scale, another) for one, another in zip(ours, theirs))
    assert alike == with_scaler


@pytest.mark.skipif(not hasattr(getattr(torch, "amp", None), "GradScaler"),
                    reason="GradScaler on the CPU came with PyTorch 2.3")
@ranks.on(2)
def test_a_grad_scaler_backs_off_on_all_ranks():
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
        assert ranks.agree(scaler.get_scale())
    assert scaler.get_scale() == 2048.0  # doubled in step 3, halved in step 5, doubled in step 8
    assert ranks.agree(models.bits(model))


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("dtypes", [[torch.float16] * 3, [torch.float32, torch.bfloat16, torch.float16]], ids=["float16", "mixed"])
@ranks.on(2, sends_bfloat16=lambda dtypes, **_: torch.bfloat16 in dtypes)
def test_half_width_gradients_lose_nothing(dtypes, backend):
    rank = dist.get_rank()
    model = models.Weights(*SHAPES)
    for parameter, dtype in zip(model.all, dtypes):
        parameter.data = parameter.data.to(dtype)
    ddp, state = models.dropping(model, backend=backend, drop_ratio=0.6)
    ledger = models.Ledger(SHAPES)
    for step in range(1, 13):
        given = [each.clamp(-100, 100) for each in models.whole_numbers(SHAPES, step, rank, most=4)]
        ddp.zero_grad()
        sum((parameter.float() * each).sum() for parameter, each in zip(ddp.module.all, given))  # the graph is DDP's
        ddp(given).backward()
        assert [parameter.grad.dtype for parameter in model.all] == dtypes
        ledger.add(given, [parameter.grad.float() for parameter in model.all])
    assert ledger.lost(state) == 0
    assert state.last.dense_bytes == sum(shape.numel() * dtype.itemsize if hasattr(dtype, "itemsize") else
                                         shape.numel() * torch.empty(0, dtype=dtype).element_size()
                                         for shape, dtype in zip(map(torch.Size, SHAPES), dtypes))


@ranks.on(2)
def test_what_is_beyond_float16_is_counted():
    model = models.Weights((100,), (100,)).half()
    ddp, state = models.dropping(model, backend="cpu", drop_ratio=0.0)
    given = [torch.full((100,), 60000.0).half(), torch.ones(100).half()]
    models.backward(ddp, given)
    assert state.last.left_out_elements == 0
    state.backend.add_all, add_all = lambda scale, agree: add_all(1.5 * scale, agree), state.backend.add_all
    models.backward(ddp, given)
    assert state.last.left_out_elements == 100 and model.all[0].grad[0] == 65504


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@ranks.on(2)
def test_a_sum_that_would_overflow_never_comes_in(backend):
    model = models.Weights((100,), (100,))
    ddp, state = models.dropping(model, backend=backend, drop_ratio=0.5)
    for _ in range(3):
        models.backward(ddp, [torch.full((100,), 2e38), torch.full((100,), 3e38)])
        assert torch.isfinite(state.residual("all.0")).all() and torch.isfinite(model.all[1].grad).all()


@pytest.mark.parametrize("backend, momentum, overlap", [("cpu", 0.5, False), ("torch", 0.5, False), ("cpu", 0.0, True), ("torch", 0.0, True)])
@ranks.on(2, sends_bfloat16=lambda **_: True)
def test_bfloat16_on_the_wire_loses_nothing_of_a_ranks_own(backend, momentum, overlap):
    rank = dist.get_rank()
    ddp, state = models.dropping(models.Weights(*SHAPES), backend=backend, drop_ratio=0.6, wire="bfloat16", momentum=momentum, overlap=overlap)
    generator = torch.Generator().manual_seed(rank)
    before = [torch.zeros(shape) for shape in SHAPES]
    velocity = [torch.zeros(shape) for shape in SHAPES]
    for step in range(1, 13):
        given = [torch.randn(shape, generator=generator) * 2.0 ** layer for layer, shape in enumerate(SHAPES)]
        gradients = models.backward(ddp, given)
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
