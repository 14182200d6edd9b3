# SPDX-License-Identifier: MIT
"""Replicas of a model that FSDP2 shards, bfloat16 parameters, reduce(), and what an optimizer has: 2 x 2 ranks over gloo."""

import contextlib
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lamina.torch
import ranks

try:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard
    HAS_HOOK = hasattr(FSDPModule, "set_all_reduce_hook")
except ImportError:
    HAS_HOOK = False
needs_fsdp2 = pytest.mark.skipif(not HAS_HOOK, reason=f"PyTorch {torch.__version__} has no FSDPModule.set_all_reduce_hook")


def sharded(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(3)), nn.Linear(256, 4))
    for block in model[:3]:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def trained(model, optimizer, steps, first=1):
    for step in range(first, first + steps):
        inputs = torch.randn(16, 256, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), inputs[:, :4].argmax(1)).backward()
        optimizer.step()
    return own_bits(model)


def own_bits(model):
    return [each.to_local().detach().clone() for each in model.parameters()]


def are_equal(tensors, group):
    return all(map(torch.equal, *ranks.gathered(tensors, group)))


def meshes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return mesh, mesh["shard"], mesh.get_group("replicate")


def run(mesh, group, steps, **options):
    model = sharded(mesh)
    dropping = lamina.torch.replicate(model, group, **options) if options else None
    return trained(model, torch.optim.SGD(model.parameters(), 0.1), steps), dropping


def replicas():
    _, mesh, group = meshes()
    lamina.torch._report.logger.handlers[:] = []
    with contextlib.redirect_stderr(io.StringIO()) as said:
        some, dropping = run(mesh, group, 4, drop_ratio=0.7, log_every=2)
    lines = [line for line in said.getvalue().splitlines() if line.startswith("lamina: step")]
    fragments = sum(state.last.fragments for state in dropping.groups.values())
    assert [line.split(":")[1].split()[1] for line in lines] == (["2", "4"] if dist.get_rank() == 0 else [])
    assert all(f"of {fragments} fragments" in line for line in lines), lines
    assert are_equal(some, group)
    assert set(dropping.groups) == {"", "0", "1", "2"} and dropping.totals.steps == 4
    assert 0.05 < dropping.totals.ratio < 0.7, dropping.totals
    assert not are_equal(run(mesh, group, 2)[0], group)  # the comparison can fail


def as_native():
    both, mesh, group = meshes()
    native, dense = (run(each, group, 3, **options)[0] for each, options in ((both, {}), (mesh, {"drop_ratio": 0.0})))
    for one, other in zip(native, dense):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def resumed():
    both, mesh, group = meshes()
    whole, _ = run(mesh, group, 4, drop_ratio=0.7)
    model = sharded(mesh)
    first, optimizer = lamina.torch.replicate(model, group, drop_ratio=0.7), torch.optim.SGD(model.parameters(), 0.1)
    trained(model, optimizer, 2)
    second = lamina.torch.replicate(model, group, drop_ratio=0.7)
    second.load_state_dict(first.state_dict())
    assert all(map(torch.equal, trained(model, optimizer, 2, 3), whole))
    ranks.refused((TypeError, r"'0.0.weight' is a DTensor over the ranks .*of which the process group has",
                   lambda: lamina.torch.replicate(sharded(both), group, drop_ratio=0.7)),
                  (TypeError, "replicate needs a module after .*fully_shard, got Linear", lambda: lamina.torch.replicate(nn.Linear(2, 2), group)))


@needs_fsdp2
@pytest.mark.parametrize("test", [replicas, as_native, resumed])
def test_replicas_of_a_sharded_model(test):
    ranks.run(4, test)


