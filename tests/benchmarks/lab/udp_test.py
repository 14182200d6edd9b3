#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Runs over real sockets against the same over MPI: udp_test.py PROGRAM MPIRUN..."""

import json
import pathlib
import tempfile
from functools import partial

from runs import COUNTED, at_once, command, require, run

UDP = ["--transport", "udp", "--link-rate", "10000000000"]
EVERY_FIFTH = ["--inject-loss", "0.2"]
COUNTERS = {"sent", "injected_loss", "unsent", "overrun", "placed", "duplicate", "late", "stale", "malformed", "foreign",
            "bad_check", "inconsistent"}


def lines_of(output: pathlib.Path) -> list[dict]:
    """What a run wrote, without what depends on the clock."""
    lines = map(json.loads, (output / "with" / "metrics.jsonl").read_text().splitlines())
    return [{key: line[key] for key in line if "seconds" not in key} for line in lines]


def train(output: pathlib.Path, *options: str, steps: int = 4, ranks: int = 3) -> list[dict]:
    ended = run(command(output, "--drop-ratio", "0.5", *options, steps=steps, ranks=ranks))
    require(ended.returncode == 0, ended.stderr)
    return lines_of(output)


def stripped(lines: list[dict]) -> list[dict]:
    """Of a run with bounds of 0, without what one over MPI does not say."""
    counters = lines.pop()["counters"]
    require(set(counters) == COUNTERS, f"other counters: {counters}")
    require(not any(counters[name] for name in ("malformed", "foreign", "bad_check", "inconsistent")), str(counters))
    for step in lines:
        if "step" not in step:
            continue
        require(step.pop("lost_up") == 0 and step.pop("lost_down") == 0, "lost beyond a bound of 0")
        for key in COUNTED:
            step.pop(key)
    return lines


def same_as_mpi(at: pathlib.Path, name: str, *options: str, sockets: tuple = (), steps: int = 4, ranks: int = 3) -> None:
    """Where a fifth of the packets is lost, every loss, share and byte of a run over MPI."""
    over_mpi = train(at / name / "mpi", *options, steps=steps, ranks=ranks)
    lossy = train(at / name / "udp", *options, *UDP, *sockets, *EVERY_FIFTH, steps=steps, ranks=ranks)
    require(lossy[-1]["counters"]["injected_loss"] > 0, "nothing was lost")
    require(any(step["repeated"] > 0 for step in lossy if "step" in step), "nothing was sent again")
    require(stripped(lossy) == over_mpi, f"{name} differs:\n{over_mpi}\n{lossy}")


def bounded(at: pathlib.Path) -> None:
    """It says what was lost, within the bounds, in either mode."""
    bounds = ["--loss-bound", "0.2", "--loss-bound-down", "0.2", *EVERY_FIFTH, *UDP]
    for mode in ("sync", "async"):
        lines = train(at / mode, *bounds, "--mode", mode, "--selection", "local")
        steps = [line for line in lines if "step" in line]
        require(len(steps) == 4, f"{mode}: not all steps")
        require(all(0 < step["lost_up"] <= 0.2 and 0 <= step["lost_down"] <= 0.2 for step in steps), str(steps))
        require(sum(step["packets"] for step in steps) > 0 and all(step["rate"] > 0 for step in steps), str(steps))
        require(mode == "async" or steps[0]["lost_down"] == 0, "parameters of the first step were lost")


def resumed(at: pathlib.Path) -> None:
    """A checkpoint is of no transport: what MPI began UDP finishes."""
    def without_parameters_sent(lines: list[dict]) -> list[dict]:  # a run that resumes begins with all of them
        return [{key: line[key] for key in line if key not in ("sent_down", "bytes_down")} for line in lines]

    whole = train(at / "whole")
    train(at / "both", "--checkpoint-every", "2", steps=2)
    more = train(at / "both", *UDP, "--checkpoint-every", "2", "--resume")
    first = more[:2]
    both = first + stripped(more[2:])
    require(without_parameters_sent(both) == without_parameters_sent(whole), f"differ:\n{whole}\n{both}")


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        at = pathlib.Path(directory)
        at_once(
            partial(same_as_mpi, at, "flat", steps=20),
            partial(same_as_mpi, at, "nodes", "--topology", "hybrid", "--workers-per-node", "2", ranks=5),
            partial(same_as_mpi, at, "paths", "--selection", "local", sockets=("--interface", "127.0.0.1,127.0.0.0/8", "--mtu", "900")),
            partial(bounded, at / "bounded"),
            partial(resumed, at / "resumed"))


main()
