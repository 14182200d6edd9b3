#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Kills real runs of the parameter server and resumes them: resume_test.py PROGRAM MPIRUN..."""

import json
import os
import pathlib
import signal
import struct
import subprocess
import tempfile
import time
from functools import partial

from runs import (DEADLINE_SECONDS, PROGRAM, TRAINING, at_once, checkpoints, command, ranks_of, require, run, start, wait_for,
                  with_fault)

EVERY_3 = ["--checkpoint-every", "3"]
AT_THE_END = ["--checkpoint-every", "100"]
OWNERS = ["--topology", "allreduce", "--selection", "agreed", "--overlap", "step", "--exchange", "owners"]


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


def killed_in_backward(at: pathlib.Path) -> None:
    """A run with owners that dies in the middle of a backward pass and goes on
    is the one that did not, plan and all."""
    options = [*OWNERS, "--decide", "ahead"]
    whole, killed = at / "whole", at / "killed"
    died = run(command(killed, *EVERY_3, *options, ranks=2), env=with_fault(1, "backward", 5))
    require(died.returncode != 0 and "planned fault in backward" in died.stderr, died.stderr)
    # Another run has another clock: it goes by the plan of this one.
    plan = killed / "with" / "plan.txt"
    uninterrupted = run(command(whole, *EVERY_3, *OWNERS, "--decide", "ahead", "--plan", str(plan), ranks=2))
    require(uninterrupted.returncode == 0, uninterrupted.stderr)
    require((whole / "with" / "plan.txt").read_bytes() == plan.read_bytes(), "a run by a plan has another")
    resumed = run(command(killed, *EVERY_3, *options, "--resume", ranks=2))
    require(resumed.returncode == 0 and "resumed after step 3" in resumed.stdout, resumed.stderr)
    require_same_state(killed, whole)


def require_same_state(one: pathlib.Path, other: pathlib.Path) -> None:
    """But for the text that says how gradients are exchanged."""
    found = [sections_of(checkpoints(each)[-1]) for each in (one, other)]
    differ = [name for name in {*found[0], *found[1]} - {"exchange"} if found[0].get(name) != found[1].get(name)]
    require(not differ, f"the last checkpoints differ in {differ}")


def sections_of(file: pathlib.Path) -> dict[str, bytes]:
    """As checkpoint.hpp has them."""
    read = file.read_bytes()
    sections, at = {}, 40
    while at < len(read):
        name_bytes, section_bytes = struct.unpack_from("<QQ", read, at)
        at += 16
        name = read[at:at + name_bytes].decode()
        sections[name] = read[at + name_bytes:at + name_bytes + section_bytes]
        at += name_bytes + section_bytes
    return sections


def other_exchange(at: pathlib.Path) -> None:
    """What owners have saved a server takes up, and owners again: the file is the one of a run that did not change."""
    server = ["--topology", "ps", "--selection", "agreed"]

    def train(name: str, exchange: list[str], steps: int, *more: str) -> subprocess.CompletedProcess:
        arguments = command(at / name, *AT_THE_END, *exchange, *more, ranks=3 if exchange is server else 2, steps=steps)
        arguments[arguments.index("with")] = "without"
        return run(arguments)

    require(train("changed", OWNERS, 2).returncode == 0, "owners fail")
    refused = train("changed", server, 4, "--resume")
    require(refused.returncode != 0 and "--change-exchange takes it up" in refused.stderr, refused.stderr)
    for exchange, steps in ((server, 4), (OWNERS, 6)):
        changed = train("changed", exchange, steps, "--resume", "--change-exchange")
        require(changed.returncode == 0 and f"resumed after step {steps - 2}" in changed.stdout, changed.stderr)
    require(train("whole", OWNERS, 6).returncode == 0, "owners fail")
    last = [max((at / each / "without").glob("checkpoint-*.lamina")).read_bytes() for each in ("changed", "whole")]
    require(last[0] == last[1], "the last checkpoints differ")


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
                partial(killed_in_backward, at / "owners"), partial(other_exchange, at / "exchange"),
                partial(other_workers, at / "other_workers"), partial(all_damaged, at / "all_damaged"))


main()
