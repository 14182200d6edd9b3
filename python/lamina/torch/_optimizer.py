# SPDX-License-Identifier: MIT
import weakref
from typing import Any

import torch
from torch.optim import optimizer as optimizers

from lamina.torch._options import share_to_send
from lamina.torch._report import logger
from lamina.torch._state import LayerDropping


_watched: "weakref.WeakSet[LayerDropping]" = weakref.WeakSet()  # until an optimizer has stepped with their parameters


def warn_of_optimizer(state: LayerDropping) -> None:
    """Rank 0 warns in the first step of the optimizer that has the model's parameters, if it normalises gradients or has momentum."""
    if state.rank == 0 and share_to_send(state.options) < 1:
        _watched.add(state)


def _look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for state in list(_watched):
        own = [group for group in optimizer.param_groups if any(map(state.has, group["params"]))]
        if own:
            _watched.discard(state)
        if any(group.get("momentum") or "betas" in group or "eps" in group for group in own):
            logger.warning("layer dropping with %s: gradients that were dropped arrive late and together, and an optimizer that normalises "
                           "them, or has momentum, learns worse from that. Take SGD without momentum, or lamina.torch.LocalUpdates around "
                           "this optimizer", type(optimizer).__name__)


if hasattr(optimizers, "register_optimizer_step_pre_hook"):  # since PyTorch 2.0
    optimizers.register_optimizer_step_pre_hook(_look)


def skip_held(optimizer: torch.optim.Optimizer, state: LayerDropping) -> Any:
    """Lets the optimizer leave alone the parameters of which nothing arrived in the last step: before each of its steps their
    `.grad` becomes None, so that neither momentum nor weight decay moves them. A batch that was skipped stays as it is. By default they get a
    gradient of zero. Which of the two learns better was not measured.

    Returns a handle; `handle.remove()` ends it. Needs PyTorch 2.0: RuntimeError before that.
    """
    if not hasattr(optimizer, "register_step_pre_hook"):
        raise RuntimeError(f"skip_held needs PyTorch 2.0 or later, for optimizers' register_step_pre_hook; this is {torch.__version__}")

    seen = state.passes

    def leave_out(*_: Any) -> None:
        nonlocal seen
        # Not after a batch that was skipped, whose NaN the optimizer or a scaler shall see, nor for gradients of no_sync().
        if state.passes != seen and state.last is not None and not state.last.skipped:
            for parameter in state.held_tensors():
                parameter.grad = None
        seen = state.passes

    return optimizer.register_step_pre_hook(leave_out)
