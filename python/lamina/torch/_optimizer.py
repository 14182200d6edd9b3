# SPDX-License-Identifier: MIT
from typing import Any

import torch

from lamina.torch._state import LayerDropping


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
