#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Runs of the lab with a tiny network under mpirun: training_test.py GROUP PROGRAM MPIRUN..."""

import json
import pathlib
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

from here import require

GROUP, PROGRAM, *MPIRUN = sys.argv[1:]
TINY = ["--network", "tiny", "--batch", "4", "--steps", "6", "--learning-rate", "0.05", "--warm-up", "0", "--timeout", "60", "--no-evaluation"]
SUMS, EVERYTHING, HALF = ["--topology", "allreduce"], ["--drop-ratio", "0"], ["--drop-ratio", "0.5"]
MOMENTUM = ["--momentum", "0.9"]
UDP = ["--transport", "udp", "--link-rate", "10000000000", "--selection", "local"]


def lines(ranks: int, *options: str) -> list[dict]:
    done = subprocess.run([*MPIRUN, "-n", str(ranks), PROGRAM, *TINY, *options], capture_output=True, text=True, timeout=120, check=False)
    require(done.returncode == 0, f"{options}: {done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def learnt(ranks: int, *options: str) -> tuple:
    """The losses of a run, and its parameters at the end."""
    all_lines = lines(ranks, *options)
    return *(line["loss"] for line in all_lines if "step" in line), all_lines[-1]["parameters"]


def all_at_once(cases: list) -> list:
    """Three at a time: most of a run is waiting for ranks to start."""
    with ThreadPoolExecutor(3) as threads:
        return [each.result() for each in [threads.submit(learnt, *case) for case in cases]]


def require_equal(cases: list) -> tuple:
    found = all_at_once(cases)
    for case, each in zip(cases, found):
        require(each == found[0], f"{case} learns something else than {cases[0]}:\n{each}\n{found[0]}")
    return found[0]


def ways_are_equal() -> None:
    """All ways to sum the gradients of two workers are bitwise identical: of two numbers there is one order."""
    overlapped = [*SUMS, *EVERYTHING, "--overlap"]
    dense = [(3, *EVERYTHING), (2, "--topology", "mpi_allreduce", *EVERYTHING), (2, *SUMS, *EVERYTHING), (2, *overlapped, "step", "--exchange", "owners"),
             (2, *overlapped, "backward", "--collectives", "ring"),
             (2, *overlapped, "step", "--collectives", "by_type", "--bucket-bytes", "0"), (3, *EVERYTHING, "--fragment-elements", "4096"),
             (3, *EVERYTHING, *UDP)]
    everything = require_equal([(*case, *MOMENTUM) for case in dense])
    agreed = require_equal([(3, *HALF), (2, *SUMS, *HALF)])
    ahead = [*SUMS, *HALF, "--decide", "ahead"]
    later = require_equal([(2, *ahead), (2, *ahead, "--overlap", "step")])
    require(len({everything, agreed, later}) == 3, "what is dropped changes nothing")
    # Where the order of additions differs, rounding does.
    close = [(5, *EVERYTHING), (5, *EVERYTHING, "--workers-per-node", "2"), (4, *SUMS, *EVERYTHING), (4, *overlapped, "step", "--collectives", "halving_doubling")]
    found = all_at_once(close)
    for case, each in zip(close, found):
        require(all(abs(a - b) < 1e-5 for a, b in zip(each[:-1], found[0][:-1])), f"{case}: {each}\n{found[0]}")


def bytes_are_counted() -> None:
    model, head = 34_394 * 4, 2_000
    steps = [line for line in lines(3, *EVERYTHING) if "step" in line]
    require(all(2 * model <= line["bytes_up"] < 2 * (model + head) for line in steps), f"{steps}")
    require(all(abs(line["sent_up"] - 1) < 0.02 and abs(line["sent_down"] - 1) < 0.02 for line in steps), f"{steps}")
    steps = [line for line in lines(2, *SUMS, *EVERYTHING, "--sum-payload", "bfloat16", "--overlap", "backward") if "step" in line]
    require(all(0.24 < line["sent_up"] < 0.27 for line in steps), f"a bfloat16 has half of a float's bytes, and a worker half of the sums: {steps}")
    require(all(line["exposed_seconds"] >= 0 for line in steps), f"{steps}")


def losses_are_bounded() -> None:
    bounded = lines(3, *UDP, *EVERYTHING, "--loss-bound", "0.1", "--inject-loss", "0.2")
    lost = [line["lost_up"] for line in bounded if "step" in line]
    require(max(lost) > 0 and all(each <= 0.1 for each in lost), f"{lost}")
    # With a bound of 0 all of it arrives, however often it is sent.
    require_equal([(3, *UDP, *HALF, "--inject-loss", "0.2"), (3, "--selection", "local", *HALF)])


def recordings_are_replayed() -> None:
    with tempfile.TemporaryDirectory() as directory:
        recording = f"{directory}/gradients"
        recorded = lines(3, *HALF, "--record", recording, "--record-steps", "2")
        require(sorted(each.name for each in pathlib.Path(recording).iterdir()) ==
                ["profile.txt", *(f"worker-{w}-{s}.f32" for w in (0, 1) for s in (0, 1))], "other files")
        replay = ["--replay", recording, "--learning-rate", "1e-6", "--compute-seconds", "0.05"]
        steps = [line for line in lines(5, *HALF, *replay, "--server-seconds", "0.04", "--steps", "3") if "step" in line]
        require(all(line["worker_seconds"] >= 0.05 and line["server_seconds"] >= 0.039 for line in steps), f"too quick: {steps}")
        require(all(0.3 < line["sent_up"] <= 0.7 for line in steps), f"{steps}")
        require(len(recorded) == 7, f"{recorded}")
        for more in (["--overlap", "backward"], ["--overlap", "step", "--exchange", "owners"]):
            steps = [line for line in lines(2, *SUMS, *EVERYTHING, *replay, "--by-layer", *more) if "step" in line]
            # A step is logged in the next one, where that waits for its sums: a single one may look shorter.
            require(sum(line["total_seconds"] for line in steps[:-1]) >= 5 * 0.045, f"{more}: {steps}")
        require_equal([(2, *SUMS, *EVERYTHING, *replay, "--by-layer"), (2, *SUMS, *EVERYTHING, *replay)])


GROUPS = {"ways": [ways_are_equal], "losses": [losses_are_bounded, bytes_are_counted], "replay": [recordings_are_replayed]}
for test in GROUPS[GROUP]:
    test()
