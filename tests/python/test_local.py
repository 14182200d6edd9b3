# SPDX-License-Identifier: MIT
"""LocalUpdates around optimizers, on several ranks: L1, L2, ... are the numbers of docs/algorithm.md. That ranks make what one server would:
test_local_device.py, against shards of another kind, and tests/benchmarks/learning/test_package.py, against a server. L6: test_local_device.py."""

import copy
import datetime
import io
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import lamina
import lamina.torch
from lamina.torch import LocalUpdates
import models
from models import train_local as train
import ranks

SHAPES = [(70, 100), (3,), (33, 4)]


def wrapped_small(seed=0, optimizer=torch.optim.AdamW, rate=0.01, **options):
    model, share = models.small(seed), {} if "drop_ratio" in options else {"send_budget": 0.3}
    return model, LocalUpdates(optimizer(model.parameters(), rate), fragment_elements=4096, **share, **options)


def wrapped_weights(*shapes, rate=1.0, **options):
    """Parameters whose gradients are given to take()."""
    model = models.Weights(*(shapes or SHAPES))
    return model, LocalUpdates(torch.optim.SGD(model.parameters(), rate), **options)


def take(model, optimizer, gradients):
    optimizer.zero_grad()
    model(gradients).backward()
    optimizer.step()


def take_whole_numbers(model, optimizer, step, did):
    """The same with gradients that are whole numbers, and adds them to `did`."""
    gradients = models.whole_numbers(SHAPES, step, dist.get_rank())
    take(model, optimizer, gradients)
    for total, gradient in zip(did, gradients):
        total += gradient


def is_all_that_was_done(model, did):
    """Whether the parameters, which began at zero, moved by the mean of what all ranks did, and by nothing else."""
    for total in did:
        dist.all_reduce(total)
    return all(torch.equal(parameter.detach(), -total / dist.get_world_size()) for parameter, total in zip(model.parameters(), did))


def loss_of(model, step):
    images, labels = models.batch(step, dist.get_rank())
    return nn.functional.cross_entropy(model(images), labels)


def shared_bits(optimizer):
    with optimizer.evaluation_parameters():
        return b"".join(each.detach().numpy().tobytes() for group in optimizer.param_groups for each in group["params"])


def agree(optimizer):
    return ranks.agree(shared_bits(optimizer))


# --- L1 to L5 ---

def owners_rounding(optimizer):
    """What rounding took of the answers, at each element of the model: each has one owner."""
    fragments, world = optimizer.backend.fragments, dist.get_world_size()
    rounding = torch.zeros(fragments.elements)
    own, begin, first = optimizer.backend.owned.rounding, 0, 0
    for fragment, size in enumerate(fragments.sizes):
        if own.numel() and fragment % world == dist.get_rank():
            rounding[first:first + size] = own[begin:begin + size]
            begin += size
        first += size
    assert begin == own.numel()
    dist.all_reduce(rounding)
    return torch.split(rounding, optimizer.backend.layout.sizes)


@pytest.mark.parametrize("delay, payload", [(0, "as_is"), (0, "int8"), (1, "float16"), (2, "int4"), (2, "ternary"), (5, "bfloat16")])
@ranks.on(2)
def test_nothing_is_lost(payload, delay):
    """L1 and L2."""
    model, optimizer = wrapped_weights(send_budget=0.4, fragment_elements=4096, payload=payload, delay=delay)
    did, rounded = [torch.zeros(shape) for shape in SHAPES], 0
    for step in range(1, 13):
        if dist.get_rank() == 1 and step in (3, 4, 9):
            optimizer.exchange()  # its optimizer left the step out, as a scaler may
        else:
            take_whole_numbers(model, optimizer, step, did)
        # Averaged, what is brought together moves the mean of the ranks by what rounding took of it, which comes later: but for
        # that, and for what messages left out, the mean is what all did.
        rest = torch.zeros(sum(total.numel() for total in did))
        if payload == "ternary":
            rest = torch.frombuffer(optimizer.backend.core.rest(), dtype=torch.float32).clone()
            rounded += int(rest.count_nonzero())
        dist.all_reduce(rest)
        for parameter, total, kept, left in zip(model.parameters(), did, owners_rounding(optimizer),
                                                torch.split(rest, [total.numel() for total in did])):
            both = torch.stack([parameter.detach(), -total])
            dist.all_reduce(both)
            assert torch.equal(both[0] - (2 * kept + left).view(total.shape), both[1]), step
            rounded += int(kept.count_nonzero())
        assert agree(optimizer)
    assert (rounded > 0) == (payload in ("int4", "ternary"))  # means of whole numbers
    share = 0.4 * {"int4": 0.5, "ternary": 0.25}.get(payload, 1)
    assert 0.2 < optimizer.totals.sent_bytes / (optimizer.totals.dense_bytes * share) < 1.2
    assert any(each.any() for each in did)
    own = models.bits(model)
    with optimizer.evaluation_parameters(average=True):
        averaged = models.bits(model)
    assert models.bits(model) == own != averaged
    before = optimizer.totals.sent_bytes
    optimizer.finish()
    assert optimizer.totals.sent_bytes == before + 4 * optimizer.backend.fragments.elements
    assert models.bits(model) == averaged == shared_bits(optimizer) and agree(optimizer) and is_all_that_was_done(model, did)
    optimizer.finish()
    assert models.bits(model) == averaged and not optimizer.backend.under_way
    optimizer.load_state_dict(optimizer.state_dict())
    for _ in range(delay + 1):  # and training goes on
        optimizer.exchange()


