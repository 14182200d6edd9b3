# SPDX-License-Identifier: MIT
"""Binding, checkpoints, other numbers of ranks, reports, and what is refused."""

import contextlib
import copy
import io
import logging
import pickle
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import optimizer as optimizers
from torch.nn.parallel import DistributedDataParallel as DDP

import lamina
import lamina.torch
import models
import ranks

BACKENDS = ["cpu", "torch"]

# PyTorch 1.13 cannot read numbers of Python's own back with weights_only.
LOADS_ALONE = {"weights_only": True} if torch.__version__ >= "2" else {}


# --- resume ---

MOMENTUM = {"drop_ratio": 0.9, "momentum": 0.9, "fragment_elements": 4096}
BUDGET = {"send_budget": 0.2, "at_least_every": 4, "warm_up_steps": 8}


@pytest.mark.parametrize("options, backend, overlap, way", [
    (MOMENTUM, "cpu", False, "load"), (BUDGET, "torch", False, "pickle"), (MOMENTUM, "torch", True, "load"), (BUDGET, "cpu", True, "pickle"),
    (MOMENTUM, "cpu", False, "empty")])
@ranks.on(2)
def test_a_resumed_run_is_the_same_bit_for_bit(options, backend, overlap, way):
    options = {**options, "overlap": overlap, "backend": backend}

    def trained(steps):
        model = models.small()
        ddp, state = models.dropping(model, **options)
        models.train(ddp, steps)
        return model, state

    (whole, state), (first, half) = trained(10), trained(4)
    file = io.BytesIO()
    torch.save(half.state_dict(), file)
    file.seek(0)
    _, of_other_backend = models.dropping(models.small(), **{**options, "backend": "cpu" if backend == "torch" else "torch"})
    of_other_backend.load_state_dict(half.state_dict())
    assert torch.equal(of_other_backend.state_dict()["memory"], half.state_dict()["memory"]) and of_other_backend.step == 4

    second = models.small()
    second.load_state_dict(first.state_dict())
    ddp = DDP(second)
    if way == "pickle":
        again = pickle.loads(pickle.dumps(half))
        assert again.step == 4
        again.bind(ddp)
        ddp.register_comm_hook(again, lamina.torch.hook)
    else:
        again = lamina.torch.register(ddp, **options)
        if way == "load":
            again.load_state_dict(torch.load(file, **LOADS_ALONE))
    models.train(ddp, 6, first=5)
    alike = [torch.equal(one, other) for one, other in zip(whole.state_dict().values(), second.state_dict().values())]
    if way == "empty":  # the negative control
        assert not all(alike)
        return
    assert all(alike)
    assert torch.equal(state.state_dict()["memory"], again.state_dict()["memory"])
    assert again.step == 10 and again.totals == state.totals


SHAPES = [(5000,), (300,), (64, 64)]


def weights(options, steps):
    model = models.Weights(*SHAPES)
    ddp, state = models.dropping(model, backend="cpu", **options)
    for step in range(1, steps + 1):
        models.backward(ddp, models.whole_numbers(SHAPES, step, dist.get_rank()))
    return model, ddp, state


def save_all(directory):
    _, _, state = weights({"drop_ratio": 0.8}, 5)
    torch.save(state.state_dict(), f"{directory}/{dist.get_rank()}")
    mean = sum(ranks.gathered(state.residual("all.0"))) / dist.get_world_size()
    assert mean.any()
    if dist.get_rank() == 0:
        torch.save(mean, f"{directory}/mean")


def load_merged(directory, saved_ranks):
    states, world = [torch.load(f"{directory}/{rank}", **LOADS_ALONE) for rank in range(saved_ranks)], dist.get_world_size()
    # The second is the negative control: everybody takes rank 0's.
    for given, merges in ((states, True), ([{**states[0], "world_size": 1}], False)):
        _, _, state = weights({"drop_ratio": 0.8}, 0)
        state.load_state_dict(lamina.torch.merge_states(given, world))
        assert state.step == 5
        mean = sum(ranks.gathered(state.residual("all.0"))) / world
        assert torch.allclose(mean, torch.load(f"{directory}/mean"), rtol=1e-6, atol=0) == merges


def test_another_number_of_ranks_goes_on(tmp_path):
    ranks.run(2, save_all, str(tmp_path))
    ranks.run(3, load_merged, str(tmp_path), 2)


