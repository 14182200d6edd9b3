# SPDX-License-Identifier: MIT
import io
import sys
import zlib
from typing import Any, Dict, Optional, Protocol, cast

import torch
import torch.distributed as dist

from lamina.torch._report import logger

# Modules that write one rank's state for all ranks, and what they are called.
_SAVERS = {"torch.distributed.checkpoint.state_dict_saver": "torch.distributed.checkpoint",
           "torch.distributed.checkpoint.state_dict": "get_optimizer_state_dict",
           "accelerate.checkpointing": "accelerate", "transformers.trainer": "the Hugging Face Trainer",
           **{f"{name}.trainer.connectors.checkpoint_connector": "Lightning" for name in ("lightning.pytorch", "pytorch_lightning")}}
_PASSED_THROUGH = {name.split(".")[0] for name in _SAVERS} | {"lamina", "contextlib", "functools"}


class Saved(Protocol):
    """What can be saved: a module, an optimizer, a scheduler, LayerDropping, LocalUpdates."""

    def state_dict(self) -> Dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class PerRank:
    """See per_rank()."""

    def __init__(self, state: Saved, rank: int) -> None:
        self._state, self._key = state, f"rank{rank}"

    def state_dict(self) -> Dict[str, bytes]:
        file = io.BytesIO()
        torch.save(self._state.state_dict(), file)
        return {self._key: file.getvalue()}

    def load_state_dict(self, state_dict: Dict[str, bytes]) -> None:
        if self._key not in state_dict:
            raise ValueError(f"per_rank: the checkpoint has no '{self._key}', only {sorted(state_dict)}; for another number of ranks "
                             "give the states of all ranks to lamina.torch.merge_states")
        self._state.load_state_dict(torch.load(io.BytesIO(state_dict[self._key]), map_location="cpu"))


def per_rank(state: Saved) -> PerRank:
    """For checkpoints that all ranks write together, as those of torch.distributed.checkpoint: each rank's state under a key of its own,
    so that none is taken for a copy of another and left out.

        dcp.save({"model": per_rank(model), "optimizer": per_rank(local)}, checkpoint_id=folder)

    Args:
        state: whose state_dict() differs from rank to rank: LayerDropping, LocalUpdates, and the module that LocalUpdates trains.

    Returns:
        A Stateful: its state_dict() has one entry, 'rank3' on rank 3, as bytes. Its load_state_dict() raises ValueError where that is
        not there, and else what that of `state` does.
    """
    return PerRank(state, dist.get_rank() if dist.is_initialized() else 0)


def checksum_of(rank: Optional[int], state: Any) -> int:
    """Over the rank that saves a state, and every tensor in it. If the tensors of two ranks were mixed it is another."""
    return _checksum(state, zlib.crc32(str(rank).encode()))


def _checksum(of: Any, checksum: int) -> int:
    if isinstance(of, torch.Tensor):
        return zlib.crc32(cast(Any, of.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()), checksum)
    if isinstance(of, dict):
        of = [of[key] for key in sorted(of, key=str)]
    if isinstance(of, (list, tuple)):
        for each in of:
            checksum = _checksum(each, checksum)
    return checksum


def require_unmixed(what: str, state: Dict[str, Any], everything: Any) -> None:
    """ValueError unless the tensors in `everything` are those that the rank of `state` saved."""
    if checksum_of(state["rank"], everything) != state["checksum"]:
        raise ValueError(f"{what}: the tensors are not those that rank {state['rank']} saved: they are damaged, or were mixed with those "
                         "of other ranks, as torch.distributed.checkpoint does under one key; save lamina.torch.per_rank(...) of it")


def warn_of_saver(what: str) -> None:
    """Called by state_dict(): warns if a framework asks that keeps one rank's state for all. Nothing tells who asks but the stack: up to
    the first frame that belongs to no framework."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == __name__ or name.split(".")[0] not in _PASSED_THROUGH:
            return
        if name in _SAVERS:
            logger.warning("%s is being saved by %s, which keeps one rank's state for all ranks: the others cannot resume. Let each rank "
                           "save lamina.torch.per_rank(...) of it, or a file of its own", what, _SAVERS[name])
            return
        frame = frame.f_back  # type: ignore[assignment, unused-ignore]


def require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise ValueError(otherwise)


def is_count(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**64


def is_flat(what: Any, kind: torch.dtype) -> bool:
    return isinstance(what, torch.Tensor) and what.dtype is kind and what.dim() == 1
