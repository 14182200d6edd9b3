# SPDX-License-Identifier: MIT
"""Layer dropping for torch.nn.parallel.DistributedDataParallel:

    state = lamina.torch.register(ddp, drop_ratio=0.95)     # after DDP(...), before the first backward

and local updates, for any optimizer and without DDP:

    optimizer = lamina.torch.LocalUpdates(torch.optim.AdamW(model.parameters()), send_budget=0.04, fragment_elements=4096)
"""

from typing import Any, Optional, cast

try:
    import torch
except ImportError as error:
    raise ImportError("lamina.torch needs PyTorch: pip install torch") from error
from torch.nn.parallel import DistributedDataParallel

import lamina
from lamina.torch._checkpoint import per_rank
from lamina.torch._local import LocalUpdates
from lamina.torch._merge import merge_states
from lamina.torch._optimizer import skip_held, warn_of_optimizer
from lamina.torch._options import given_options
from lamina.torch._report import StepReport, Totals
from lamina.torch._state import GradBucket, LayerDropping, refuse_sharded

__all__ = ["LayerDropping", "LocalUpdates", "StepReport", "Totals", "hook", "merge_states", "per_rank", "register", "skip_held"]


# DDP looks at these annotations.
def hook(state: LayerDropping, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The communication hook: `ddp.register_comm_hook(state, hook)`, with a state that is bound to the model."""
    return state.take(bucket)


def register(ddp: DistributedDataParallel, *, scaler: Any = None, nonfinite: str = "propagate",
             wire: str = "float32", backend: str = "auto", overlap: bool = False, max_norm: Optional[float] = None,
             log_every: int = 0, **options: Any) -> LayerDropping:
    """Puts layer dropping under a DDP object, on all ranks, before its first backward. `options` are the fields of
    lamina.Options; the others are explained at LayerDropping. Errors as LayerDropping and its bind(); TypeError for what is no
    DDP or for an unknown option, ValueError for drop_ratio together with send_budget."""
    if type(ddp).__name__ == "OptimizedModule":  # what torch.compile gives
        ddp = cast(DistributedDataParallel, ddp._orig_mod)
    if not isinstance(ddp, DistributedDataParallel):
        if isinstance(ddp, torch.nn.Module):
            refuse_sharded(ddp)
        raise TypeError(f"register needs a torch.nn.parallel.DistributedDataParallel, got {type(ddp).__name__}; accelerate and "
                        "Lightning wrap a model only where there are two processes or more")
    state = LayerDropping(given_options("register", options), scaler=scaler, nonfinite=nonfinite, wire=wire, backend=backend,
                          overlap=overlap, max_norm=max_norm, log_every=log_every)
    state.bind(ddp)
    ddp.register_comm_hook(state, hook)
    warn_of_optimizer(state)
    return state
