# SPDX-License-Identifier: MIT
"""One rank of the comparison of DDP's communication hooks: started by `run`, which says where and how many.

All hooks take turns in one run, so that what changes with time hits all alike: in each round every hook gets a fresh DDP object, a few steps
that do not count, and a few that do.
"""

import argparse
import copy
import functools
import gc
import json
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import lamina.torch

WARM_UP = 3  # PowerSGD sends everything until step 2


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = 4 * width

        def convolution(source, to, size, by=1):
            return [nn.Conv2d(source, to, size, by, size // 2, bias=False), nn.BatchNorm2d(to)]
        self.body = nn.Sequential(*convolution(inputs, width, 1), nn.ReLU(), *convolution(width, width, 3, stride), nn.ReLU(),
                                  *convolution(width, outputs, 1))
        self.shortcut = (nn.Sequential(*convolution(inputs, outputs, 1, stride)) if inputs != outputs or stride != 1
                         else nn.Identity())

    def forward(self, x):
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet50():
    """He et al. 2016: 161 layers, 25,557,032 parameters."""
    layers, inputs = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, stride if block == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


def plain(ddp):
    return None


def default(hook, ddp):
    ddp.register_comm_hook(None, hook)


def power_sgd(rank, ddp):
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def dropping(options, ddp):
    return lamina.torch.register(ddp, **options)


def under_ddp(hook, model, **options):
    """The module to train, its optimizer, and the state of lamina's hook."""
    ddp = DDP(model, gradient_as_bucket_view=True, **options)
    return ddp, torch.optim.SGD(ddp.parameters(), 0.01), hook(ddp)


def by_local_updates(model, **options):
    return model, lamina.torch.LocalUpdates(torch.optim.SGD(model.parameters(), 0.01), **options), None


ONE_BUCKET = {"bucket_cap_mb": 1000}  # with several PowerSGD starts collectives from callbacks, in which gloo aborts
VARIANTS = {
    "plain allreduce": (functools.partial(default, default_hooks.allreduce_hook), ONE_BUCKET),  # of everything, when backward has ended
    "DDP, no hook": (plain, {}),
    "allreduce_hook": (functools.partial(default, default_hooks.allreduce_hook), {}),
    "fp16_compress_hook": (functools.partial(default, default_hooks.fp16_compress_hook), {}),
    "bf16_compress_hook": (functools.partial(default, default_hooks.bf16_compress_hook), {}),
    **{f"powerSGD_hook, rank {rank}": (functools.partial(power_sgd, rank), ONE_BUCKET) for rank in (1, 2, 4, 8)},
    "lamina, R = 0": (functools.partial(dropping, {"drop_ratio": 0.0}), {}),
    "lamina, R = 0.95": (functools.partial(dropping, {"drop_ratio": 0.95}), {}),
    "lamina, R = 0.95, bfloat16": (functools.partial(dropping, {"drop_ratio": 0.95, "wire": "bfloat16"}), {}),
    "lamina, R = 0.95, fragments": (functools.partial(dropping, {"drop_ratio": 0.95, "fragment_elements": 65536}), {}),
    "lamina, R = 0, overlap": (functools.partial(dropping, {"drop_ratio": 0.0, "overlap": True}), {}),
    "lamina, R = 0.95, overlap": (functools.partial(dropping, {"drop_ratio": 0.95, "overlap": True}), {}),
    "lamina, R = 0.95, fragments, overlap": (functools.partial(dropping, {"drop_ratio": 0.95, "fragment_elements": 65536,
                                                                      "overlap": True}), {}),
    "lamina, R = 0.99, fragments": (functools.partial(dropping, {"drop_ratio": 0.99, "fragment_elements": 65536}), {}),
}
# Without DDP; a step sends 1 % of DDP's bytes, as in the study.
LOCAL = {
    "lamina, local updates, int4": {"send_budget": 0.074, "fragment_elements": 4096, "payload": "int4"},
    "lamina, local updates, int4, a step later": {"send_budget": 0.074, "fragment_elements": 4096, "payload": "int4", "delay": 1},
}


def interface_bytes(name):
    """Sent by an interface so far, headers included."""
    with open("/proc/net/dev", encoding="ascii") as lines:
        for line in lines:
            if line.strip().startswith(name + ":"):
                return int(line.split(":")[1].split()[8])
    raise RuntimeError(f"there is no interface {name}")


def measure(given, model, name):
    """Seconds of each part of a few steps, and the bytes of a step."""
    model = copy.deepcopy(model)
    if name in LOCAL:
        module, optimizer, state = by_local_updates(model, **LOCAL[name])
    else:
        hook, options = VARIANTS[name]
        module, optimizer, state = under_ddp(hook, model, **options)
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for step in range(WARM_UP + given.steps):
        images = torch.randn(given.batch, 3, given.image_size, given.image_size, generator=generator)
        labels = torch.randint(1000, (given.batch,), generator=generator)
        optimizer.zero_grad()
        dist.barrier()
        sent, times = interface_bytes(given.interface), [time.perf_counter()]
        loss = nn.functional.cross_entropy(module(images), labels)
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        optimizer.step()
        times.append(time.perf_counter())
        forward, backward, update = (end - begin for begin, end in zip(times, times[1:]))
        if step >= WARM_UP:
            found.append({"forward": forward, "backward": backward, "optimizer": update, "step": times[-1] - times[0],
                          "bytes": interface_bytes(given.interface) - sent,
                          **({f"lamina {part}": seconds for part, seconds in state.last.seconds.items()} if state else {})})
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--interface", required=True, help="whose bytes are counted")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="of each hook in a round")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--only", action="append", choices=[*VARIANTS, *LOCAL])
    parser.add_argument("--output", required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = resnet50()
    found = {name: [] for name in given.only or [*VARIANTS, *LOCAL]}
    for each in range(given.rounds):
        order = list(found) if each % 2 == 0 else list(found)[::-1]
        for name in order:
            found[name] += measure(given, model, name)
    if dist.get_rank() == 0:
        medians = {name: {what: statistics.median(each[what] for each in steps) for what in steps[0]} |
                   {"least step": min(each["step"] for each in steps)} for name, steps in found.items()}
        with open(given.output, "w", encoding="ascii") as file:
            json.dump({"torch": torch.__version__, "lamina": lamina.__version__, "ranks": dist.get_world_size(),
                       "steps": given.rounds * given.steps, "batch": given.batch, "image size": given.image_size,
                       "medians": medians}, file, indent=1)
    dist.barrier()
    gc.collect()  # DDP goes before its group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