@ranks.on(2)
def test_everything_averaged_is_dense_sgd():
    """L3; and nobody differs."""
    model, dense = models.Weights(*SHAPES), models.Weights(*SHAPES)
    optimizer = LocalUpdates(torch.optim.SGD(model.parameters(), 0.125), drop_ratio=0, payload="float16")
    plain = torch.optim.SGD(dense.parameters(), 0.125)
    for step in range(1, 5):
        take(model, optimizer, models.whole_numbers(SHAPES, step, dist.get_rank()))
        for parameter, *each in zip(dense.parameters(), *(models.whole_numbers(SHAPES, step, rank) for rank in range(2))):
            parameter.grad = sum(each) / 2
        plain.step()
        assert models.bits(model) == models.bits(dense) == shared_bits(optimizer)


@ranks.on(3)
def test_a_rank_sends_and_receives_its_payload_about_twice():
    world, payload = dist.get_world_size(), "int4"
    model, optimizer = wrapped_weights((256, 256), (4096,), drop_ratio=0, payload=payload)
    with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchanged:
        take(model, optimizer, [torch.ones(256, 256), torch.ones(4096)])
    splits = [call.args[2:] for call in exchanged.call_args_list]
    moved = [tuple(sum(each) - each[dist.get_rank()] for each in (sent, received)) for received, sent in splits]
    rank, fragments = dist.get_rank(), optimizer.backend.fragments
    shards = [range(owner, len(fragments.sizes), world) for owner in range(world)]
    of_shard = [lamina.payload_bytes(fragments, list(shard), payload) for shard in shards]
    others, all_others = (world - 1) * of_shard[rank], sum(of_shard) - of_shard[rank]
    assert moved == [(all_others, others), (others + world - 1, all_others + world - 1)]  # and a byte of each owner says that it is well
    assert optimizer.last.sent_bytes == sum(of_shard) + 8 * (2 + 5)


@ranks.on(2)
def test_half_the_delay_is_for_each_way():
    waited, kept, step = [], dist.all_to_all_single, 0

    def begun(*arguments, **options):
        work, began = kept(*arguments, **options), step
        return mock.Mock(**{"wait.side_effect": lambda: waited.append(step - began) or work.wait()})
    for delay, expected in ((0, [0, 0]), (1, [0, 1]), (2, [1, 1]), (5, [2, 3])):
        model, optimizer = wrapped_weights((64,), drop_ratio=0, delay=delay)
        waited.clear()
        with mock.patch.object(dist, "all_to_all_single", begun):
            for step in range(1, 2 * delay + 4):
                take(model, optimizer, [torch.ones(64)])
        assert waited[:2] == expected and len(waited) > 2


@pytest.mark.parametrize("delay, payload", [(0, "as_is"), (2, "bfloat16")])
@ranks.on(1)
def test_one_rank_trains_as_if_alone(delay, payload):
    """L5."""
    model = models.Weights(*SHAPES)
    alone = copy.deepcopy(model)
    inside, plain = (torch.optim.SGD(each.parameters(), 0.5, momentum=0.5) for each in (model, alone))
    optimizer = LocalUpdates(inside, send_budget=0.3, delay=delay, payload=payload)
    for step in range(1, 9):
        for each, its in ((model, optimizer), (alone, plain)):
            take(each, its, models.whole_numbers(SHAPES, step, 0))
        assert models.bits(model) == models.bits(alone)
    assert optimizer.last.sent_bytes > 0


