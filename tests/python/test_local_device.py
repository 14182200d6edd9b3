# SPDX-License-Identifier: MIT
"""LocalUpdates by torch's operators: bitwise the C++ backend where both run, and on a pretended device without a wait."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

import lamina.torch
import pretended
import ranks
from lamina.torch import LocalUpdates
from test_device import resnet50

SHAPES = [(70, 100), (3,), (33, 4), (0, 2), (9000,)]
PAYLOADS = ["as_is", "float16", "bfloat16", "int8", "int4", "ternary"]


def wrapped(backend, made=lambda tensor: tensor, shapes=SHAPES, seed=0, optimizer=torch.optim.SGD, lr=0.5, **options):
    generator = torch.Generator().manual_seed(seed)
    parameters = [nn.Parameter(made(torch.randn(shape, generator=generator))) for shape in shapes]
    return parameters, LocalUpdates(optimizer(parameters, lr), backend=backend, **options)


def step(parameters, local, number, made=lambda tensor: tensor, scale=1.0):
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    for layer, parameter in enumerate(parameters):
        parameter.grad = made(torch.randn(parameter.shape, generator=generator) * scale * 2.0 ** (layer % 3))
    local.step()


def bits(parameters, local):
    own = [pretended.on_host(each.data).clone() for each in parameters]
    with local.evaluation_parameters():
        shared = [pretended.on_host(each.data).clone() for each in parameters]
    return own, shared


def sent_by(local):
    return local.last.sent_fragments, local.last.sent_elements


BUDGET = {"send_budget": 0.3, "fragment_elements": 4096}


@pytest.mark.parametrize("world, payload, options, on_device", [
    (2, "as_is", BUDGET, False), (3, "float16", {**BUDGET, "delay": 1, "outer_rate": 0.7}, False),
    (2, "ternary", {**BUDGET, "delay": 3, "outer_momentum": 0.5, "outer_rate": 0.7}, False), (3, "int8", {"drop_ratio": 0.6}, False),
    (2, "int4", {"drop_ratio": 0.6, "fragment_elements": 4096, "delay": 2, "value": "root_mean_square"}, False),
    (3, "bfloat16", {"drop_ratio": 0.0}, False), (3, "ternary", BUDGET, False),
    (2, "as_is", {"send_budget": 0.3, "by_score": False, "value": "l2_norm", "fragment_elements": 8192}, False),
    (2, "as_is", BUDGET, True), (2, "int4", {**BUDGET, "delay": 3, "outer_momentum": 0.5, "outer_rate": 0.7}, True)])
@ranks.on()
def test_it_is_bitwise_the_cpp_backend(world, payload, options, on_device):
    made = pretended.Tensor if on_device else lambda tensor: tensor
    expected, found, seed = [], [], dist.get_rank()
    cpp = wrapped("cpu", seed=seed, payload=payload, **options)
    for number in range(1, 9):
        step(*cpp, number)
        expected.append((*bits(*cpp), sent_by(cpp[1])))
    cpp[1].finish()
    with pretended.device() if on_device else torch.enable_grad():
        ours = wrapped("torch", made, seed=seed, payload=payload, **options)
        for number in range(1, 9):
            step(*ours, number, made)
            found.append((*bits(*ours), sent_by(ours[1])))
        ours[1].finish()
        last = bits(*ours)
    assert [each[2] for each in expected] == [each[2] for each in found]
    assert len({each[2] for each in found}) > 1 or options.get("drop_ratio") == 0
    for number, (one, other) in enumerate(zip(expected, found)):
        for a, b in zip(one[0] + one[1], other[0] + other[1]):
            assert torch.equal(a, b), number
    # Gloo adds up three ranks in an order that depends on the place, and with what is left of rounding a sum may be fused.
    is_exact = world == 2 and payload == "as_is"
    for one, other in zip(sum(bits(*cpp), []), sum(last, [])):
        torch.testing.assert_close(one, other, rtol=0, atol=0 if is_exact else 1e-6)


def budgets(shapes, options):
    with pretended.device():
        parameters, local = wrapped("auto", pretended.Tensor, shapes, **options)
        of_steps = []
        for number in range(1, 6):
            for parameter in parameters:
                parameter.grad = pretended.Tensor(torch.full(parameter.shape, float(number)))
            local.optimizer.step()
            pretended.forget()
            local.exchange()
            of_steps.append(dict(pretended.counts))
        assert "waits" not in pretended.counts, pretended.where
        assert 0 < pretended.counts["launches"] <= 150, (of_steps, pretended.where)
        assert pretended.counts["collectives"] == 3
        assert pretended.counts["copies to the host"] == 1 and pretended.counts["copies to the device"] <= 2, pretended.where
        assert local.last.sent_fragments > 0


DELAYED = {"delay": 3, "outer_momentum": 0.6, "outer_rate": 0.7}


@pytest.mark.parametrize("payload, options", [*((payload, DELAYED) for payload in PAYLOADS), ("ternary", {})])
def test_an_exchange_waits_for_nothing_and_launches_little(payload, options):
    ranks.run(1, budgets, resnet50(), {**options, "payload": payload, "send_budget": 0.01, "fragment_elements": 4096})


def test_the_launches_do_not_grow_with_the_layers():
    ranks.run(1, budgets, [(64,)] * 500, {"payload": "ternary", "send_budget": 0.1})


# --- what is told a step later, and the rest ---

OPTIONS = {"send_budget": 0.3, "fragment_elements": 4096, "optimizer": torch.optim.AdamW, "lr": 0.01}


@pytest.mark.parametrize("backend, delay", [("cpu", 2), ("torch", 0), ("torch", 2)])
@ranks.on(2)
def test_parameters_that_are_not_finite_raise_on_all_ranks(backend, delay):
    """With torch's operators in the next exchange."""
    rank = dist.get_rank()
    parameters, local = wrapped(backend, delay=delay, **OPTIONS)
    for number in range(1, 4):
        step(parameters, local, number)
    own, before = parameters[1].detach().clone(), bits(parameters, local)[1]
    if rank == 1:
        parameters[1].data[0] = torch.nan
    if backend == "torch":
        local.exchange()
        assert delay or all(map(torch.equal, before, bits(parameters, local)[1]))
    error, message = ((ValueError, "group 0, parameter 1 is not finite") if rank == 1
                      else (RuntimeError, "the parameters of rank 1 are not finite; nothing was averaged"))
    with pytest.raises(error, match=message):
        local.exchange()
    if backend == "cpu":  # but for what was under way before: step 2 has arrived, and step 3 stays under way
        assert not all(map(torch.equal, before, bits(parameters, local)[1])) and ranks.agree(bits(parameters, local)[1])
        assert [each["step"] for each in local.state_dict()["local_updates"]["under_way"]] == [3] and local.backend.core.steps_under_way == 1
    for call in (local.finish, lambda: local.evaluation_parameters(average=True).__enter__()):
        with pytest.raises(error, match=message):
            call()
        assert ranks.agree(bits(parameters, local)[1]) and not local._evaluates
    parameters[1].data.copy_(own)
    for number in range(4, 8):
        step(parameters, local, number)
        assert ranks.agree(bits(parameters, local)[1])
    assert all(torch.isfinite(each).all() for each in bits(parameters, local)[1])


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@ranks.on(2)
def test_bfloat16_that_was_not_finite_is_mended_with_its_master(backend):
    parameter = nn.Parameter(torch.ones(256, dtype=torch.bfloat16))
    local = LocalUpdates(torch.optim.SGD([parameter], 0.5), backend=backend, drop_ratio=0)
    if dist.get_rank():
        parameter.data[3] = torch.nan
    with pytest.raises((ValueError, RuntimeError), match="parameter 0 is not finite|parameters of rank 1 are not finite"):
        local.exchange()
        local.exchange()  # which tells of it on a device
    parameter.data[3] = 2
    local.exchange()
    local.finish()
    assert torch.equal(parameter, torch.ones(256).index_fill(0, torch.tensor([3]), 2).bfloat16())


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@ranks.on(2)
def test_ranks_that_have_parted_say_so(backend):
    """One rank alone goes back: all see it, and none chooses anything."""
    parameters, local = wrapped(backend, **OPTIONS)
    saved = copy.deepcopy(local.state_dict())
    step(parameters, local, 1)
    if dist.get_rank() == 0:
        local.load_state_dict(saved)
    if backend == "torch":
        local.exchange()
    with pytest.raises(RuntimeError, match="the ranks have parted: step is 1 on rank 0 and 2 on rank 1"):
        local.exchange()


