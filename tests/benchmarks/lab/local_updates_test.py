#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Workers that go on with steps of their own: local_updates_test.py PROGRAM MPIRUN..."""

import itertools
import json
import pathlib
import tempfile
from functools import partial

from runs import COUNTED, MPIRUN, PROGRAM, TRAINING, at_once, checkpoints, require, run

LOCAL = ["--updates", "local", "--drop-ratio", "0.5"]
LATER = [*LOCAL, "--delay", "2", "--outer-rate", "0.7", "--outer-momentum", "0.9", "--priority", "value_times_waiting"]
IN_PROCESS = ["--transport", "inprocess"]
TOGETHER = ["--topology", "allreduce"]
SMALL = ["--payload", "int4", "--down-payload", "int8"]
EVERY_FIFTH = ["--inject-loss", "0.2"]
UNIQUE = itertools.count()


def train(at: pathlib.Path, *options: str, steps: int = 5, ranks: int = 0) -> pathlib.Path:
    """In one process, or of so many ranks."""
    output = at / str(next(UNIQUE))
    output.mkdir(parents=True)
    way = [*MPIRUN, "-n", str(ranks), PROGRAM] if ranks else [PROGRAM, *IN_PROCESS]
    ended = run([*way, *TRAINING, "--steps", str(steps), "--output", str(output), "--save", str(model(output)),
                 *options])
    require(ended.returncode == 0, f"{options}: {ended.stderr}")
    return output


def model(output: pathlib.Path) -> pathlib.Path:
    return output / "model.pt"