@pytest.mark.parametrize("payload", ["ternary", "int8"])
@ranks.on(2)
def test_when_something_arrives_and_the_default_type_change_nothing(payload):
    """L4: how long what is under way takes."""
    results = []
    for is_slow, default in ((False, torch.float32), (True, torch.float32), (True, torch.float64)):
        model = models.small()
        with models.default_type(default):
            optimizer = LocalUpdates(torch.optim.AdamW(model.parameters(), 0.01), send_budget=0.3, fragment_elements=4096, payload=payload,
                                     delay=2, outer_rate=0.7, outer_momentum=0.9)
            for step in range(1, 9):
                train(model, optimizer, 1, step)
                saved = optimizer.state_dict() if is_slow else None  # for which all of it arrives at once
                if default is torch.float64:
                    optimizer.load_state_dict(saved)
        results.append((models.bits(model), shared_bits(optimizer)))
    assert results[0] == results[1] == results[2] and optimizer.totals.sent_bytes > 0


# --- as an optimizer ---

@pytest.mark.parametrize("name, options", [("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}), ("AdamW", {"lr": 0.01})])
@ranks.on(2)
def test_any_optimizer_with_a_closure_clipping_and_a_schedule(name, options):
    model = models.small()
    optimizer = LocalUpdates(getattr(torch.optim, name)(model.parameters(), **options), send_budget=0.3, fragment_elements=4096)
    assert (optimizer._payload, optimizer._error_feedback) == (("as_is", False) if name == "SGD" else ("ternary", True))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses = []
    for step in range(1, 7):
        def closure():
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(model, 1)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            return loss
        losses.append(optimizer.step(closure).item())
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(options["lr"] / 8)
    assert optimizer.param_groups is optimizer.optimizer.param_groups and optimizer.state is optimizer.optimizer.state
    assert agree(optimizer) and losses[-1] < losses[0], losses


@ranks.on(2)
def test_a_scaler_steps_the_optimizer_and_all_exchange():
    rank = dist.get_rank()
    model, local = wrapped_small(optimizer=torch.optim.SGD, rate=0.05, drop_ratio=0)
    ranks.refused((RuntimeError, r"scaler.step\(local.optimizer\), and then local.exchange\(\)", lambda: local.step(grad_scaler=object())))
    off = torch.cuda.amp.GradScaler(enabled=False)
    off.scale(loss_of(model, 1)).backward()
    off.step(local)
    off.update()
    assert local.backend.step == 1
    if not hasattr(torch.amp, "GradScaler"):
        return  # on the CPU it came with PyTorch 2.3
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with pytest.raises(RuntimeError, match="a scaler leaves out steps"):
        scaler.scale(loss_of(model, 2)).backward()
        scaler.step(local)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(3, 7):
        local.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if rank == 1 and step == 4:
            next(model.parameters()).grad[0] = torch.inf
        before = models.bits(model)
        scaler.unscale_(local.optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(local.optimizer)
        assert (models.bits(model) == before) == (rank == 1 and step == 4)
        local.exchange()
        scaler.update()
        assert agree(local)
    assert scaler.get_scale() == (128 if rank == 1 else 256)


def are_equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@ranks.on(2)
def test_evaluation_swaps_in_what_all_share(backend):
    model, optimizer = wrapped_small(backend=backend)
    train(model, optimizer, 6)
    own, saved = copy.deepcopy(model.state_dict()), optimizer.state_dict()
    everyones = ranks.gathered(own)
    with pytest.raises(ZeroDivisionError):
        with optimizer.evaluation_parameters(model):
            within, trap = copy.deepcopy(model.state_dict()), model.state_dict()
            mean = sum(each["1.running_mean"].double() for each in everyones) / 2
            assert torch.equal(within["1.running_mean"], mean.float())
            assert not torch.equal(within["1.running_mean"], own["1.running_mean"])
            assert within["1.num_batches_tracked"] == 6
            ranks.refused(*((RuntimeError, "leave it first|entered already", call) for call in (
                optimizer.step, optimizer.exchange, optimizer.finish, lambda: optimizer.evaluation_parameters().__enter__(),
                optimizer.state_dict, lambda: optimizer.load_state_dict(saved))))
            assert are_equal(model.state_dict(), within)
            assert optimizer.state[next(model.parameters())]["step"] == 6  # not even the optimizer has stepped
            assert torch.is_grad_enabled()
            1 / 0
    assert are_equal(model.state_dict(), own) and are_equal(trap, own)
    # The model to keep is the shared one.
    assert all(are_equal(shared, within) for shared in ranks.gathered(optimizer.shared_state_dict(model)))
    assert are_equal(model.state_dict(), own)
    last = optimizer.shared_state_dict(model, average=True)
    if backend == "torch":  # where a parameter that was put elsewhere is taken into the flat tensor again
        model[0].weight.data = model[0].weight.detach().clone()
    optimizer.finish()
    assert all(torch.equal(last[name], parameter) for name, parameter in model.named_parameters())
    assert not torch.equal(last["0.weight"], within["0.weight"])
    train(model, optimizer, 1, 7)


@pytest.mark.parametrize("how, backend", [("DDP", "cpu"), ("one data set", "torch"), ("once", "cpu"), ("each its own", "torch")])
@ranks.on(2)
def test_a_model_under_ddp_is_told_of(how, backend):
    records = models.recorded()
    model, optimizer = wrapped_small(payload="int8", backend=backend)
    net = DDP(model) if how == "DDP" else model
    for step in range(1, 5):
        optimizer.zero_grad()
        images, labels = models.batch(step, 0 if how == "one data set" or (how == "once" and step == 1) else dist.get_rank())
        nn.functional.cross_entropy(net(images), labels).backward()
        optimizer.step()
    told = [record.getMessage() for record in records if "bitwise equal" in record.getMessage()]
    assert len(told) == (how in ("DDP", "one data set") and dist.get_rank() == 0), told
    assert all("DistributedDataParallel" in line and "DistributedSampler" in line for line in told)


# --- ranks that make different calls ---

@pytest.mark.parametrize("delay, of_rank_0, of_rank_1", [
    (0, "finish", "exchange"), (2, "evaluation_parameters", "exchange"), (2, "finish", "evaluation_parameters")])
@ranks.on(2)
def test_ranks_that_make_different_calls_all_say_so(delay, of_rank_0, of_rank_1):
    model, optimizer = wrapped_small(delay=delay)
    train(model, optimizer, 3)
    calls = {"exchange": lambda: train(model, optimizer, 1, 4), "finish": optimizer.finish,
             "evaluation_parameters": lambda: optimizer.shared_state_dict(model)}
    with pytest.raises(RuntimeError, match=f"the call is {of_rank_0} on rank 0 and {of_rank_1} on rank 1; .*algorithms.Join"):
        calls[of_rank_1 if dist.get_rank() else of_rank_0]()
    assert not optimizer._evaluates
    optimizer.state_dict()


@pytest.mark.parametrize("delay, backend", [(2, "cpu"), (0, "torch")])
@ranks.on(2)
def test_a_rank_with_fewer_batches_joins(delay, backend):
    model, optimizer = wrapped_weights(send_budget=0.4, fragment_elements=4096, delay=delay, backend=backend)
    did = [torch.zeros(shape) for shape in SHAPES]
    with Join([optimizer]):
        for step in range(1, 4 + 3 * dist.get_rank()):
            take_whole_numbers(model, optimizer, step, did)
    assert optimizer.backend.step == 6 and agree(optimizer)
    optimizer.finish()
    assert is_all_that_was_done(model, did)
    optimizer.exchange()  # also outside


# --- what is refused ---

@pytest.mark.parametrize("backend, delay, payload", [("cpu", 0, "as_is"), ("cpu", 3, "as_is"), ("torch", 0, "as_is"), ("torch", 0, "int8")])
@ranks.on(2)
def test_a_sum_that_is_not_finite_raises_on_all_ranks(backend, delay, payload):
    """With torch's operators in the next exchange."""
    model, optimizer = wrapped_weights((1,), (128,), drop_ratio=0, delay=delay, outer_momentum=0.5, backend=backend, payload=payload)
    large = torch.zeros(128)
    large[100] = 3e38  # which two have, in the fragment of rank 1

    def step(gradient):
        take(model, optimizer, [torch.zeros(1), gradient])
    is_told_at_once = (backend, delay) == ("cpu", 0)
    if not is_told_at_once:
        step(large)
    if delay:
        own = model.all[1].detach().clone()
        again = copy.deepcopy(optimizer.state_dict())  # with the answer that says so
        step(torch.zeros(128))
        model.all[1].data.copy_(own)
        optimizer.load_state_dict(again)
        for _ in range(delay - 1):
            step(torch.zeros(128))
    message = "what step 1 sent is not finite, on rank 1 of the group" if backend == "cpu" else "the sum of what was sent up to step 1 is not finite"
    with pytest.raises(OverflowError, match=message):
        step(large if is_told_at_once else torch.zeros(128))
    momentum, shared = (optimizer.backend.owned if backend == "cpu" else optimizer.backend).momentum, optimizer.backend.shared_layers()
    assert not momentum.any() and not any(each.any() for each in shared)
    assert torch.equal(model.all[1].detach(), -large) and not optimizer.backend.under_way
    with torch.no_grad():
        model.all[1][100] = 1.0
    optimizer.zero_grad()
    for _ in range(delay + 1):
        optimizer.exchange()
    assert agree(optimizer) and optimizer.backend.shared_layers()[1][100] == 1.5  # with half of it by the momentum


@ranks.on(2)
def test_what_is_refused_and_named():
    rank = dist.get_rank()
    model = nn.Linear(3, 2)

    def made(**options):
        return LocalUpdates(torch.optim.SGD(model.parameters(), 0.1), **options)

    class TwoModes(torch.optim.SGD):
        def train(self):
            pass
        eval = train

    def grown():
        inside = torch.optim.SGD(model.parameters(), 0.1)
        local = LocalUpdates(inside)
        inside.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        local.step()
    half = nn.Linear(3, 2).double()
    gaps = nn.Parameter(torch.zeros(4, 4)[:, :2])
    memory = torch.zeros(100)
    first, second, behind = nn.Parameter(memory[:60]), nn.Parameter(memory[50:]), nn.Parameter(memory[60:])
    LocalUpdates(torch.optim.SGD([first, behind], 0.1))
    ranks.refused(
        (TypeError, "wraps a torch.optim.Optimizer, got Linear", lambda: LocalUpdates(model)),
        (TypeError, "wraps a torch.optim.Optimizer, got LocalUpdates", lambda: LocalUpdates(made())),
        (TypeError, "ZeroRedundancyOptimizer sends parameters to the other ranks itself.*give LocalUpdates the optimizer that it wraps",
         lambda: LocalUpdates(ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1))),
        (TypeError, "PostLocalSGDOptimizer sends parameters",
         lambda: LocalUpdates(PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), 0.1), PeriodicModelAverager(2)))),
        (TypeError, r"TwoModes has train\(\) and eval\(\)", lambda: LocalUpdates(TwoModes(model.parameters(), 0.1))),
        (RuntimeError, "the optimizer has 3 parameters, and had 2 when it was wrapped; wrap it after add_param_group", grown),
        (TypeError, "group 0, parameter 0 is torch.float64, LocalUpdates takes float32",
         lambda: LocalUpdates(torch.optim.SGD(half.parameters(), 0.1))),
        (TypeError, "group 0, parameter 0 has gaps", lambda: LocalUpdates(torch.optim.SGD([gaps], 0.1))),
        (TypeError, "group 0, parameter 0 and group 1, parameter 0 share memory",
         lambda: LocalUpdates(torch.optim.SGD([{"params": [second]}, {"params": [first]}], 0.1))),
        (ValueError, "has no parameters", lambda: LocalUpdates(torch.optim.SGD([nn.Parameter(torch.empty(0))], 0.1))),
        (ValueError, r"delay must be a whole number in \[0, 64\], got 65", lambda: made(delay=65)),
        (ValueError, "delay must be", lambda: made(delay=1.5)),
        (ValueError, "log_every", lambda: made(log_every=-1)),
        (ValueError, "momentum: a local delta has none", lambda: made(momentum=0.9)),
        (ValueError, "outer momentum", lambda: made(outer_momentum=1)),
        (ValueError, "outer rate", lambda: made(outer_rate=0)),
        (ValueError, "send_budget must be a share in", lambda: made(send_budget=0.0)),
        (ValueError, "LocalUpdates: send_budget stands in place of drop_ratio", lambda: made(send_budget=0.5, drop_ratio=0.5)),
        (ValueError, "payload must be one of", lambda: made(payload="int5")),
        (ValueError, "value must be one of", lambda: made(value="max_abs")),
        (TypeError, "LocalUpdates has no option 'drop'", lambda: made(drop=0.5)),
        (RuntimeError, "LocalUpdates: delay is 0 on rank 0 and 1 on rank 1", lambda: made(delay=rank)),
        (RuntimeError, "outer_rate is 1.0 on rank 0 and 2.0 on rank 1", lambda: made(outer_rate=1.0 + rank)),
        (RuntimeError, "add_param_group", lambda: made().add_param_group({"params": []})),
        (TypeError, "cannot be pickled or copied", lambda: copy.deepcopy(made())))