@pytest.mark.parametrize("backend, delay, payload, on_device", [
    ("cpu", 0, "as_is", False), ("torch", 1, "int8", False), ("cpu", 2, "ternary", False), ("torch", 5, "bfloat16", False), ("torch", 2, "int4", True)])
@ranks.on(2)
def test_saved_and_resumed_is_the_run_that_was_not_stopped(backend, delay, payload, on_device):
    """L6."""
    made = pretended.Tensor if on_device else lambda tensor: tensor

    def fresh():
        parameters, local = wrapped(backend, made, **OPTIONS, delay=delay, payload=payload, outer_rate=0.7, outer_momentum=0.5)
        return parameters, local, torch.optim.lr_scheduler.CosineAnnealingLR(local, 20)

    def train(run, first, last):
        for number in range(first, last + 1):
            step(*run[:2], number, made)
            run[2].step()

    with pretended.device() if on_device else torch.enable_grad():
        whole, again = fresh(), fresh()
        train(whole, 1, 6)
        train(again, 30, 31)  # of which nothing may be left
        for each, other in zip(again[1:], whole[1:]):
            # Copies, since newer optimizers take the tensors of a state as they are.
            each.load_state_dict(tree_map(lambda part: part.clone() if isinstance(part, torch.Tensor) else part, other.state_dict()))
        assert again[1].last is None and again[1].backend.step == again[1].totals.steps == 6 and len(again[1].backend.under_way) == delay
        for each in (whole, again):
            train(each, 7, 12)
        assert all(map(torch.equal, sum(bits(*whole[:2]), []), sum(bits(*again[:2]), [])))
        assert whole[1].totals == again[1].totals and whole[1].last == again[1].last


