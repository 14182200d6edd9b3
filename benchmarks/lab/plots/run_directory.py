# SPDX-License-Identifier: MIT
"""Reads a run directory. Needs nothing but Python.

A run directory holds two files:

config.json: an object with "name" (what to call the run in legends), "options" (object of the command line),
"workers" (int) and "model": {"elements": N, "layers": [{"name": "conv1.weight", "elements": 9408}, ...]}.

metrics.jsonl: one JSON object a line, of two kinds, and at the end of a run over UDP one of "counters", of no picture. A step:
  {"step": 1, "loss": 6.9, "accuracy": 0.01, "sent_up": 0.066, "sent_down": 0.12, "worker_seconds": 0.4,
   "server_seconds": 0.05, "communication_seconds": 0.2, "total_seconds": 0.65, "learning_rate": 0.01,
   "threshold": 0.002, "arrived": [0, 5, 7], "staleness": 0.0}
(and, of no picture here, "bytes_up", "bytes_down", and "node_seconds", the part of communication that is within a node; of a
run that may lose some of its frames "lost_up" and "lost_down", and counts of packets of no picture),
where "arrived" has the indices of the layers that at least one worker sent, and "threshold" may be null. An evaluation:
  {"evaluation_after_step": 100, "top1": 0.31, "top5": 0.82, "elapsed_seconds": 41.2}
The elapsed time of a step is the running sum of "total_seconds". JSON has no NaN, writers turn it into
null: such a loss, accuracy, learning rate, threshold, staleness or share lost is read as NaN. The last line of a run that was
killed may be cut off; it is ignored, with a warning.
"""
from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

SECONDS = ("worker_seconds", "communication_seconds", "server_seconds")
REQUIRED = ("loss", "accuracy", "sent_up", "sent_down", *SECONDS, "total_seconds")
OPTIONAL = ("learning_rate", "threshold", "staleness", "lost_up", "lost_down")
EVALUATION = ("top1", "top5", "elapsed_seconds")
MAY_BE_NULL = ("loss", "accuracy", "top1", "top5", *OPTIONAL)


class BadRun(Exception):
    """One sentence that names the file, and the line where there is one."""


@dataclass
class Run:
    path: Path
    name: str
    workers: int
    layer_names: list[str]
    layer_elements: list[int]
    steps: list[int] = field(default_factory=list)
    elapsed: list[float] = field(default_factory=list)  # seconds at the end of each step
    arrived: list[list[int]] = field(default_factory=list)  # layers, for each step
    columns: dict[str, list[float]] = field(default_factory=dict)  # REQUIRED and OPTIONAL, a value for each step
    evaluations: list[dict[str, float]] = field(default_factory=list)  # "step" and EVALUATION

    def sent_share(self, most_columns: int) -> tuple[int, list[list[float]]]:
        """Steps a column, and for each layer and column the share of the column's steps in which the layer arrived."""
        width = math.ceil(len(self.steps) / most_columns)
        counts = [[0] * math.ceil(len(self.steps) / width) for _ in self.layer_names]
        for index, layers in enumerate(self.arrived):
            for layer in layers:
                counts[layer][index // width] += 1
        sizes = [min(width, len(self.steps) - begin) for begin in range(0, len(self.steps), width)]
        return width, [[count / size for count, size in zip(row, sizes)] for row in counts]


def read_run(path: Path) -> Run:
    """Throws BadRun."""
    if not path.is_dir():
        raise BadRun(f"{path} is not a directory" if path.exists() else f"{path} does not exist")
    run = _read_config(path)
    run.columns = {name: [] for name in (*REQUIRED, *OPTIONAL)}
    metrics = path / "metrics.jsonl"
    lines = [(number, line) for number, line in enumerate(_read_text(metrics).split("\n"), 1) if line.strip()]
    for number, line in lines:
        where = f"{metrics} line {number}"
        try:
            entry = json.loads(line)
        except ValueError:
            if number != lines[-1][0]:
                raise BadRun(f"{where} is not JSON") from None
            print(f"warning: {where}, the last one, is cut off and was ignored", file=sys.stderr)
            break
        _add(run, entry, where)
    if not run.steps:
        raise BadRun(f"{metrics} has no steps")
    run.elapsed = list(accumulate(run.columns["total_seconds"]))
    return run


def _add(run: Run, entry: Any, where: str) -> None:
    if isinstance(entry, dict) and "step" in entry:
        step = _whole(entry, "step", where)
        if run.steps and step != run.steps[-1] + 1:
            raise BadRun(f"{where} has step {step} after step {run.steps[-1]}")
        layers = entry.get("arrived")
        if not isinstance(layers, list) or not all(type(each) is int for each in layers):
            raise BadRun(f'{where} has no list of layers "arrived"')
        if any(not 0 <= each < len(run.layer_names) for each in layers):
            raise BadRun(f'{where} has a layer in "arrived" that is not among the {len(run.layer_names)} of the model')
        run.steps.append(step)
        run.arrived.append(layers)
        for name in REQUIRED:
            run.columns[name].append(_number(entry, name, where))
        for name in OPTIONAL:
            run.columns[name].append(_number({name: None, **entry}, name, where))
    elif isinstance(entry, dict) and "evaluation_after_step" in entry:
        point = {name: _number(entry, name, where) for name in EVALUATION}
        run.evaluations.append({"step": _whole(entry, "evaluation_after_step", where), **point})
    elif not (isinstance(entry, dict) and "counters" in entry):
        raise BadRun(f"{where} is neither a step nor an evaluation")


def _read_config(path: Path) -> Run:
    config = path / "config.json"
    try:
        values = json.loads(_read_text(config))
    except json.JSONDecodeError as error:
        raise BadRun(f"{config} line {error.lineno} is not JSON") from None
    try:
        layers = values["model"]["layers"]
        return Run(path, str(values["name"]), int(values["workers"]), [str(each["name"]) for each in layers],
                   [int(each["elements"]) for each in layers])
    except KeyError as error:
        raise BadRun(f"{config} has no {error.args[0]!r}, so {path} is no run directory") from None
    except (TypeError, ValueError):
        raise BadRun(f"{config} does not describe a run") from None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise BadRun(f"{path} is missing, so {path.parent} is no run directory") from None
    except OSError as error:
        raise BadRun(f"{path} cannot be read: {error.strerror}") from None


def _number(entry: dict[str, Any], name: str, where: str) -> float:
    value = entry.get(name, "")
    if value is None and name in MAY_BE_NULL:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadRun(f'{where} has no number "{name}"')
    return float(value)


def _whole(entry: dict[str, Any], name: str, where: str) -> int:
    if type(entry[name]) is not int:
        raise BadRun(f'{where} has no whole number "{name}"')
    return entry[name]