@ranks.on(2)
def test_a_damaged_state_changes_nothing():
    rank = dist.get_rank()
    model, optimizer = wrapped_small(drop_ratio=0.5, delay=2, outer_momentum=0.5, payload="int8")
    train(model, optimizer, 4)
    good = copy.deepcopy(optimizer.state_dict())
    own, others = good["local_updates"], ranks.gathered(good)[1 - rank]
    third, fourth = own["under_way"]
    fragments, update = third["fragments"], third["update"]
    assert third["step"] == 3 and fragments and third["answer"] is None and own["applied"] == 2
    assert fourth["step"] == 4 and fourth["update"] is None and fourth["momentum"].numel() == fourth["rounding"].numel() > 0

    def bits():
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        return file.getvalue()

    def put(**changes):
        return lambda state: state["local_updates"].update(changes)

    def told(**changes):
        return put(told={**own["told"], **changes})

    def under_way(**changes):
        return put(under_way=[{**third, **changes}, fourth])

    def last(**changes):
        return put(under_way=[third, {**fourth, **changes}])

    def answer_bytes(fragments):
        return lamina.payload_bytes(optimizer.backend.fragments, [fragment for fragment in fragments if fragment % 2 == rank], "int8") + 1

    before = bits()
    for message, *changes in [
            ("there is no 'local_updates'", lambda state: state.pop("local_updates")),
            ("was not saved by LocalUpdates", lambda state: state.update(local_updates=3), put(told=None)),
            ("the format is 9", put(format=9)),
            ("rank is", put(rank=1 - rank)),
            ("drop_ratio is 0.5 here and 0.9", told(drop_ratio=0.9)),
            ("names", told(names=["a"])),
            ("the stride of group 0, parameter 4 is .* in the saved state", told(**{"the stride of group 0, parameter 4": (1, 2, 3, 4)})),
            *((f"'{key}' is missing", lambda state, key=key: state["local_updates"].pop(key)) for key in own
              if key not in ("format", "told", "lamina", "rank", "world_size")),
            ("'state' of the optimizer is missing", lambda state: state.pop("state")),
            ("'step' is -1", put(step=-1)),
            ("'step' is True", put(step=True)),
            ("'step' is 5, and 4 in 'memory'", put(step=5)),
            ("'applied' is 'one'", put(applied="one")),
            ("are not steps from 4 to 4", put(applied=3)),
            ("'applied' is 5, of 4 steps", put(applied=5)),
            ("'last_choice' is None", put(last_choice=None)),
            (f"not those that rank {rank} saved: they are damaged, or were mixed.*per_rank", put(local=[-each for each in own["local"]]),
             put(memory=others["local_updates"]["memory"]), lambda state: state.update(state=others["state"])),
            ("'totals' is {'x': 1}", put(totals={"x": 1})),
            ("'totals' is", put(totals={**own["totals"], "steps": -1})),
            ("'memory' is no tensor", put(memory=b"xxx")),
            ("saved local delta", put(memory=torch.zeros(5, dtype=torch.uint8))),
            ("'momentum' is no tensor of float32", put(momentum=own["momentum"].double())),
            ("'rounding' is no tensor of float32", put(rounding=None)),
            ("elements, this one", put(momentum=torch.zeros(3)), put(rounding=own["rounding"][1:])),
            ("holds NaN", put(momentum=torch.full_like(own["momentum"], torch.nan))),
            ("the local parameters have other sizes, or types", put(local=own["local"][1:])),
            ("other sizes, or types", put(shared=[]), put(shared=[each.double() for each in own["shared"]])),
            *((f"{name} parameters of group 0, parameter 0 are not finite", put(**{name: [each * torch.inf for each in own[name]]}))
              for name in ("local", "shared")),
            ("not all there", put(under_way=[fourth])),
            ("are not steps from 3 to 4", put(under_way=[fourth, third]), under_way(step=2),
             put(under_way=[{"step": 3, "fragments": fragments}, fourth])),
            ("'memory' is not step 2", lambda state: (put(applied=1)(state), under_way(step=2)(state))),
            ("of step 3 are no fragments", under_way(fragments=[len(optimizer._fragments.sizes)]), under_way(fragments=fragments + fragments[-1:])),
            ("a fragment of step 4 is under way of an earlier one", last(fragments=third["fragments"])),
            ("of step 3 has another size", under_way(update=update[1:]), under_way(update=None), under_way(answer=fourth["answer"])),
            ("of step 3 is at another point of its way", under_way(update=None, answer=torch.zeros(answer_bytes(fragments), dtype=torch.uint8))),
            ("of step 4 is at another point of its way",
             last(answer=None, update=torch.zeros(sum(optimizer.backend.fragments.sizes[fragment] for fragment in fourth["fragments"])))),
            ("of step 4 has another size, or cannot be", last(answer=fourth["answer"][1:]), last(answer=torch.full_like(fourth["answer"], 255)),
             last(answer=torch.cat([fourth["answer"][:-1], torch.tensor([2]).byte()])), last(rounding=fourth["rounding"][1:]),
             last(momentum=torch.empty(0))),
            ("'momentum' of what is under way of step 4 has another type", last(momentum=None)),
            ("'answer' of what is under way of step 4 has another type", last(answer=torch.zeros(3))),
            ("'update' of what is under way of step 3 is not finite", under_way(update=update * torch.nan)),
            ("'update' of what is under way of step 3 has another type", under_way(update=update.double()))]:
        for change in changes:
            state = copy.deepcopy(good)
            change(state)
            with pytest.raises(ValueError, match=f"load_state_dict: .*{message}"):
                optimizer.load_state_dict(state)
            assert bits() == before, message
    optimizer.load_state_dict(good)
    assert bits() == before
    train(model, optimizer, 3, 5)
    assert agree(optimizer)


