# SPDX-License-Identifier: MIT
"""Trains one row on a GPU and prints its record as a line of JSON. All replicas are one batch of models on one device. The records of an
H200 are in benchmarks/results/learning/gpu/records.jsonl; the options are the fields of a record, so that its row is repeated by

    study.py --data FILE --task text --scheme levels --W 4 --steps 2000 --rate 0.0014 --seed 0 --opt adamw --H 3 --pct 0.99
    study.py --data DIRECTORY --task images --scheme dense --W 4 --steps 1500 --rate 0.2 --seed 0 --opt sgd

The other fields of a record are results: loss (nats a byte) or top1 (per cent) at the end, `curve` on the way to it, flushed (the same
after all residuals are sent), up_pct and down_pct (bits of one worker each way, in per cent of float32 in every step; dense and mean have
0), N (parameters), seconds, and card. No field has another name than its option. The text of the records was Python source: another
text has other losses."""

import argparse
import dataclasses
import json
import math
import pathlib
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from gpu.by_score import InInt4, InLevels, InTrits
from gpu.images import Images
from gpu.layout import Replicas
from gpu.optimizers import OPTIMIZERS
from gpu.row import Row, fields_read
from gpu.schemes import Dense, DiLoCo, Mean
from gpu.sparse_loco import SparseLoCo
from gpu.text import Text

TASKS = {"text": Text, "images": Images}
SCHEMES = {"dense": Dense, "mean": Mean, "levels": InLevels, "sparseloco": SparseLoCo, "int4": InInt4, "diloco4": DiLoCo, "trits": InTrits}
TOY_STEPS = 40
POINTS = 10  # of a curve


class Training:
    def __init__(self, task, row: Row):
        self.task, self.row = task, row
        self.scheme = SCHEMES[row.scheme](task.layout, row, task.initial())
        self.replicas = Replicas(task, self.scheme.y)
        self.optimizer = OPTIMIZERS[row.opt](task, self.scheme.y)

    def step(self, step: int) -> torch.Tensor:
        """Step 1, 2, ... of all workers; returns their losses. A dense run has one replica, which gets the batches of all."""
        batch = tuple(each.reshape(len(self.scheme.y), -1, *each.shape[2:]) for each in self.task.batch(self.row.W))
        losses = self.replicas.backward(batch)
        self.optimizer.step(self.replicas.gradients, self.task.rate_at(step, self.row))
        with torch.no_grad():
            self.scheme.exchange(step)
        return losses

    def score(self, parameters: torch.Tensor) -> float:
        return round(self.task.score(parameters, is_last=True), self.task.digits)

    def run(self) -> dict:
        """Trains to the end, or until a parameter is not finite; returns the results."""
        synchronize(self.scheme.x.device)
        begin, curve = time.monotonic(), []
        for step in range(1, self.row.steps + 1):
            self.step(step)
            if step % max(1, self.row.steps // POINTS) == 0:
                curve.append(round(self.task.score(self.scheme.x, is_last=False), 4))
            if step % 50 == 0 and not math.isfinite(float(self.scheme.y[0, 0])):
                break
        synchronize(self.scheme.x.device)
        scheme, elements = self.scheme, self.task.layout.elements
        results = {self.task.metric: self.score(scheme.x),
                   **{name: round(float(bits) / elements / step / 0.32, 4)
                      for name, bits in (("up_pct", scheme.up_bits), ("down_pct", scheme.down_bits))},
                   "N": elements, "curve": curve, "seconds": round(time.monotonic() - begin, 1)}
        if scheme.residual is not None:
            results["flushed"] = self.score(scheme.x - scheme.residual.mean(0) - scheme.server_residual)
        return results


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def arguments(words=None) -> tuple[Row, argparse.Namespace]:
    parser = argparse.ArgumentParser(prog="study.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in dataclasses.fields(Row):
        parser.add_argument(f"--{field.name}", type=field.type, default=field.default, choices=field.metadata["choices"],
                            metavar=None if field.metadata["choices"] else "X", help=f"{field.metadata['help']} (%(default)s)")
    parser.add_argument("--data", type=pathlib.Path, required=True, metavar="PATH",
                        help="text: any file; images: the directory of CIFAR-10's binary version")
    parser.add_argument("--device", type=torch.device, default="cuda", metavar="X", help="cuda or cpu (%(default)s)")
    parser.add_argument("--toy", action="store_true", help=f"a tiny model, and {TOY_STEPS} steps if --steps does not say")
    if parser.parse_args(words).toy:
        parser.set_defaults(steps=TOY_STEPS)
    given = parser.parse_args(words)
    try:
        row = Row(**{field.name: getattr(given, field.name) for field in dataclasses.fields(Row)})
    except ValueError as error:
        parser.error(str(error))
    return row, given


def main(words=None) -> None:
    row, given = arguments(words)
    torch.backends.cuda.matmul.allow_tf32 = True
    kind = TASKS[row.task]
    try:
        task = kind(given.data, row.seed, given.device, *([kind.TOY] if given.toy else []))
        training = Training(task, row)
    except (OSError, ValueError) as error:
        sys.exit(f"study.py: {error}")
    card = torch.cuda.get_device_name(given.device) if given.device.type == "cuda" else "cpu"
    print(json.dumps(fields_read(row) | training.run() | {"card": card}), flush=True)


if __name__ == "__main__":
    main()