@ranks.on(2)
def test_what_is_refused_and_named():
    model = nn.Linear(3, 2)

    def made(**options):
        return LocalUpdates(torch.optim.SGD(model.parameters(), 0.1), **{"backend": "torch", **options})
    on_device = nn.Parameter(pretended.Tensor(torch.zeros(3)))
    cpp, ours = made(backend="cpu").state_dict(), made().state_dict()
    ranks.refused(
        (ValueError, "at_least_every needs backend 'cpu'", lambda: made(at_least_every=3)),
        (ValueError, "warm_up_steps needs", lambda: made(warm_up_steps=3)), (ValueError, "search_every needs", lambda: made(search_every=3)),
        (ValueError, "outer momentum", lambda: made(outer_momentum=1)),
        (ValueError, "backend must be one of auto, cpu, torch", lambda: made(backend="cuda")),
        (TypeError, "parameter 0 is on meta, which backend 'cpu' cannot read", lambda: LocalUpdates(torch.optim.SGD([on_device], 0.1), backend="cpu")),
        (TypeError, "parameter 1 is on cpu, and others on meta", lambda: LocalUpdates(torch.optim.SGD([on_device, model.weight], 0.1))),
        (RuntimeError, "backend is '(cpu|torch)' on rank 0", lambda: made(backend="torch" if dist.get_rank() else "cpu")),
        (ValueError, "backend is 'torch' here and 'cpu' in the saved state", lambda: made().load_state_dict(cpp)),
        (ValueError, "backend is 'cpu' here and 'torch' in the saved state", lambda: made(backend="cpu").load_state_dict(ours)))
    own = ours["local_updates"]
    damaged = [*((f"load_state_dict: .*{name.replace('_', '.')}|under way", {key: value for key, value in own.items() if key != name})
                 for name in ("step", "applied", "sent_in", "allowance", "momentum", "rounding", "shared", "local", "under_way", "totals", "checksum")),
               ("'shared' is not finite", {**own, "shared": [each * torch.nan for each in own["shared"]]})]
    ranks.refused(*((ValueError, text, lambda state=state: made().load_state_dict({**ours, "local_updates": state})) for text, state in damaged))