@ranks.on(2)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing():
    _, _, state = weights({"drop_ratio": 0.8}, 3)
    good, before, rank = state.state_dict(), state.state_dict()["memory"], dist.get_rank()
    states, records = ranks.gathered(good), models.recorded()
    weights({"drop_ratio": 0.5}, 0)[2].load_state_dict(good)
    assert "drop_ratio was 0.8 in the saved state and is 0.5 now" in models.messages(records)
    damaged = good["memory"].clone()
    damaged[200] ^= 1
    changes = [({"format": 1}, "format is 1, this version reads 2"), ({"format": None}, "format"),
               ({"names": ["a", "b", "c"]}, r"names\[0\] is 'all.0' here and 'a' in the saved state"),
               ({"shapes": [[5000], [300], [4096]]}, r"of 'all.2', there are 2 shapes here and 1"),
               ({"strides": [[1], [1], [1, 64]]}, r"of 'all.2', strides\[0\] is 64 here and 1"),
               ({"overlap": True}, "overlap was True and is False"),
               ({"names": good["names"][:2]}, "there are 3 shapes and 2 names in the saved state"), ({"world_size": 3}, "saved by one of 3 ranks"),
               ({"rank": 1 - rank}, "saved by rank [01], and this is rank [01]: each rank's residual"),
               ({"options": {**good["options"], "fragment_elements": 4096}}, "fragment_elements was 4096 and is 0"),
               ({"options": {**good["options"], "momentum": 0.9}}, "momentum was 0.9 and is 0.0"),
               *(({"memory": memory}, f"not those that rank {rank} saved: they are damaged, or were mixed.*per_rank")
                 for memory in (damaged, damaged[:70], states[1 - rank]["memory"]))]
    wrong = [*((text, {**good, **changed}) for changed, text in changes), ("the format is NoneType", None),
             *((f"the state has no '{field}'", {key: value for key, value in good.items() if key != field})
               for field in ("names", "totals", "memory", "rank", "checksum"))]
    for text, saved in wrong:
        with pytest.raises(ValueError, match=text):
            state.load_state_dict(saved)
        assert torch.equal(state.state_dict()["memory"], before)
    ahead = weights({"drop_ratio": 0.8, "overlap": True}, 0)[2]
    ranks.refused((ValueError, "overlap was False and is True", lambda: ahead.load_state_dict(good)), *(
        (ValueError, text, lambda given=given: lamina.torch.merge_states(*given)) for text, given in (
        ("all ranks are needed", (states[:1], 2)), ("all ranks are needed", ([], 2)), ("all ranks are needed", ([states[0]] * 2, 2)),
        ("step is 3 on rank 0 and 9 on rank 1", ([states[0], {**states[1], "step": 9}], 2)), ("world_size", (states, 0)),
        ("merge_states: the tensors are not those that rank 1 saved", ([states[0], {**states[1], "memory": states[0]["memory"]}], 2)))))


@pytest.mark.parametrize("options, backend", [({"drop_ratio": 0.9, "fragment_elements": 4096, "momentum": each}, backend)
                                              for each, backend in ((0, "cpu"), (0.5, "torch"))])
@ranks.on(2)
def test_residuals_go_by_name_when_other_parameters_are_trained(options, backend):
    """One of three layers is frozen for the first part of a run."""
    def stepped(ddp, step):
        return models.backward(ddp, models.whole_numbers(SHAPES, step, dist.get_rank()))
    model = models.Weights(*SHAPES)
    model.all[2].requires_grad_(False)
    ddp, state = models.dropping(model, backend=backend, **options)
    for step in range(1, 6):
        stepped(ddp, step)
    before = {name: state.residual(name) for name in state.names}
    assert len(before) == 2 and any(each.any() for each in before.values())
    model.all[2].requires_grad_(True)
    with pytest.raises(RuntimeError, match="'all.2' requires a gradient, and did not.*Make DDP again.*goes by names"):
        stepped(ddp, 6)
    model = copy.deepcopy(model)  # which the first DDP object has no hooks on
    again, new = models.dropping(model, backend=backend, **options)

    def goes_on(old, new, line):
        records = models.recorded()
        new.load_state_dict(old.state_dict())
        assert models.messages(records) == [f"the saved state is of other parameters: {line}"]
        assert new.step == 5 and new.totals.steps == 5
        assert all(torch.equal(new.residual(name), residual) for name, residual in before.items())
    goes_on(state, new, "['all.2'] begin without a residual, and that of none is left out")
    assert not new.residual("all.2").any()
    goes_on(new, state, "none begin without a residual, and that of ['all.2'] is left out")
    for step in range(6, 10):
        assert ranks.agree(stepped(again, step))


