#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Runs in one process whose network loses packets: lossy_test.py PROGRAM MPIRUN..."""

import json
import pathlib
import tempfile
from functools import partial

from runs import COUNTED, PROGRAM, TRAINING, at_once, require, run

EVERY_FIFTH = ["--inject-loss", "0.2"]
BOUNDED = ["--loss-bound", "0.2", "--loss-bound-down", "0.2", *EVERY_FIFTH]


def train(output: pathlib.Path, *options: str, steps: int = 4) -> list[dict]:
    """Its steps, without what depends on the clock."""
    ended = run([PROGRAM, *TRAINING, "--transport", "inprocess", "--drop-ratio", "0.5", "--steps", str(steps),
                 "--output", str(output), *options])
    require(ended.returncode == 0, ended.stderr)
    lines = map(json.loads, (output / "with" / "metrics.jsonl").read_text().splitlines())
    return [{key: line[key] for key in line if "seconds" not in key} for line in lines]


def without_loss(at: pathlib.Path) -> None:
    """With a bound of 0 every loss, share and byte of a run that loses nothing."""
    whole = train(at / "whole")
    lossy = train(at / "lossy", *EVERY_FIFTH)
    require(all("lost_up" not in line for line in whole), "a run that loses nothing says what was lost")
    for step in lossy:
        if "step" not in step:
            continue
        require(step.pop("lost_up") == 0 and step.pop("lost_down") == 0, "lost beyond a bound of 0")
        require(step["repeated"] > 0 and step["rounds"] > 1, f"nothing was sent again: {step}")
        for key in COUNTED:
            step.pop(key)
    require(lossy == whole, f"differ:\n{whole}\n{lossy}")


def bounded(at: pathlib.Path) -> None:
    """It says what was lost, within the bounds, and repeats."""
    first = train(at / "first", *BOUNDED)
    require(first == train(at / "second", *BOUNDED), "two runs differ")
    steps = [line for line in first if "step" in line]
    require(all(0 < step["lost_up"] <= 0.2 and 0 <= step["lost_down"] <= 0.2 for step in steps), str(steps))
    require(steps[0]["lost_down"] == 0 and any(step["lost_down"] > 0 for step in steps), "parameters, and not the first")
    require(all(step["packets"] * 1506 >= step["wire_bytes_up"] + step["wire_bytes_down"] > step["bytes_up"]
                for step in steps), "packets and bytes do not fit")


def resumed(at: pathlib.Path) -> None:
    """With other bounds it is another run."""
    train(at, *BOUNDED, "--checkpoint-every", "1", steps=1)
    other = run([PROGRAM, *TRAINING, "--transport", "inprocess", "--drop-ratio", "0.5", "--steps", "2",
                 "--output", str(at), *EVERY_FIFTH, "--checkpoint-every", "1", "--resume"])
    require(other.returncode != 0 and "is of another run" in other.stderr, other.stderr)
    more = train(at, *BOUNDED, "--checkpoint-every", "1", "--resume", steps=2)
    require([line["step"] for line in more if "step" in line] == [1, 2], "the run does not go on")


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        at = pathlib.Path(directory)
        at_once(*(partial(case, at / case.__name__) for case in (without_loss, bounded, resumed)))


main()