@needs_fsdp2
@pytest.mark.parametrize("backend", ["cpu", "torch"])
@ranks.on(4)
def test_local_updates_between_replicas_of_a_sharded_model(backend):
    _, mesh, group = meshes()
    model = sharded(mesh)
    local = lamina.torch.LocalUpdates(torch.optim.AdamW(model.parameters(), 1e-3), process_group=group, send_budget=0.2,
                                      fragment_elements=4096, backend=backend)
    assert not are_equal(trained(model, local, 8), group)
    with local.evaluation_parameters():
        assert are_equal(own_bits(model), group)
    assert 0 < local.totals.ratio < 0.6
    local.finish()
    assert are_equal(own_bits(model), group)
    with pytest.raises(TypeError, match="group 0, parameter 0 is a DTensor over the ranks"):
        lamina.torch.LocalUpdates(torch.optim.SGD(model.parameters(), 0.1), send_budget=0.2)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@ranks.on(2)
def test_a_bfloat16_parameter_has_a_master(backend):
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(80, 70).bfloat16()), nn.Parameter(torch.randn(33))]
    local = lamina.torch.LocalUpdates(torch.optim.SGD(parameters, 0.1), send_budget=1.0, backend=backend)
    for step in range(20):
        for number, each in enumerate(parameters):  # less than bfloat16 of most can say once it is averaged
            each.grad = torch.full_like(each, 0.004 if dist.get_rank() else 0.0)
        local.step()
    assert torch.equal(parameters[0].detach(), local._own.flat[0].view(80, 70).bfloat16())
    assert not torch.equal(local._own.flat[0], local._own.flat[0].bfloat16().float())  # it keeps what the parameter cannot say
    before = parameters[0].detach().clone()
    with local.evaluation_parameters():
        assert ranks.gathered(parameters[0].sum().item()).count(parameters[0].sum().item()) == 2
    assert torch.equal(parameters[0].detach(), before)
    saved = local.state_dict()
    parameters[0].data.zero_()
    local.load_state_dict(saved)
    assert torch.equal(parameters[0].detach(), before)


@ranks.on(2)
def test_reduce_takes_tensors_and_an_all_reduce():
    model = nn.Linear(64, 64)
    state = lamina.torch.LayerDropping(lamina.Options(drop_ratio=0.0)).bind(model)
    gradients = [torch.full_like(each, float(dist.get_rank() + 1)).detach() for each in model.parameters()]
    assert state.reduce(gradients).sent_fragments == 2
    assert all(torch.equal(each, torch.full_like(each, 1.5)) for each in gradients)
    asked = []

    def of_three(tensor):  # whose third has what this one has
        asked.append(tensor.numel())
        own = tensor.clone()
        dist.all_reduce(tensor)
        tensor.add_(own)
    ranks.refused((ValueError, "reduce: 1 gradients for 2 parameters", lambda: state.reduce(gradients[:1])),
                  (ValueError, "reduce: 'weight' has shape", lambda: state.reduce([gradients[0].t()[:3], gradients[1]])))
    state.reduce([torch.ones_like(each) for each in gradients], all_reduce=of_three, world_size=3)
    assert len(asked) == 3 and asked[-1] == 64 * 65


@ranks.on(1)
def test_every_public_method_of_an_optimizer_works():
    model = nn.Linear(4, 4)
    local = lamina.torch.LocalUpdates(torch.optim.SGD(model.parameters(), 0.1), drop_ratio=0.0)
    called = []

    def note(caller, *_, **__):
        called.append(caller)
    arguments = {"step": [], "zero_grad": [], "state_dict": [], "load_state_dict": [local.state_dict()]}
    public = {name for name in dir(torch.optim.Optimizer) if name[0].islower() and callable(getattr(torch.optim.Optimizer, name))}
    hooks = {name for name in public if name.startswith("register_")}
    for name in hooks:
        getattr(local, name)(note)
    for name in public - hooks - {"add_param_group", "profile_hook_step"}:
        getattr(local, name)(*arguments[name])
    ranks.refused((RuntimeError, "add_param_group", lambda: local.add_param_group({})))
    if hooks:
        called.clear()
        local.step()
        local.load_state_dict(local.state_dict())
        assert len(called) == 6 and all(each is local for each in called)