# --- binding ---

@ranks.on(2)
def test_ranks_that_are_told_differently_all_say_so():
    def bound(model=models.Weights((10,), (20,)), options={}, **arguments):
        return lamina.torch.LayerDropping(lamina.Options(**options), **arguments).bind(model)

    rank = dist.get_rank()
    for text, given in (("drop_ratio is 0.9 on rank 0 and 0.5 on rank 1", {"options": {"drop_ratio": [0.9, 0.5][rank]}}),
                        ("wire is 'float32' on rank 0", {"wire": ["float32", "bfloat16"][rank]}),
                        ("max_norm is None on rank 0 and 1.0 on rank 1", {"max_norm": [None, 1.0][rank]}),
                        ("nonfinite is 'skip' on rank 0", {"nonfinite": ["skip", "leave_out"][rank]}),
                        ("overlap is False on rank 0 and True on rank 1", {"model": DDP(models.Weights(*SHAPES)), "overlap": rank == 1}),
                        (r"shapes\[1\] is \[20\] on rank 0 and \[21\] on rank 1", {"model": models.Weights((10,), (20 + rank,))}),
                        ("there are 1 names on rank 0 and 2 on rank 1", {"model": models.Weights(*[(10,)] * (1 + rank))}),
                        (r"dtypes\[0\]", {"model": models.Weights((10,)).to([torch.float32, torch.float16][rank])})):
        with pytest.raises(RuntimeError, match=text) as error:
            bound(**given)
        assert ranks.agree(str(error.value))
    assert bound().step == 0  # alike passes


@ranks.on(1)
def test_a_pickled_state_asks_for_its_scaler():
    ddp = DDP(models.Weights(*SHAPES))
    state = lamina.torch.register(ddp, drop_ratio=0.8, scaler=models.Scaler(1024.0))
    again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(state))))
    assert again.state_dict()["names"] == state.names
    with pytest.raises(RuntimeError, match="the pickled state had a scaler"):
        again.bind(models.Weights(*SHAPES))
    assert again.bind(models.Weights(*SHAPES), scaler=models.Scaler(1024.0)).loss_scale() == 1024


@pytest.mark.parametrize("overlap", [False, True])
@ranks.on(2)
def test_a_state_that_one_rank_alone_has_loaded_is_noticed(overlap):
    """Before gradients are summed, which are of different sizes."""
    options = {"drop_ratio": 0.8, "warm_up_steps": 20, "overlap": overlap}
    _, _, state = weights(options, 4)
    _, ddp, again = weights(options, 0)
    if dist.get_rank() == 0:
        again.load_state_dict({**state.state_dict(), "last_choice": 0})
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as summed:
        with pytest.raises(RuntimeError, match="step is 5 on rank 0 and 1 on rank 1; was a state loaded, or did a step fail, on one of them alone"):
            ddp(models.whole_numbers(SHAPES, 5, dist.get_rank())).backward()
    assert summed.called and all(call.args[0].dtype is not torch.float32 for call in summed.call_args_list)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, 4, sparse=True)


