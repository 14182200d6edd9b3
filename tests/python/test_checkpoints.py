# SPDX-License-Identifier: MIT
"""Checkpoints as frameworks write them: each rank gets its own state back, or an error says which was lost."""

import pytest
import torch
import torch.distributed as dist

import lamina.torch
import models
import ranks

try:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
except ImportError:
    dcp = None
needs_dcp = pytest.mark.skipif(dcp is None, reason=f"PyTorch {torch.__version__} has no torch.distributed.checkpoint.state_dict")


def with_residual(steps=3):
    ddp, state = models.dropping(models.small(), drop_ratio=0.8)
    models.train(ddp, steps)
    return state


def with_local_deltas(steps=3):
    model = models.small()
    local = lamina.torch.LocalUpdates(torch.optim.AdamW(model.parameters(), 0.01), send_budget=0.3, fragment_elements=4096, payload="int8",
                                      delay=2)
    models.train_local(model, local, steps)
    return model, local


# --- states of two ranks in one ---

@needs_dcp
@ranks.on(2)
def test_a_distributed_checkpoint_under_one_key_is_refused_on_each_rank(tmp_path):
    state = with_residual()
    saved = {"dropping": state.state_dict()}
    dcp.save(saved, checkpoint_id=tmp_path)
    dcp.load(saved, checkpoint_id=tmp_path)
    with pytest.raises(ValueError, match="saved by rank . and this is|saved by rank ., and this is|not those that rank . saved"):
        with_residual(0).load_state_dict(saved["dropping"])


@needs_dcp
@ranks.on(2)
def test_a_distributed_checkpoint_with_a_key_for_each_rank_has_all(tmp_path):
    records = models.recorded()
    state, (model, local) = with_residual(), with_local_deltas()
    dcp.save({"dropping": lamina.torch.per_rank(state), "model": lamina.torch.per_rank(model), "optimizer": lamina.torch.per_rank(local)},
             checkpoint_id=tmp_path)
    again, (model_again, local_again) = with_residual(0), with_local_deltas(0)
    dcp.load({"dropping": lamina.torch.per_rank(again), "model": lamina.torch.per_rank(model_again)}, checkpoint_id=tmp_path)
    dcp.load({"optimizer": lamina.torch.per_rank(local_again)}, checkpoint_id=tmp_path)
    assert len(set(ranks.gathered(models.bits(model_again)))) == 2 and models.bits(model_again) == models.bits(model)
    assert again.state_dict()["checksum"] == state.state_dict()["checksum"] and local_again.backend.step == 3
    assert local_again.state_dict()["local_updates"]["checksum"] == local.state_dict()["local_updates"]["checksum"]
    assert not [line for line in models.messages(records) if "being saved" in line]


@ranks.on(2)
def test_a_state_has_the_key_of_its_rank():
    rank = dist.get_rank()
    state = with_residual()
    saved = lamina.torch.per_rank(state).state_dict()
    assert list(saved) == [f"rank{rank}"]
    again = with_residual(0)
    lamina.torch.per_rank(again).load_state_dict({**saved, "rank7": b""})
    assert torch.equal(again.state_dict()["memory"], state.state_dict()["memory"])
    with pytest.raises(ValueError, match=rf"no 'rank{rank}', only \['rank7'\]; for another number of ranks.*merge_states"):
        lamina.torch.per_rank(again).load_state_dict({"rank7": b""})


# --- PyTorch's step without gradients ---

@needs_dcp
@ranks.on(2)
def test_asking_for_the_optimizers_state_takes_no_exchange():
    records = models.recorded()
    model = models.small()
    local = lamina.torch.LocalUpdates(torch.optim.AdamW(model.parameters(), 0.01), send_budget=0.3, fragment_elements=4096)
    before = models.bits(model)
    if dist.get_rank() == 0:  # one rank alone may ask
        saved = get_optimizer_state_dict(model, local)
        assert "LocalUpdates is being saved by get_optimizer_state_dict, which keeps one rank's" in models.messages(records)[-1]
    assert local.backend.step == 0 and local.totals.steps == 0 and models.bits(model) == before
    models.train_local(model, local, 2)
    assert local.backend.step == 2
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match="get_optimizer_state_dict, which drops it; save lamina.torch.per_rank"):
            set_optimizer_state_dict(model, local, saved)


@ranks.on(1)
def test_other_first_steps_are_steps():
    """Neither a rate of zero nor a gradient of zero makes a step one of PyTorch's."""
    for rate, gradient, optimizer, exchanges in ((0.0, 1.0, torch.optim.AdamW, 2), (0.1, 0.0, torch.optim.AdamW, 2),
                                                 (0.1, None, torch.optim.SGD, 2), (0.0, 0.0, torch.optim.AdamW, 1)):
        model = torch.nn.Linear(8, 8)
        local = lamina.torch.LocalUpdates(optimizer(model.parameters(), rate), drop_ratio=0.5)
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = None if gradient is None else torch.full_like(parameter, gradient)
            local.step()
        assert local.backend.step == exchanges


# --- frameworks that keep one rank's state ---

def asked_by(*modules):
    """A function that calls another through frames of these modules, the last of which is the innermost."""
    def called(call):
        for module in reversed(modules):
            names = {"__name__": module, "call": call}
            exec("def through(): return call()", names)
            call = names["through"]
        return call()
    return called


@pytest.mark.parametrize("world", [1, 2])
@ranks.on()
def test_frameworks_that_keep_one_ranks_state_are_told_of(world):
    """Where there is more than one."""
    state, (_, local) = with_residual(), with_local_deltas()
    for modules, framework in [(("__main__", "accelerate.accelerator", "accelerate.checkpointing", "accelerate.optimizer"), "accelerate"),
                               (("transformers.trainer", "accelerate.optimizer"), "the Hugging Face Trainer"),
                               (("lightning.pytorch.trainer.connectors.checkpoint_connector", "lightning.pytorch.strategies.strategy"),
                                "Lightning"),
                               (("torch.distributed.checkpoint.state_dict_saver",), "torch.distributed.checkpoint"),
                               (("torch.distributed.checkpoint.state_dict_loader",), None),
                               (("transformers.trainer", "__main__"), None),  # a callback of the user's own
                               (("accelerate.checkpointing", "__main__", "accelerate.optimizer"), None), (("__main__",), None)]:
        for each, what in ((state, "the residual of layer dropping"), (local, "LocalUpdates")):
            records = models.recorded()
            asked_by(*modules)(each.state_dict)
            told = [f"{what} is being saved by {framework}"] if framework and world > 1 else []
            assert [line.split(", which")[0] for line in models.messages(records)] == told
            records = models.recorded()
            asked_by(*modules)(lamina.torch.per_rank(each).state_dict)
            assert not records
