# SPDX-License-Identifier: MIT
import dataclasses
from typing import Any, Dict, List, Optional, TYPE_CHECKING

import torch
import torch.distributed as dist

from lamina.torch._options import given_options
from lamina.torch._report import Totals, log
from lamina.torch._state import LayerDropping

if TYPE_CHECKING:
    from typing_extensions import Unpack
    from lamina.torch._options import HookBackend, Choice, NonFinite, Wire

_WHOLE = "shard"  # the only layer of a parameter group: what FSDP has summed up of it on this rank


def is_dtensor(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "to_local") and hasattr(tensor, "device_mesh")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Without its gradient; of a DTensor what is on this rank, in the same memory."""
    return tensor.detach().to_local() if is_dtensor(tensor) else tensor.detach()  # type: ignore[attr-defined, operator, unused-ignore]


def require_replicas(what: str, tensor: Any, group: Optional[dist.ProcessGroup]) -> None:
    """TypeError for a DTensor that has other elements on another rank of the group, or is averaged there by others already."""
    if not is_dtensor(tensor):
        return
    mesh = set(tensor.device_mesh.mesh.flatten().tolist())
    common = sorted(mesh & set(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)))
    if len(common) > 1:
        raise TypeError(f"{what} is a DTensor over the ranks {sorted(mesh)}, of which the process group has {common}: it takes replicas, whose "
                        "ranks have the same shard. Shard over a 1-D mesh, mesh['shard'], and give mesh.get_group('replicate')")


class Replicated:
    """What replicate() gives: the layer dropping of each parameter group of FSDP, by the name of its module."""

    def __init__(self, group: dist.ProcessGroup, made: Dict[str, Any], log_every: int) -> None:
        self.groups: Dict[str, LayerDropping] = {}  #: those that have had a backward pass
        self._process_group, self._made, self._log_every = group, made, log_every
        self._saved: Dict[str, Any] = {}

    def _reduce(self, name: str, summed: torch.Tensor) -> None:
        state = self.groups.get(name)
        if state is None:
            holder = torch.nn.Module()
            holder.register_parameter(_WHOLE, torch.nn.Parameter(summed.new_empty(1).expand(summed.shape)))  # without its memory
            state = LayerDropping(process_group=self._process_group, **self._made).bind(holder)
            if name in self._saved:
                state.load_state_dict(self._saved.pop(name))
            self.groups[name] = state
        state.reduce([summed])
        if self._log_every:
            self._log()

    def _log(self) -> None:
        """One line for all groups, once the last has had its step. Which is the last shows in the first step only."""
        states = list(self.groups.values())
        passes, reports = states[0].passes, [each.last for each in states if each.last is not None]
        if passes > 1 and all(each.passes == passes for each in states):
            summed = {name: sum(getattr(each, name) for each in reports) for name in (
                "fragments", "sent_fragments", "dense_bytes", "sent_bytes")}
            log(dataclasses.replace(reports[0], step=passes, skipped=False, threshold=max(each.threshold for each in reports), **summed),
                self._log_every, dist.get_rank())

    @property
    def totals(self) -> Totals:
        """Of the replicate dimension: bytes of all groups, and the steps of the one that has had most."""
        each = [state.totals for state in self.groups.values()]
        return Totals(max((of.steps for of in each), default=0), *(sum(getattr(of, field.name) for of in each)
                                                                   for field in dataclasses.fields(Totals)[1:]))

    def state_dict(self) -> Dict[str, Any]:
        """Of this rank, between backward passes; save lamina.torch.per_rank(...) of it."""
        return {**self._saved, **{name: state.state_dict() for name, state in self.groups.items()}}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """ValueError as LayerDropping.load_state_dict(), for groups that have not had a backward pass in their first."""
        self._saved = {name: state for name, state in state_dict.items() if name not in self.groups}
        for name, state in self.groups.items():
            if name not in state_dict:
                raise ValueError(f"load_state_dict: the state has no parameter group '{name}', only {sorted(state_dict)}")
            state.load_state_dict(state_dict[name])

    def __repr__(self) -> str:
        return f"Replicated({self._made['options']}, {len(self.groups)} parameter groups, {100 * self.totals.ratio:.1f} % of the bytes)"


def replicate(module: torch.nn.Module, replicate_group: dist.ProcessGroup, *, nonfinite: "NonFinite" = "propagate",
              wire: "Wire" = "float32", backend: "HookBackend" = "auto", log_every: int = 0, **options: "Unpack[Choice]") -> Replicated:
    """Layer dropping between the replicas of a model that FSDP2 shards, in place of the all-reduce of HSDP:

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        dropping = lamina.torch.replicate(model, mesh.get_group("replicate"), drop_ratio=0.95)

    Each parameter group of FSDP selects among the fragments of its own shard, within backward, once FSDP has reduced it. The residual
    is as large as the shard. The host waits for the device once a group.

    Args:
        module: after fully_shard(), before the first backward pass.
        replicate_group: the ranks that have the same shard.
        nonfinite, wire, backend: as of LayerDropping; a gradient that is not finite gives up the step of its own group only.
        log_every: steps between lines of rank 0 of all, one for all groups with their largest threshold; 0: none.
        options: the fields of lamina.Options. A shard is one flat tensor, which is cut into fragments of 4,096 elements unless
            fragment_elements says otherwise.

    Raises:
        TypeError: for a module without fully_shard(), one that is sharded over ranks of replicate_group, or an unknown option.
        ValueError: for an option outside its range.
        RuntimeError: for a PyTorch without FSDPModule.set_all_reduce_hook.
    """
    made: Dict[str, Any] = {"options": given_options("replicate", {"fragment_elements": 4096, **options}), "nonfinite": nonfinite, "wire": wire,
            "backend": backend}
    LayerDropping(log_every=log_every, **made)  # names what is wrong
    found: List[Any] = [(name, each) for name, each in module.named_modules() if any(
        kind.__name__ == "FSDPModule" for kind in type(each).__mro__)]
    if not found:
        raise TypeError(f"replicate needs a module after torch.distributed.fsdp.fully_shard, got {type(module).__name__}")
    if not hasattr(found[0][1], "set_all_reduce_hook"):
        raise RuntimeError(f"replicate needs FSDPModule.set_all_reduce_hook, which PyTorch {torch.__version__} does not have")
    for name, parameter in module.named_parameters():
        require_replicas(f"replicate: '{name}'", parameter, replicate_group)
    replicated = Replicated(replicate_group, made, log_every)
    for name, each in found:
        each.set_all_reduce_hook(lambda summed, name=name: replicated._reduce(name, summed))
    return replicated
