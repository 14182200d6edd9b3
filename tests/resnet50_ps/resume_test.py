#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Kills real runs of the parameter server and resumes them: resume_test.py PROGRAM MPIRUN..."""

import json
import os
import pathlib
import signal
import tempfile
import time
from functools import partial

from runs import DEADLINE_SECONDS, PROGRAM, TRAINING, at_once, checkpoints, command, ranks_of, require, run, start, wait_for

EVERY_3 = ["--checkpoint-every", "3"]
AT_THE_END = ["--checkpoint-every", "100"]


def kill_after_first_checkpoint(output: pathlib.Path) -> None:
    mpirun = start(command(output, *EVERY_3, steps=1000))
    wait_for(lambda: checkpoints(output), mpirun, "a checkpoint")
    os.kill(ranks_of(mpirun)[-1], signal.SIGKILL)
    killed_at = time.monotonic()
    mpirun.communicate(timeout=DEADLINE_SECONDS)
    require(mpirun.returncode != 0, "a run that lost a worker ended with status 0")
    require(time.monotonic() - killed_at < 10, "a run that lost a worker went on for more than 10 s")


def lines(output: pathlib.Path) -> list[dict]:
    """The metrics without what depends on the clock, or on the model being sent whole after a resume."""
    read = [json.loads(line) for line in (output / "with" / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in line if "seconds" not in key and "down" not in key} for line in read]


def other_topology(at: pathlib.Path, ranks: int, *options: str) -> None:
    """Resumed after 2 steps equals uninterrupted."""
    whole, cut = at / "whole", at / "cut"
    require(run(command(whole, *AT_THE_END, *options, ranks=ranks, steps=4)).returncode == 0, f"{at.name} fails")
    require(run(command(cut, *AT_THE_END, *options, ranks=ranks, steps=2)).returncode == 0, f"{at.name} fails")
    resumed = run(command(cut, *AT_THE_END, *options, "--resume", ranks=ranks, steps=4))
    require(resumed.returncode == 0 and "resumed after step 2" in resumed.stdout, resumed.stderr)
    require(checkpoints(cut)[-1].read_bytes() == checkpoints(whole)[-1].read_bytes(), f"{at.name}: the last checkpoints differ")


def other_workers(at: pathlib.Path) -> None:
    """Another number of workers is refused, or takes up the mean of the residuals on request."""
    require(run(command(at, *AT_THE_END, steps=2)).returncode == 0, "the run fails")
    refused = run(command(at, *AT_THE_END, "--resume", ranks=4, steps=4))
    require(refused.returncode != 0 and "is of 2 workers, not of 3 workers; --merge-residuals" in refused.stderr,
            refused.stderr)
    merged = run(command(at, *AT_THE_END, "--resume", "--merge-residuals", ranks=4, steps=4))
    require(merged.returncode == 0 and "resumed after step 2" in merged.stdout, merged.stderr)


def all_damaged(at: pathlib.Path) -> None:
    """Where no checkpoint is good, a run that was to go on does not begin anew."""
    require(run(command(at, *AT_THE_END, steps=2)).returncode == 0, "the run fails")
    for each in checkpoints(at):
        each.write_bytes(each.read_bytes()[:-1000])
    refused = run(command(at, *AT_THE_END, "--resume", steps=4))
    require(refused.returncode != 0 and "can be taken up" in refused.stderr, refused.stderr)


def killed_run(at: pathlib.Path) -> None:
    """A run that is killed and resumed equals an uninterrupted one."""
    whole, killed = at / "whole", at / "killed"
    # In one process here and over MPI there: both give the same bits.
    uninterrupted = run([PROGRAM, *TRAINING, *EVERY_3, "--steps", "5", "--output", str(whole), "--transport", "inprocess"])
    require(uninterrupted.returncode == 0, uninterrupted.stderr)

    kill_after_first_checkpoint(killed)
    other = run(command(killed, *EVERY_3, "--resume", "--drop-ratio", "0.5"))
    require(other.returncode != 0 and "is of another run" in other.stderr, other.stderr)
    shorter = run(command(killed, *EVERY_3, "--resume", steps=2))
    require(shorter.returncode != 0 and "is beyond --steps 2" in shorter.stderr, shorter.stderr)
    empty = run(command(at / "empty", *EVERY_3, "--resume"))
    require(empty.returncode != 0 and "there is no checkpoint to resume from" in empty.stderr, empty.stderr)

    # A newer one that is damaged: the one before it is taken, and that is said.
    damaged = killed / "with" / "checkpoint-000000000004.lamina"
    damaged.write_bytes(checkpoints(killed)[-1].read_bytes()[:-1000])
    resumed = run(command(killed, *EVERY_3, "--resume"))
    require(resumed.returncode == 0, resumed.stderr)
    require(str(damaged) in resumed.stderr, "the damaged checkpoint was passed over in silence: " + resumed.stderr)
    require("resumed after step" in resumed.stdout, resumed.stdout)
    require(lines(killed) == lines(whole), "the metrics differ")
    require(checkpoints(killed)[-1].read_bytes() == checkpoints(whole)[-1].read_bytes(),
            "the last checkpoints differ")


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        at = pathlib.Path(directory)
        at_once(partial(killed_run, at),
                partial(other_topology, at / "hybrid", 4, "--topology", "hybrid", "--workers-per-node", "2"),
                partial(other_topology, at / "allreduce", 2, "--topology", "allreduce", "--selection", "agreed"),
                partial(other_topology, at / "overlap", 2, "--topology", "allreduce", "--selection", "agreed", "--decide", "ahead",
                        "--overlap", "step"),
                partial(other_workers, at / "other_workers"), partial(all_damaged, at / "all_damaged"))


main()
