# SPDX-License-Identifier: MIT
"""torch.topk of 1 % of ResNet-50's gradients on a GPU, compared with a copy that moves as many bytes as a worker's step."""

import statistics
import sys

LEFT_OUT = 77
try:
    import torch
except (ImportError, OSError, RuntimeError) as error:
    print(f"torch.topk: left out, PyTorch cannot be loaded: {error}")
    sys.exit(LEFT_OUT)
if not torch.cuda.is_available():
    print("torch.topk: left out, PyTorch sees no CUDA device")
    sys.exit(LEFT_OUT)

ELEMENTS = 25_557_032
gradient = torch.randn(ELEMENTS, device="cuda")
source = torch.empty(3 * ELEMENTS // 2, device="cuda")
target = torch.empty_like(source)


def milliseconds(run) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def select() -> None:
    torch.topk(gradient.abs(), ELEMENTS // 100, sorted=False)


rounds = [(milliseconds(lambda: target.copy_(source)), milliseconds(select)) for _ in range(52)][2:]
copy, topk = (statistics.median(times) for times in zip(*rounds))
print(f"  {'torch.topk, 1 %':46} {1e3 * topk:10.1f} us  {topk / copy:6.3f} of the copy")