# --- another number of ranks ---

def wrapped_alike(backend):
    return wrapped(backend, **{**OPTIONS, "delay": 2, "payload": "ternary", "outer_rate": 0.7, "outer_momentum": 0.5}, seed=3)


def averaged(parameters, local):
    """What finish() would leave: all that all ranks have done."""
    with local.evaluation_parameters(average=True):
        return [each.detach().clone() for each in parameters]


def outer_momentum_of(local):
    return lamina.torch._owned.joined_shards(ranks.gathered(local.backend.owned.momentum), local.backend.fragments.sizes)


def save_all(directory):
    for backend in ("cpu", "torch"):
        parameters, local = wrapped_alike(backend)
        for number in range(1, 8):
            step(parameters, local, number)
        state, average, shared = local.state_dict(), averaged(parameters, local), bits(parameters, local)[1]
        momentum = outer_momentum_of(local) if backend == "cpu" else None
        torch.save((state, average, shared, momentum), f"{directory}/{backend}{dist.get_rank()}")


def load_merged(directory, saved_ranks):
    """The shared parameters and the outer momentum are what they were, what all still have to contribute is the same, and both backends go on
    alike."""
    loaded, world = {}, dist.get_world_size()
    for backend in ("cpu", "torch"):
        states, averages, shared, momentum = zip(*(torch.load(f"{directory}/{backend}{rank}") for rank in range(saved_ranks)))
        parameters, local = loaded[backend] = wrapped_alike(backend)
        with pytest.raises(ValueError, match=f"world_size is {world} here and {saved_ranks} in the saved state; give all saved"):
            local.load_state_dict(states[0])
        merged = lamina.torch.merge_states(states, world)
        damaged = copy.deepcopy(merged)
        local.load_state_dict(merged)
        assert all(map(torch.equal, bits(parameters, local)[1], shared[0])) and local.backend.step == 7 and not local.backend.under_way
        for now, before in zip(averaged(parameters, local), averages[0]):
            torch.testing.assert_close(now, before, rtol=0, atol=1e-6)
        moments = [sum(state["state"][0]["exp_avg"] for state in states) / saved_ranks, local.state[parameters[0]]["exp_avg"]]
        assert torch.allclose(*moments, rtol=0, atol=1e-7) and not torch.equal(moments[0], states[0]["state"][0]["exp_avg"])
        if backend == "cpu":
            assert momentum[0].any() and torch.equal(outer_momentum_of(local), momentum[0])
    for number in range(8, 12):
        for one, other in zip(sum(bits(*loaded["cpu"]), []), sum(bits(*loaded["torch"]), [])):
            assert torch.equal(one, other)
        for each in loaded.values():
            step(*each, number)
            assert ranks.agree(bits(*each)[1])
    damaged["local_updates"]["momentum"] = damaged["local_updates"]["momentum"][1:]
    with pytest.raises(ValueError, match="elements of all slices, the model has"):
        loaded["torch"][1].load_state_dict(damaged)


@pytest.mark.parametrize("before, after", [(2, 3), (3, 1)])
def test_another_number_of_ranks_goes_on(before, after, tmp_path):
    ranks.run(before, save_all, str(tmp_path))
    ranks.run(after, load_merged, str(tmp_path), before)
