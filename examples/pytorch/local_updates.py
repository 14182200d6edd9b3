# SPDX-License-Identifier: MIT
"""Trains with local updates, each rank with an optimizer of its own:

    torchrun --nproc-per-node 2 examples/pytorch/local_updates.py

A perceptron learns what another, drawn one says of random points. --dense is DDP, and --alone communicates nothing: to compare with.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import lamina.torch

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--send-budget", type=float,
                    help="the share of the parameters that is sent in a step; 0.18 with adamw and 0.074 with sgd, unless given")
parser.add_argument("--payload", choices=["as_is", "float16", "bfloat16", "int8", "int4", "ternary"],
                    help="ternary with adamw and int4 with sgd, unless given")
parser.add_argument("--delay", type=int, default=0, help="steps between sending and applying")
parser.add_argument("--optimizer", default="adamw", choices=["adamw", "sgd"], help="sgd has Nesterov's momentum of 0.9")
parser.add_argument("--outer-rate", type=float, default=1.0)
parser.add_argument("--outer-momentum", type=float, default=0.0)
parser.add_argument("--dense", action="store_true")
parser.add_argument("--alone", action="store_true")
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--batch", type=int, default=32, help="points of a rank")
parser.add_argument("--learning-rate", type=float, help="0.008 with adamw and 0.2 with sgd, unless given")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--save", metavar="FILE", help="keep the model that all ranks share")


def perceptron(seed, width):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def points(teacher, seed, count):
    inputs = torch.randn(count, 32, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return inputs, teacher(inputs).argmax(1)


def main():
    given = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    learning_rate = {"adamw": 0.008, "sgd": 0.2}[given.optimizer] if given.learning_rate is None else given.learning_rate
    teacher, model = perceptron(123, 64), perceptron(given.seed, 256)
    for parameter in teacher.parameters():  # steeper, so that there is more to learn
        parameter.data.normal_()
    if given.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), learning_rate, momentum=0.9, nesterov=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.steps)
    local, trained = None, model
    if given.dense:
        trained = DDP(model)
    elif not given.alone:
        payload, share = {"adamw": ("ternary", 0.18), "sgd": ("int4", 0.074)}[given.optimizer]  # 1 % of the bytes
        local = optimizer = lamina.torch.LocalUpdates(optimizer, send_budget=given.send_budget or share, fragment_elements=4096,
                                                      payload=given.payload or payload, delay=given.delay, outer_rate=given.outer_rate,
                                                      outer_momentum=given.outer_momentum)
    for step in range(given.steps):
        inputs, labels = points(teacher, 10**9 * given.seed + 1 + step * world + rank, given.batch)
        optimizer.zero_grad()
        nn.functional.cross_entropy(trained(inputs), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()

    def tested():
        inputs, labels = points(teacher, 10**12, 4000)
        with torch.no_grad():
            return nn.functional.cross_entropy(model(inputs), labels).item()

    if local is not None:
        local.finish()
        with local.evaluation_parameters(model):  # what all ranks share
            loss = tested()
        if given.save:
            kept = local.shared_state_dict(model)
            if rank == 0:
                torch.save(kept, given.save)
    else:
        loss = tested()
    if rank == 0:
        elements = sum(parameter.numel() for parameter in model.parameters())
        sent = local.totals.sent_bytes / given.steps if local is not None else 0 if given.alone else 4 * elements
        print(f"after {given.steps} steps on {world} ranks: loss {loss:.4f}, {sent:.0f} bytes a step and rank, "
              f"{100 * sent / (4 * elements):.2f} % of the gradients'")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