def metrics(output: pathlib.Path) -> list[dict]:
    lines = map(json.loads, (output / "with" / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "counters" not in line]


def learnt(output: pathlib.Path) -> tuple[list[dict], bytes]:
    """What a run came to, and its model, without seconds, and without bytes and packets, which each way counts for itself."""
    return [{key: line[key] for key in line
             if key not in COUNTED and not any(each in key for each in ("seconds", "bytes", "sent_", "lost_"))}
            for line in metrics(output)], model(output).read_bytes()


def steps_of(output: pathlib.Path) -> list[dict]:
    return [line for line in metrics(output) if "step" in line]


def losses(output: pathlib.Path) -> list[float]:
    return [step["loss"] for step in steps_of(output)]


def timed(at: pathlib.Path) -> None:
    """With a delay the server's answer comes behind the computation, of 0.2 s at least, which stays the worker's."""
    steps = steps_of(train(at, *LATER))
    require(all(step["worker_seconds"] >= 0.2 for step in steps), f"computation is not the worker's: {steps}")


def every_way(at: pathlib.Path) -> None:
    """A server and sums among the workers, MPI and one process: the same, digit for digit. A delay is not the same."""
    for options in (LOCAL, [*LATER, *SMALL]):
        server = learnt(train(at, *options))
        require(learnt(train(at, *options, ranks=3)) == server, f"{options}: MPI differs")
        require(learnt(train(at, *options, "--transport", "udp", ranks=3)) == server, f"{options}: sockets differ")
        require(learnt(train(at, *options, *TOGETHER)) == server, f"{options}: sums among the workers differ")
        require(learnt(train(at, *options, *TOGETHER, ranks=2)) == server, f"{options}: these over MPI differ")
    late = losses(train(at, *LATER))
    in_time = losses(train(at, *(option if option != "2" else "0" for option in LATER)))
    require(late[0] == in_time[0] and late[1] != in_time[1], f"what a delay changes: {in_time} {late}")


def lossy(at: pathlib.Path) -> None:
    """With a bound of 0 nothing is lost, in one process and over sockets; with one what is lost changes the run, and replicas stay alike."""
    for options in (LOCAL, [*LATER, "--payload", "float16"]):
        whole = learnt(train(at, *options))
        for way in ({}, {"ranks": 3}):
            over = ["--transport", "udp"] if way else []
            reliable = train(at, *options, *over, *EVERY_FIFTH, **way)
            require(learnt(reliable) == whole, f"{options}: with a bound of 0 {over} differs")
            require(any(step["repeated"] > 0 for step in steps_of(reliable)), "no packet was lost")
            require(all(step["lost_up"] == 0 for step in steps_of(reliable)), "lost beyond a bound of 0")
            some = train(at, *options, *over, *EVERY_FIFTH, "--loss-bound", "0.2", **way)
            require(all(step["lost_up"] <= 0.2 and step["lost_down"] == 0 for step in steps_of(some)), "more is lost than may be")
            require(any(step["lost_up"] > 0 for step in steps_of(some)) and learnt(some) != whole, f"{options}: {over} loses nothing")
    bounded = [*LATER, *EVERY_FIFTH, "--loss-bound", "0.2"]
    returned = learnt(train(at, *bounded))
    require(learnt(train(at, *bounded)) == returned, "a run in one process does not repeat")
    require(learnt(train(at, *bounded, "--on-loss", "zero")) != returned, "what is lost is gone either way")


def resumed(at: pathlib.Path) -> None:
    """With parts under way, to the last byte of the last checkpoint, as if it had never ended."""
    keeping = ["--checkpoint-every", "100"]
    for more in (SMALL, [*SMALL, *TOGETHER], [*SMALL, "--selection", "local"]):
        whole = train(at, *LATER, *more, *keeping, steps=6)
        cut = train(at, *LATER, *more, *keeping, steps=3)
        on = run([PROGRAM, *IN_PROCESS, *TRAINING, *LATER, *more, *keeping, "--steps", "6", "--output", str(cut), "--resume"])
        require(on.returncode == 0 and "resumed after step 3" in on.stdout, on.stderr)
        require(checkpoints(cut)[-1].read_bytes() == checkpoints(whole)[-1].read_bytes(), f"{more}: resumed differs")
    other = run([PROGRAM, *IN_PROCESS, *TRAINING, *LOCAL, *SMALL, *keeping, "--steps", "9", "--output", str(cut), "--resume"])
    require(other.returncode != 0 and "is of another run" in other.stderr, other.stderr)


def alone(at: pathlib.Path) -> None:
    """One worker whose updates are averaged trains as if nobody shared anything, whatever is held back, cut or late."""
    one = ["--workers", "1"]
    dense = losses(train(at, *one, "--drop-ratio", "0"))
    held_back = losses(train(at, *one, *LOCAL, *SMALL, "--delay", "1"))
    other = losses(train(at, *one, *LOCAL, *SMALL, "--outer-rate", "0.5"))
    distance = max(abs(a - b) for a, b in zip(dense, held_back, strict=True))
    require(distance < 1e-4, f"trains otherwise than alone, by {distance}")
    require(max(abs(a - b) for a, b in zip(dense, other, strict=True)) > 10 * distance, "any run is like any other")


def averaged(at: pathlib.Path) -> None:
    """Everything sent in each step: the mean of the workers' steps is the step by their mean gradient, momentum and all."""
    dense = losses(train(at, "--drop-ratio", "0"))
    local = losses(train(at, "--drop-ratio", "0", "--updates", "local"))
    require(max(abs(a - b) for a, b in zip(dense, local, strict=True)) < 1e-5, f"differ: {dense} {local}")


def small(at: pathlib.Path) -> None:
    """Four bits up, eight down. Without a server each of two workers sends a half of each."""
    server, together = ([metrics(train(at, "--updates", "local", "--drop-ratio", "0", *more, *payload)) for payload in ((), SMALL)]
                        for more in ((), TOGETHER))
    for (whole, cut), direction, least, most in ((server, "bytes_up", 0.12, 0.2), (server, "bytes_down", 0.24, 0.35),
                                                 (together, "bytes_up", 0.18, 0.3)):
        shares = [b[direction] / a[direction] for a, b in zip(whole, cut, strict=True) if "step" in a]
        require(all(least < share < most for share in shares), f"{direction}: {shares}")


def three_workers(at: pathlib.Path) -> None:
    """Whose slices are of different sizes, and some of nothing."""
    three = [*LATER, *SMALL, "--workers", "3"]
    require(learnt(train(at, *three)) == learnt(train(at, *three, *TOGETHER)), "sums among three workers differ")


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        at = pathlib.Path(directory)
        at_once(*(partial(case, at / case.__name__) for case in (every_way, lossy, resumed, alone, averaged, small, three_workers, timed)))


main()
