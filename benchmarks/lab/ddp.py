# SPDX-License-Identifier: MIT
"""One rank of PyTorch's DistributedDataParallel over gloo, whose computation takes its time layer by layer as that of the
lab does with --replay --by-layer. Started by overlap.py, which says where and how many; rank 0 writes what its steps took."""

import argparse
import gc
import json
import pathlib
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from paced_model import PacedNetwork, Profile, Recording, layers_of

POWER_SGD_BEGINS = 2  # the first step that it may: those before send everything. They are of the warm-up
ONE_BUCKET_MB = 1000  # with several PowerSGD starts collectives from callbacks, in which gloo aborts
HOOKS = ("none", "bf16", "fp16", "powersgd")


def register(ddp: DDP, hook: str) -> None:
    if hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=POWER_SGD_BEGINS)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook != "none":
        ddp.register_comm_hook(None, getattr(default_hooks, f"{hook}_compress_hook"))


def sent_bytes(interface: str) -> int:
    """By an interface so far, without the headers of Ethernet, IP and TCP with timestamps."""
    for line in pathlib.Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counted = line.partition(":")
        if name.strip() == interface:
            words = counted.split()
            return int(words[8]) - 66 * int(words[9])
    raise RuntimeError(f"there is no interface {interface}")


def a_step(module: torch.nn.Module, network: PacedNetwork, optimizer: torch.optim.Optimizer, recording: Recording) -> dict:
    """Forward, backward and update, and what the computation waited for: from the last gradient to the end of backward."""
    optimizer.zero_grad(set_to_none=True)
    network.gradients = recording.next()
    begin = time.monotonic()
    loss = module(torch.zeros(1, requires_grad=True))
    loss.backward()
    waited = time.monotonic() - network.pace.woke
    network.pace.woke += waited  # waiting is no computation: what is left of that goes on meanwhile
    network.end_of_step()
    optimizer.step()
    return {"total_seconds": time.monotonic() - begin, "exposed_seconds": waited}


def interpreter_seconds(network: PacedNetwork, optimizer: torch.optim.Optimizer, recording: Recording) -> float:
    """That Python takes from one layer to the next where nobody communicates: the median."""
    between = []
    for _ in range(3):
        a_step(network, network, optimizer, recording)
        between += network.pace.between
    return statistics.median(between)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hook", choices=HOOKS, default="none")
    parser.add_argument("--bucket-mb", type=float, help="DDP's own choice without it")
    parser.add_argument("--model", default="resnet50", help="of benchmarks/models")
    parser.add_argument("--replay", type=pathlib.Path, required=True, help="directory of recorded gradients with their profile")
    parser.add_argument("--compute-seconds", type=float, required=True)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--interface", required=True, help="whose bytes are counted")
    parser.add_argument("--output", type=pathlib.Path, required=True)
    given = parser.parse_args()
    if given.hook == "powersgd" and given.warm_up <= POWER_SGD_BEGINS:
        parser.error(f"PowerSGD sends everything until step {POWER_SGD_BEGINS}: the warm-up must be longer")

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shapes = [shape for _, shape in layers_of(given.model)]
    network = PacedNetwork(shapes, Profile(given.replay, len(shapes)), given.compute_seconds)
    recording = Recording(given.replay, dist.get_rank(), shapes, or_zeros=given.hook != "powersgd")
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-6)  # so small that what is replayed does not make numbers grow
    network.pace.interpreter_seconds = interpreter_seconds(network, optimizer, recording)
    bucket_mb = ONE_BUCKET_MB if given.hook == "powersgd" else given.bucket_mb
    ddp = DDP(network, **({} if bucket_mb is None else {"bucket_cap_mb": bucket_mb}))
    register(ddp, given.hook)
    steps = []
    for step in range(given.warm_up + given.steps):
        sent = sent_bytes(given.interface)
        seen = a_step(ddp, network, optimizer, recording)
        if step >= given.warm_up:
            steps.append({**seen, "sent_bytes": sent_bytes(given.interface) - sent})
    if dist.get_rank() == 0:
        given.output.write_text(json.dumps({"torch": torch.__version__, "steps": steps}) + "\n", encoding="ascii")
    dist.barrier()
    # DDP goes before the group: where its reducer is the last to hold the group, it waits for gloo's threads and keeps the interpreter's
    # lock, for which one of them waits that frees a tensor.
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
