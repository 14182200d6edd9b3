# SPDX-License-Identifier: MIT
from typing import Any, Dict, List, Sequence

import torch

import lamina
from lamina.torch._checkpoint import checksum_of, require_unmixed
from lamina.torch._local_device import joined_slices
from lamina.torch._owned import joined_shards
from lamina.torch._state import _difference


def merge_states(states: Sequence[Dict[str, Any]], world_size: int) -> Dict[str, Any]:
    """The states of all ranks as one, for a run that goes on with another number of ranks: what all ranks together still have to
    contribute is the same.

    Residuals and local deltas are averaged, as are the optimizers' states under LocalUpdates; its shared parameters stay bitwise what
    they were, and what was under way is in the local deltas again.

    Args:
        states: state_dict() of every rank, of LayerDropping or of LocalUpdates.
        world_size: the number of ranks to go on with.

    Returns:
        The state that each of the new ranks loads.

    Raises:
        ValueError: for states of two runs, models or steps, for a damaged one, and if they are not those of all ranks.
    """
    if world_size < 1:
        raise ValueError(f"merge_states: world_size must be at least 1, got {world_size}")
    is_local = any("local_updates" in state for state in states)
    own = [state.get("local_updates", state) for state in states]
    ranks = sorted(-1 if state["rank"] is None else state["rank"] for state in own)
    if not own or ranks != list(range(own[0]["world_size"])):
        raise ValueError(f"merge_states: the states of all ranks are needed, got those of {ranks}")
    states = sorted(states, key=lambda state: state.get("local_updates", state)["rank"])
    own = [state.get("local_updates", state) for state in states]
    for field in ("format", "told", "applied", "names", "shapes", "strides", "step", "options", "overlap", "plan"):
        for state in own:
            if state.get(field, False) != own[0].get(field, False):
                raise ValueError(f"merge_states: {_difference(field, own[0].get(field), state.get(field), state['rank'])}")
    for state, one in zip(states, own):
        require_unmixed("merge_states", one, state if is_local else state["memory"])
    return _local_updates(states, own, world_size) if is_local else _layer_dropping(own, world_size)


def _layer_dropping(states: List[Dict[str, Any]], world_size: int) -> Dict[str, Any]:
    layout = lamina.Layout(dict(zip(states[0]["names"], states[0]["shapes"])))
    fragments = lamina.Selector(layout, fragment_elements=states[0]["options"]["fragment_elements"]).fragments
    memory = _bytes(lamina.merge_states([_view(state) for state in states], fragments))
    return {**states[0], "world_size": world_size, "rank": None, "last_choice": 0, "memory": memory,
            "checksum": checksum_of(None, memory)}


def _local_updates(states: List[Dict[str, Any]], own: List[Dict[str, Any]], world_size: int) -> Dict[str, Any]:
    first, told = own[0], own[0]["told"]
    for state in own:
        if not all(torch.equal(one, other) for one, other in zip(first["shared"], state["shared"])):
            raise ValueError(f"merge_states: the shared parameters differ on rank 0 and on rank {state['rank']}")
    layout = lamina.Layout(dict(zip(told["names"], told["shapes"])))
    sizes = lamina.Selector(layout, fragment_elements=told["fragment_elements"]).fragments.sizes
    kept = {name: [state[name].cpu() for state in own] for name in ("momentum", "rounding")}
    deltas = [sum(shared - state["local"][layer] for state in own) / len(own) for layer, shared in enumerate(first["shared"])]
    if told.get("backend") == "torch":
        rests = [state["rest"] for state in own if state["rest"]]
        of_backend: Dict[str, Any] = {"applied": first["step"], "rest": [torch.zeros_like(each) for each in first["rest"]],
                                      **{name: joined_slices(of, sizes) for name, of in kept.items()}}
    else:
        rests = []
        core = lamina.LocalDelta(layout, fragment_elements=told["fragment_elements"], error_feedback=told["error_feedback"])
        for state in own if told["error_feedback"] else []:
            core.load(_view(state))
            rests.append(list(torch.split(torch.frombuffer(core.rest(), dtype=torch.float32), layout.sizes)))
        core.load(_view(first))
        core.clear_rest()
        for going in first["under_way"]:
            core.abandon(going["step"])
        of_backend = {"memory": _bytes(core.save()), **{name: joined_shards(of, sizes) for name, of in kept.items()}}
    # What waited outside of the local deltas is in them from now on.
    for rest in rests:
        deltas = [delta + each.to(delta.device) / len(own) for delta, each in zip(deltas, rest)]
    merged = {**_mean([{name: value for name, value in state.items() if name != "local_updates"} for state in states]),
              "local_updates": {
                  **first, "world_size": world_size, "rank": None, **of_backend, "under_way": [],
                  "local": [shared - delta for shared, delta in zip(first["shared"], deltas)]}}
    merged["local_updates"]["checksum"] = checksum_of(None, merged)
    return merged


def _mean(values: List[Any]) -> Any:
    """Of the optimizers' states: tensors of floating point are averaged, and whatever else there is, is the first's."""
    first = values[0]
    if isinstance(first, dict) and all(isinstance(each, dict) for each in values):
        keys = [key for key in first if all(key in each for each in values)]
        return {key: _mean([each[key] for each in values]) for key in keys}
    if isinstance(first, torch.Tensor) and first.is_floating_point() and all(isinstance(each, torch.Tensor) for each in values):
        return first if all(torch.equal(first, each) for each in values) else sum(values) / len(values)
    return first


def _view(state: Dict[str, Any]) -> memoryview:
    return memoryview(state["memory"].cpu().contiguous().numpy())


def _bytes(of: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(of), dtype=torch.uint8)
