# SPDX-License-Identifier: MIT
"""Writes a run as TensorBoard event files."""
from __future__ import annotations

import math
from pathlib import Path

from tensorboardX import SummaryWriter

from run_directory import Run

SUFFIX = ".lamina"
TAGS = {"loss": "train/loss", "accuracy": "train/accuracy", "sent_up": "sent/up", "sent_down": "sent/down",
        "worker_seconds": "seconds/worker", "communication_seconds": "seconds/communication",
        "server_seconds": "seconds/server", "total_seconds": "seconds/total", "learning_rate": "schedule/learning_rate",
        "threshold": "schedule/threshold", "staleness": "schedule/staleness"}


def write(run: Run) -> Path:
    directory = run.path / "tensorboard"
    # TensorBoard shows all event files of a directory, so those of an earlier call would appear twice.
    for old in directory.glob(f"events.out.tfevents.*{SUFFIX}"):
        old.unlink()
    begin = (run.path / "metrics.jsonl").stat().st_mtime - run.elapsed[-1]
    with SummaryWriter(str(directory), filename_suffix=SUFFIX) as writer:
        def add(tag: str, value: float, step: int, elapsed: float) -> None:
            if not math.isnan(value):
                writer.add_scalar(tag, value, step, walltime=begin + elapsed)

        for index, (step, elapsed) in enumerate(zip(run.steps, run.elapsed)):
            for column, tag in TAGS.items():
                add(tag, run.columns[column][index], step, elapsed)
            add("sent/layers", len(run.arrived[index]), step, elapsed)
        for point in run.evaluations:
            for name in ("top1", "top5"):
                add(f"test/{name}", point[name], int(point["step"]), point["elapsed_seconds"])
    return directory
