# SPDX-License-Identifier: MIT
"""One row: trains, keeps snapshots, and writes what came out."""

import bisect
import dataclasses
import fcntl
import itertools
import json
import math
import os
import pathlib
import statistics
import time

import torch

import report
from optimizers import OPTIMIZERS, WEIGHT_DECAY
from rows import Row, named

LAST_RATE = 0.1  # of the largest
POINTS = 10  # of a curve
PERIOD = (12, 9, 6, 3, 0)  # steps before the end: over one period of all at once with 1 % in 4 bits, which is scored best right after it
SOME = 4  # the share of the validation that curve and period take
SNAPSHOT_SECONDS = 60


def clipped(gradients: torch.Tensor, norm: "float | None") -> torch.Tensor:
    """Each of (R, N)."""
    return gradients if norm is None else gradients * (norm / (gradients.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1.0)


CLIPPED = {"arrived": False, "gradients": True}  # by each worker


def worker_clip(task, row, replicas) -> "float | None":
    """The norm of a worker's gradient at most. Where it is clipped, before it is accumulated, what arrives is not."""
    if not named(CLIPPED, row, "clipped"):
        return None
    replicas.clip = None
    return task.clip


@dataclasses.dataclass
class Step:
    """What came of a step."""

    loss: float  #: the mean over the workers, of their parameters before the step
    up_bytes: int  #: from one worker to the server
    down_bytes: int  #: from the server to one worker


class Shared:
    """Of schemes whose workers all have the same parameters."""

    def parameters(self):
        return self.replicas.y[0]

    def workers_mean(self):
        return self.parameters()

    def facts(self, step):
        return {}


class Replicas:
    """R copies of the model, y: (R, N), each with the state of its own optimizer."""

    def __init__(self, task, row, replicas: int, sizes: "list[int] | None" = None, decays: float = 1.0):
        """Of the pieces that may stand still by themselves, which divide the layers; None: the layers. Weights decay so many times as
        much as they do by default: 1 / (1 - momentum) where a momentum that others have does not reach the decay."""
        self.clip = task.clip
        self.y = task.initial().repeat(replicas, 1)
        layers = [math.prod(shape) for shape in task.shapes().values()]
        self.sizes = sizes or layers
        ends = list(itertools.accumulate(layers))
        layer_of = [bisect.bisect_right(ends, begin) for begin in [0, *itertools.accumulate(self.sizes)][:-1]]
        is_decayed = [task.is_decayed(name) for name in task.shapes()]
        hidden = [shape if task.is_hidden(name) and sizes is None else None for name, shape in task.shapes().items()]
        # What optimizers do to an element does not depend on the others, so one of them serves all replicas.
        self.optimizer = named(OPTIMIZERS, row, "optimizer")([
            {"params": [piece], "weight_decay": decays * WEIGHT_DECAY[row.optimizer] if is_decayed[layer] else 0.0, "hidden": hidden[layer]}
            for layer, piece in zip(layer_of, torch.split(self.y, self.sizes, dim=1))], replicas)

    def step(self, gradients: torch.Tensor, rate: float, moving: "list[int] | None" = None) -> None:
        """Of the moving pieces; None: of all. The others, and the optimizer's state of them, stay as they are."""
        pieces = torch.split(clipped(gradients, self.clip), self.sizes, dim=1)
        for place, (group, gradient) in enumerate(zip(self.optimizer.param_groups, pieces)):
            group["lr"] = rate
            group["params"][0].grad = gradient if moving is None or place in moving else None
        self.optimizer.step()

    def state(self):
        return {"y": self.y, "optimizer": self.optimizer.state_dict()}

    def load(self, state):
        self.y.copy_(state["y"])
        self.optimizer.load_state_dict(state["optimizer"])


def rate_at(step: int, steps: int, largest: float, warm_up_steps: int) -> float:
    """Of step 1, 2, ..., steps: grows, then falls as a cosine to a tenth."""
    if step <= warm_up_steps:
        return largest * step / (warm_up_steps + 1)
    done = (step - warm_up_steps) / max(1, steps - warm_up_steps)
    return largest * (LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * done)) / 2)