@ranks.on(2)
def test_models_and_hooks_that_cannot_be_taken_are_named():
    def bind(model, **arguments):
        return lamina.torch.LayerDropping(**arguments).bind(model)

    def register(**options):
        return lamina.torch.register(DDP(nn.Linear(2, 2)), **options)

    frozen, before, two = DDP(models.Weights((3,), (4,))), models.Weights((3,), (4,)), models.Weights((3,), (4,))
    frozen.module.all[1].requires_grad_(False)
    before.all[1].requires_grad_(False)
    assert lamina.torch.register(DDP(before)).names == ["all.0"]
    two.all[1] = nn.Parameter(torch.zeros(4, device="meta"))
    state = bind(nn.Linear(2, 2))

    def hooked(state, model):
        ddp = DDP(model)
        ddp.register_comm_hook(state, lamina.torch.hook)
        ddp(torch.ones(1, 4)).sum().backward()

    registered = DDP(nn.Linear(4, 4))
    lamina.torch.register(registered)
    ranks.refused(
        (TypeError, "needs a torch.nn.parallel.DistributedDataParallel, got Linear", lambda: lamina.torch.register(nn.Linear(2, 2))),
        (TypeError, "register has no option 'drop_rate'; how layers are chosen say drop_ratio, warm_up_steps", lambda: register(drop_rate=0.5)),
        (ValueError, "register: send_budget stands in place of drop_ratio", lambda: register(drop_ratio=0.95, send_budget=0.05)),
        (ValueError, "1 parameters require a gradient, and 2 did.*requires_grad was changed after it", lambda: lamina.torch.register(frozen)),
        (ValueError, "no parameter that requires a gradient", lambda: bind(nn.ReLU())),
        (TypeError, "'all.0' is of torch.float64", lambda: bind(models.Weights((3,)).double())),
        (TypeError, "'words.weight' has sparse gradients", lambda: bind(Sparse())),
        (TypeError, "'all.0' on cpu and 'all.1' on meta", lambda: bind(two)),
        (TypeError, "backend 'cpu' cannot read gradients on meta", lambda: bind(nn.Linear(2, 2, device="meta"), backend="cpu")),
        (RuntimeError, "has a model already", lambda: state.bind(nn.Linear(2, 2))),
        (KeyError, "no parameter 'x'", lambda: state.residual("x")),
        (RuntimeError, "has no model; call state.bind", lambda: hooked(lamina.torch.LayerDropping(), nn.Linear(4, 4))),
        (RuntimeError, r"a parameter of shape \[5(, 4)?\] is in a bucket and was not in the model",
         lambda: hooked(lamina.torch.LayerDropping().bind(nn.Linear(4, 4)), nn.Linear(4, 5))),
        (RuntimeError, "register_comm_hook", lambda: lamina.torch.register(registered)),
        (TypeError, "optimize_ddp", lambda: lamina.torch.hook(lamina.torch.LayerDropping(), (1, 2))),
        (ValueError, "overlap=True needs every parameter in every step.*find_unused_parameters=True",
         lambda: models.dropping(models.small(), {"find_unused_parameters": True}, overlap=True)),
        (ValueError, "static_graph=True", lambda: models.dropping(models.small(), {"static_graph": True}, overlap=True)),
        (TypeError, "overlap=True needs the DDP object itself.*got Weights", lambda: bind(models.Weights(*SHAPES), overlap=True)))