@ranks.on(2)
def test_states_that_cannot_be_merged_are_named():
    _, optimizer = wrapped_small(payload="ternary", delay=2, outer_momentum=0.5)
    states = ranks.gathered(optimizer.state_dict())

    def changed(**changes):
        own = {**states[1]["local_updates"], **changes}
        return [states[0], {**states[1], "local_updates": own}]
    told = states[1]["local_updates"]["told"]
    shared = [each + 1 for each in states[1]["local_updates"]["shared"]]
    unmixed = changed(shared=shared)
    unmixed[1]["local_updates"]["checksum"] = lamina.torch._checkpoint.checksum_of(1, unmixed[1])
    for message, given in (("those of all|all ranks are needed, got those of", states[:1]), ("step is 0 on rank 0 and 3 on rank 1", changed(step=3)),
                           ("told is", changed(told={**told, "delay": 1})), ("not those that rank 1 saved", changed(shared=shared)),
                           ("the shared parameters differ on rank 0 and on rank 1", unmixed)):
        with pytest.raises(ValueError, match=f"merge_states: .*{message}"):
            lamina.torch.merge_states(given, 3)


@ranks.on(2)
def test_the_order_in_memory_is_one():
    """Any on all ranks, else a fragment is of other elements. With a group that is frozen, and a parameter without elements."""
    rank = dist.get_rank()

    def wrapped(size, memory_format=torch.contiguous_format):
        torch.manual_seed(0)
        module = nn.Conv2d(3, 8, size).to(memory_format=memory_format)
        others = [nn.Parameter(torch.ones(5), requires_grad=False), nn.Parameter(torch.empty(0, 2))]
        return module, LocalUpdates(torch.optim.SGD([{"params": module.parameters()}, {"params": others}], 0.1), drop_ratio=0)

    module, optimizer = wrapped(3, torch.channels_last)
    for step in range(1, 4):
        optimizer.zero_grad()
        module(models.batch(step, rank)[0]).square().mean().backward()
        optimizer.step()
        assert agree(optimizer)
    assert not module.weight.is_contiguous() and torch.equal(optimizer.param_groups[1]["params"][0].detach(), torch.ones(5))
    assert optimizer.names[2] == "group 1, parameter 0"
    row_major, last = r"\(27, 9, 3, 1\)", r"\(27, 1, 9, 3\)"
    module, optimizer = wrapped(3)
    saved = optimizer.state_dict()
    ranks.refused((RuntimeError, f"the stride of group 0, parameter 0 is {row_major} on rank 0 and {last} on rank 1",
                   lambda: wrapped(3, torch.channels_last if rank == 1 else torch.contiguous_format)),
                  (ValueError, f"the stride of group 0, parameter 0 is {last} here and {row_major} in the saved state",
                   lambda: wrapped(3, torch.channels_last)[1].load_state_dict(saved)))
    module.to(memory_format=torch.channels_last)
    before = models.bits(module)
    for call in (optimizer.exchange, optimizer.state_dict, lambda: optimizer.load_state_dict(saved),
                 lambda: optimizer.evaluation_parameters().__enter__()):
        with pytest.raises(RuntimeError, match=f"group 0, parameter 0 has strides {last}, and had {row_major} when"):
            call()
        assert models.bits(module) == before and optimizer.backend.step == 0
    module.to(memory_format=torch.contiguous_format)
    optimizer.exchange()
    assert agree(optimizer)
    module, optimizer = wrapped(1)  # of one pixel: the same places in memory
    module.to(memory_format=torch.channels_last)
    assert module.weight.stride() != (3, 1, 1, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.exchange()


GONE = RuntimeError("the network is gone")
gone = mock.Mock(side_effect=GONE, **{"wait.side_effect": GONE})  # a collective, or the work of one


@pytest.mark.parametrize("where", ["answer", "hand_on", "agree", "send", "state_dict"])
@ranks.on(2)
def test_wherever_a_collective_fails(where):
    """Whatever fails, the local delta has all that was under way, and the outer optimizer is as it was before."""
    rank = dist.get_rank()
    model, optimizer = wrapped_small(drop_ratio=0.5, delay=2, payload="int8", outer_momentum=0.5)
    train(model, optimizer, 4)
    assert [(going.handed_on, going.work is not None) for going in optimizer.backend.under_way] == [(True, True), (False, True)]
    if rank == 1:
        return
    before = optimizer.backend.owned.momentum.clone(), optimizer.backend.owned.rounding.clone()
    # As if rank 1 had said the same.
    all_reduce = gone if where == "agree" else lambda tensor, **_: tensor.mul_(2)
    # Of step 3 the answers come in exchange(), and step 4 is answered behind what step 5 sends.
    exchanged = mock.Mock(side_effect=[mock.Mock()] * {"send": 0, "hand_on": 1}.get(where, 2) + [GONE])
    with mock.patch.multiple(dist, all_reduce=all_reduce, all_to_all_single=exchanged):
        if where in ("answer", "state_dict"):
            optimizer.backend.under_way[1].work = gone
        call = optimizer.state_dict if where == "state_dict" else optimizer.exchange
        ranks.refused((RuntimeError, "the network is gone", call))
    assert optimizer.backend.core.steps_under_way == 0 and not optimizer.backend.under_way
    saved = optimizer.state_dict()
    own = saved["local_updates"]
    assert own["under_way"] == []
    same = torch.equal(own["momentum"], before[0]) and torch.equal(own["rounding"], before[1])
    assert same == (where == "state_dict")  # else step 3 was applied before
    assert own["applied"] == (2 if same else 3)
    optimizer.load_state_dict(saved)


def dying():
    """A program of two ranks, the second of which ends with a step half sent."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    model, optimizer = wrapped_small(optimizer=torch.optim.SGD, rate=0.05, delay=2)
    train(model, optimizer, 2)
    if dist.get_rank() == 1:
        optimizer.backend._send = lambda: os._exit(0)
    train(model, optimizer, 1, 3)
    assert len(optimizer.backend.under_way) == 2
    for call in (optimizer.state_dict, optimizer.exchange):
        with pytest.raises(RuntimeError):
            call()
        saved = optimizer.state_dict()["local_updates"]
        assert saved["under_way"] == [] and saved["applied"] == 1
    print("saved", flush=True)
    os._exit(0)


def test_a_rank_that_ends_leaves_a_state_to_save():
    assert ranks.Program(__file__).outputs() == ["saved\n", ""]


@pytest.mark.parametrize("delay", [0, 1, 3])
@ranks.on(2)
def test_one_rank_alone_that_fails_is_noticed(delay):
    """Interrupted while it waits for what the others apply."""
    rank = dist.get_rank()
    model, optimizer = wrapped_small(optimizer=torch.optim.SGD, rate=0.05, delay=delay)
    train(model, optimizer, 2)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    waiting, call = ("settle", optimizer.state_dict) if delay == 3 else ("update_of", optimizer.exchange)
    wait = getattr(optimizer.backend.owned, waiting)

    def interrupted(going):
        wait(going)
        raise KeyboardInterrupt
    if rank == 0:
        with mock.patch.object(optimizer.backend.owned, waiting, interrupted), pytest.raises(KeyboardInterrupt):
            call()
    elif delay == 0:  # of which rank 0 had the update
        optimizer.exchange()
    difference = {0: "the last step applied is 2 on rank 0 and 3 on rank 1", 1: "the last step applied is 1 on rank 0 and 2 on rank 1",
                  3: r"what is under way is \[\] on rank 0 and \[1, 2\] on rank 1"}[delay]
    with pytest.raises(RuntimeError, match=f"the ranks have parted: {difference}"):
        optimizer.exchange()
    for each, state in zip((model, optimizer), saved):
        each.load_state_dict(state)
    for step in range(3, 7):
        train(model, optimizer, 1, step)
        assert agree(optimizer)


@ranks.on(1)
def test_an_exchange_does_not_look_at_each_parameter():
    asked = []
    for parameters in (20, 200):
        local = LocalUpdates(torch.optim.SGD([nn.Parameter(torch.randn(256)) for _ in range(parameters)], 0.1), send_budget=0.5)
        with mock.patch.object(torch.Tensor, "__dlpack__", autospec=True, side_effect=torch.Tensor.__dlpack__) as ask:
            local.exchange()
        asked.append(ask.call_count)
    assert 0 < asked[0] == asked[1]


@ranks.on(1)
def test_the_hook_keeps_the_memory_into_which_it_packs():
    model = nn.Linear(64, 64)
    state, kept = lamina.torch.LayerDropping(lamina.Options(drop_ratio=0.0), backend="cpu").bind(model), []
    pack = state.backend.pack
    with mock.patch.object(state.backend, "pack", lambda world_size: kept.append(pack(world_size)) or kept[-1]):
        for _ in range(4):
            state.reduce([torch.ones_like(each) for each in model.parameters()])
    assert len(kept) == 4 and len({each.data_ptr() for each in kept}) == 1


if __name__ == "__main__":
    dying()