@dataclasses.dataclass
class Progress:
    """How far a row is."""

    step: int = 0
    up_bytes: int = 0  # of one worker, in all steps together
    down_bytes: int = 0
    seconds: float = 0
    losses: list = dataclasses.field(default_factory=list)  # of the steps since the last point of the curve
    curve: list = dataclasses.field(default_factory=list)
    period: list = dataclasses.field(default_factory=list)  # the losses in it


def train(task, scheme, row, snapshot: pathlib.Path) -> dict:
    """Trains to the end, from the snapshot if there is one, and bitwise the same either way; returns the result, ready for JSON."""
    progress = Progress()
    if snapshot.exists():
        saved = torch.load(snapshot, weights_only=False)
        scheme.load(saved["scheme"])
        progress = Progress(**saved["progress"])
    last = time.monotonic()
    is_finite = True
    while progress.step < row.steps and is_finite:
        progress.step += 1
        result = scheme.step(progress.step, rate_at(progress.step, row.steps, row.rate, task.warm_up_steps))
        progress.up_bytes += result.up_bytes
        progress.down_bytes += result.down_bytes
        progress.losses.append(result.loss)
        is_finite = math.isfinite(result.loss)
        is_point = progress.step % max(1, row.steps // POINTS) == 0 or progress.step == row.steps
        in_period = row.steps - progress.step in PERIOD
        if is_finite and (is_point or in_period):
            validation_loss = task.validation_loss(scheme.parameters(), every=SOME)
            progress.period += [validation_loss] if in_period else []
        if is_finite and is_point:
            progress.curve.append({"step": progress.step, "training_loss": round(statistics.fmean(progress.losses), 5),
                                   "validation_loss": round(validation_loss, 5),
                                   "up_bytes": progress.up_bytes, "down_bytes": progress.down_bytes})
            progress.losses = []
        now = time.monotonic()
        if now - last > SNAPSHOT_SECONDS:
            progress.seconds += now - last
            last = now
            save(snapshot, {"scheme": scheme.state(progress.step), "progress": dataclasses.asdict(progress)})
    dense_bytes = 4 * scheme.parameters().numel() * progress.step
    return {"row": row.name(), "task": task.name, "data": task.data, "elements": scheme.parameters().numel(),
            "validation_loss": round(task.validation_loss(scheme.parameters()), 5) if is_finite else None,
            "period_loss": round(statistics.fmean(progress.period), 5) if is_finite else None,
            "workers_mean_loss": round(task.validation_loss(scheme.workers_mean(), every=SOME), 5) if is_finite else None,
            "diverged_at": None if is_finite else progress.step, **scheme.facts(progress.step),
            **(task.facts(scheme.parameters()) if is_finite else {}),
            "up_share": round(progress.up_bytes / dense_bytes, 6), "down_share": round(progress.down_bytes / dense_bytes, 6),
            "seconds": round(progress.seconds + time.monotonic() - last, 1), "torch": torch.__version__,
            "threads": torch.get_num_threads(), "curve": progress.curve}


def save(path: pathlib.Path, what) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(what, partial)
    os.replace(partial, path)


def write(directory: pathlib.Path, row: Row, result: dict) -> None:
    """Replaces the row's line of records.jsonl, or adds it. Several processes may write to one directory."""
    directory.mkdir(parents=True, exist_ok=True)
    lock = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = report.records(directory) | {row.name(): result | {"row": row.name()}}
        partial = directory / "records.partial"
        partial.write_text("".join(json.dumps(found[name]) + "\n" for name in sorted(found)))
        os.replace(partial, directory / "records.jsonl")
    finally:
        os.close(lock)