def sharded():
    from torch.distributed.fsdp import FullyShardedDataParallel

    class Sharded(FullyShardedDataParallel):  # the real one wants an accelerator
        def __init__(self):
            nn.Module.__init__(self)

    ranks.refused((TypeError, "sharded by FSDP", lambda: lamina.torch.register(Sharded())),
                  (TypeError, "sharded by FSDP", lambda: lamina.torch.LayerDropping().bind(nn.Sequential(Sharded()))))
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        return  # FSDP2 came with PyTorch 2.6
    model = fully_shard(nn.Linear(4, 4), mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    ranks.refused((TypeError, "sharded by FSDP", lambda: lamina.torch.register(model)))


def test_fsdp_is_refused_with_the_reason():
    pytest.importorskip("torch.distributed.fsdp", reason="FSDP of this PyTorch cannot be imported by this Python",
                        exc_type=Exception)
    ranks.run(1, sharded)


def test_arguments_and_calls_that_cannot_be_are_named():
    state, linear = lamina.torch.LayerDropping(), nn.Linear(2, 2)
    ranks.refused(
        *((ValueError, text, lambda arguments=arguments: lamina.torch.LayerDropping(**arguments)) for arguments, text in (
            ({"nonfinite": "ignore"}, "nonfinite must be one of propagate, skip, leave_out, got 'ignore'"),
            ({"wire": "int8"}, "wire must be one of float32, bfloat16, got 'int8'"),
            ({"backend": "gpu"}, "backend must be one of auto, cpu, torch, cuda, got 'gpu'"),
            ({"max_norm": 0}, "max_norm must be greater than 0, got 0"), ({"max_norm": float("nan")}, "max_norm must be greater than 0, got nan"),
            ({"max_norm": 1.0, "overlap": True}, "max_norm needs the norm of the whole gradient, which overlap=True does not have"),
            ({"max_norm": 1.0, "nonfinite": "leave_out"}, "max_norm needs the norm of the whole gradient, which leave_out does not have"),
            ({"log_every": -1}, "log_every must not be negative, got -1"),
            ({"scaler": object(), "nonfinite": "skip"}, "with a scaler nonfinite must be 'propagate', got 'skip'"))),
        (RuntimeError, "process group is not initialised", lambda: state.bind(linear)),
        *((RuntimeError, "has no model; call bind", call) for call in (
            state.state_dict, lambda: state.load_state_dict({}), lambda: state.residual("x"))),
        (RuntimeError, "call torch.distributed.init_process_group before", lambda: lamina.torch.LocalUpdates(torch.optim.SGD(linear.parameters(), 0.1))))
    assert state.step == 0 and state.last is None and state.held_parameters() == frozenset()


# --- reports ---

def by_rank(*expected):
    """Rank 0 alone tells."""
    return list(expected) if dist.get_rank() == 0 else []


@ranks.on(2)
def test_lines_warnings_and_scalars():
    records = models.recorded()
    model, ddp, state = weights({"drop_ratio": 0.8, "log_every": 2}, 5)
    assert "3 layers in 3 fragments, 9396 elements" in models.messages(records)[0]
    lines = models.messages(records)[1:]
    assert [line.split(":")[0] for line in lines] == ["step 2", "step 4"][:2 * (dist.get_rank() == 0)]
    assert all("of 3 fragments" in line for line in lines)
    given = models.whole_numbers(SHAPES, 9, dist.get_rank())
    if dist.get_rank() == 1:
        given[1][0] = float("nan")
    models.backward(ddp, given)
    assert records[-1].levelno == logging.WARNING
    assert ("'all.1' on rank 1" if dist.get_rank() == 1 else "another rank") in models.messages(records)[-1]
    writer = mock.Mock()
    state.add_scalars(writer, 7)
    scalars = {tag: (value, step) for (tag, value, step), _ in writer.add_scalar.call_args_list}
    assert set(scalars) == {"lamina/sent_bytes_ratio", "lamina/sent_fragments", "lamina/threshold", "lamina/skipped",
                            *(f"lamina/seconds/{part}" for part in state.last.seconds)}
    assert scalars["lamina/skipped"] == (1, 7)


@ranks.on(2)
def test_lines_are_seen_without_logging():
    def logged(call):
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            call()
        return [line.split(",")[0] for line in stderr.getvalue().splitlines()]

    def local(backend):
        model = models.small()
        optimizer = lamina.torch.LocalUpdates(torch.optim.SGD(model.parameters(), 0.1), drop_ratio=0, log_every=2, backend=backend)
        models.train_local(model, optimizer, 3)

    lamina.torch._report.logger.handlers[:] = []
    lamina.torch._report.logger.setLevel(logging.NOTSET)
    is_first = dist.get_rank() == 0
    assert logged(lambda: weights({"drop_ratio": 0, "log_every": 2}, 5)) == [
        f"lamina: step {step}: 3 of 3 fragments" for step in (2, 4)] * is_first
    for backend in BACKENDS:
        assert logged(lambda: local(backend)) == ["lamina: step 2: 18 of 18 fragments"] * is_first


@ranks.on(2)
def test_a_layer_that_is_large_beside_the_share_to_send_is_told_of_once():
    def warnings(model, **options):
        records = models.recorded()
        models.dropping(model, **options)
        return [record.getMessage() for record in records if record.levelno == logging.WARNING]

    uneven = (8193,), (1807,)  # 82 and 18 % of the elements
    for shapes, options, expected in (
            (uneven, {"drop_ratio": 0.8}, "layer 'all.0' has 82 % of the elements and goes out whole or not at all, where 20 % of them are to go out "
                                          "in a step; fragment_elements=4096 decides it in smaller fragments"),
            (uneven, {"drop_ratio": 0.75}, None),  # four times the share
            (uneven, {"send_budget": 0.25}, None), (uneven, {"send_budget": 0.2}, "layer 'all.0' has 82 %"),
            (uneven, {"drop_ratio": 0.9, "fragment_elements": 8192}, "a fragment of 'all.0' has 82 % of the elements and goes"),
            (uneven, {"drop_ratio": 0.99, "fragment_elements": 4096}, None),  # there is no smaller one
            ([(200_000,), (461_000,)], {"drop_ratio": 0.9}, "; fragment_elements=65536 decides it"),  # 66,100 elements are to go out
            ([(4,), (5_000,), (5_000,), (5_000,)], {"drop_ratio": 0.9}, None),
            ([(4096,), (1,)], {"drop_ratio": 0.99}, None), ([(4097,), (1,)], {"drop_ratio": 0}, None)):
        found = warnings(models.Weights(*shapes), **options)
        assert len(found) == len(by_rank(expected) if expected else []) and all(expected in line for line in found), found
    records = models.recorded()
    lamina.torch.LocalUpdates(torch.optim.SGD(models.Weights(*uneven).parameters(), 0.1), send_budget=0.2)
    assert [record.getMessage().split(" has")[0] for record in records] == by_rank("layer 'group 0, parameter 0'")


@pytest.mark.skipif(not hasattr(optimizers, "register_optimizer_step_pre_hook"),
                    reason=f"PyTorch {torch.__version__} has no register_optimizer_step_pre_hook")
@ranks.on(2)
def test_an_optimizer_that_learns_worse_is_told_of_once():
    def told(optimizer, drop_ratio=0.8):
        records = models.recorded()
        other = torch.optim.AdamW([nn.Parameter(torch.zeros(3))])
        ddp, _ = models.dropping(models.small(), drop_ratio=drop_ratio, fragment_elements=4096)
        optimizer = optimizer(ddp.parameters())
        other.step()
        models.train(ddp, 2, optimizer)
        return [line.split(":")[0] for line in models.messages(records) if line.startswith("layer dropping with")]

    assert told(lambda own: torch.optim.SGD(own, 0.01, weight_decay=0.1)) == []
    assert told(lambda own: torch.optim.SGD(own, 0.01, momentum=0.9)) == by_rank("layer dropping with SGD")
    for name in ("AdamW", "RMSprop", "Adagrad", "NAdam"):
        assert told(lambda own: getattr(torch.optim, name)(own)) == by_rank(f"layer dropping with {name}")
    assert told(lambda own: torch.optim.AdamW(own), drop_ratio=0) == []


def held():
    model, ddp, state = weights({"drop_ratio": 0.8}, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1)

    def values():
        return {name: [parameter.detach().clone(), *(torch.as_tensor(moment).clone() for moment in optimizer.state[parameter].values())]
                for name, parameter in zip(state.names, model.all)}

    def step(number):
        models.backward(ddp, models.whole_numbers(SHAPES, number, dist.get_rank()))
        before, waits = values(), state.held_parameters()
        optimizer.step()
        is_same = {name: list(map(torch.equal, after, before[name])) for name, after in values().items()}
        return waits, {name for name, same in is_same.items() if not same[0]}, {name for name, same in is_same.items() if not all(same[1:])}

    everything = set(state.names)
    waits, moved, _ = step(2)
    assert waits and moved == everything  # weight decay moves what waits, too
    handle = lamina.torch.skip_held(optimizer, state)
    waits, moved, touched = step(3)
    assert waits and moved == touched == everything - waits
    # A batch that is skipped keeps its NaN, and gradients of no_sync() are the optimizer's.
    bad = models.whole_numbers(SHAPES, 9, dist.get_rank())
    bad[0][0] = float("nan")
    models.backward(ddp, bad)
    kept = [parameter.detach().clone() for parameter in model.all]

    def restore():
        with torch.no_grad():
            for parameter, before in zip(model.all, kept):
                parameter.copy_(before)
    sgd = torch.optim.SGD(model.parameters(), 1.0)
    lamina.torch.skip_held(sgd, state)
    sgd.step()
    assert all(torch.isnan(parameter).any() for parameter in model.all)
    restore()
    ddp.zero_grad()
    with ddp.no_sync():
        ddp(models.whole_numbers(SHAPES, 10, dist.get_rank())).backward()
    sgd.step()
    assert all(not torch.equal(parameter, before) for parameter, before in zip(model.all, kept))
    restore()
    handle.remove()
    assert step(4)[1] == everything


def test_skip_held_leaves_parameters_and_their_moments_alone():
    if not hasattr(torch.optim.Optimizer, "register_step_pre_hook"):
        with pytest.raises(RuntimeError, match="skip_held needs PyTorch 2.0"):
            lamina.torch.skip_held(torch.optim.SGD([torch.zeros(1)], 0.1), None)
        pytest.skip(f"optimizers of PyTorch {torch.__version__} have no register_step_pre_hook")
    ranks.run(2, held)
