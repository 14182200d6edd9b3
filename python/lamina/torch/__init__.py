# SPDX-License-Identifier: MIT
"""Layer dropping for torch.nn.parallel.DistributedDataParallel:

    state = lamina.torch.register(ddp, drop_ratio=0.95)     # after DDP(...), before the first backward

and local updates, for any optimizer and without DDP:

    optimizer = lamina.torch.LocalUpdates(torch.optim.AdamW(model.parameters()), send_budget=0.04, fragment_elements=4096)
"""

from typing import Any, Optional, TYPE_CHECKING, cast

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
from lamina.torch._options import HookBackend, NonFinite, Wire, given_options
from lamina.torch._report import StepReport, Totals
from lamina.torch._sharded import Replicated, replicate
from lamina.torch._state import GradBucket, LayerDropping, refuse_sharded

if TYPE_CHECKING:
    from typing_extensions import Unpack
    from lamina.torch._options import Choice

__all__ = ["LayerDropping", "LocalUpdates", "Replicated", "StepReport", "Totals", "hook", "merge_states", "per_rank", "register", "replicate",
           "skip_held"]


# DDP looks at these annotations.
def hook(state: LayerDropping, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The communication hook: `ddp.register_comm_hook(state, hook)`, with a state that is bound to the model."""
    return state.take(bucket)


def register(ddp: DistributedDataParallel, *, scaler: Any = None, nonfinite: NonFinite = "propagate", wire: Wire = "float32",
             backend: HookBackend = "auto", overlap: bool = False, max_norm: Optional[float] = None, log_every: int = 0,
             **options: "Unpack[Choice]") -> LayerDropping:
    """Puts layer dropping under a DDP object, on all ranks, before its first backward.

    Args:
        ddp: DDP, or what torch.compile makes of it.
        scaler, nonfinite, wire, backend, overlap, max_norm, log_every: as of LayerDropping.
        options: the fields of lamina.Options, such as drop_ratio.

    Returns:
        What counts and saves: LayerDropping.

    Raises:
        TypeError: for what is no DDP, and for an unknown option.
        ValueError: for an option outside its range, and drop_ratio with send_budget. Others as LayerDropping.bind().
    """
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
