# SPDX-License-Identifier: MIT
"""NaN and infinity, loss scaling, half-width types; test_overlap.py has more of each, against lamina.Worker."""

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
    assert state.last.dense_bytes == sum(each.numel() * each.element_size() for each in model.all)


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
