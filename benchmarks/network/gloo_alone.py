# SPDX-License-Identifier: MIT
"""Seconds of an all-reduce of torch.distributed over gloo and nothing else, as collectives_alone.cpp measures others. One rank of it."""

import argparse
import json
import pathlib
import time

import torch
import torch.distributed as dist


def seconds_of(elements: torch.Tensor) -> float:
    """On the rank for which it is most."""
    dist.barrier()
    begin = time.monotonic()
    dist.all_reduce(elements)
    seconds = torch.tensor([time.monotonic() - begin], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", type=int, required=True, help="bytes of float")
    parser.add_argument("--seconds", type=float, default=0.5, help="of each size: 3 to 50 repetitions")
    parser.add_argument("--output", type=pathlib.Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    lines = []
    for size in given.sizes:
        elements = torch.ones(size // 4)
        repetitions = int(min(max(given.seconds / seconds_of(elements), 3), 50))
        taken = []
        for _ in range(repetitions):
            elements.fill_(1)
            taken.append(seconds_of(elements))
        taken.sort()
        lines.append({"way": "gloo", "bytes": size, "seconds": taken[len(taken) // 2], "least": taken[0], "most": taken[-1],
                      "repetitions": repetitions})
    if dist.get_rank() == 0:
        given.output.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="ascii")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
