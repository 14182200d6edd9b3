#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Runs whose network loses packets, in one process but for those without a server over UDP: lossy_test.py PROGRAM MPIRUN..."""

import json
import pathlib
import tempfile
from functools import partial

from runs import COUNTED, PROGRAM, TRAINING, at_once, command, require, run

EVERY_FIFTH = ["--inject-loss", "0.2"]
BOUNDED = ["--loss-bound", "0.2", "--loss-bound-down", "0.2", *EVERY_FIFTH]
TOGETHER = ["--topology", "allreduce"]
THREE = ["--workers", "3"]  # whose slices of the largest layers have four chunks
BOUNDED_UP = ["--loss-bound", "0.3", *EVERY_FIFTH]
UDP = ["--transport", "udp", "--link-rate", "10000000000"]


def train(output: pathlib.Path, *options: str, steps: int = 4) -> list[dict]:
    """Its steps, without what depends on the clock."""
    over = ["--transport", "inprocess"]
    return trained(output, [PROGRAM, *TRAINING, *over, "--steps", str(steps), "--output", str(output), *options])


def trained(output: pathlib.Path, program: list[str]) -> list[dict]:
    ended = run([*program, "--drop-ratio", "0.5"])
    require(ended.returncode == 0, ended.stderr)
    lines = map(json.loads, (output / "with" / "metrics.jsonl").read_text().splitlines())
    return [{key: line[key] for key in line if "seconds" not in key} for line in lines if "counters" not in line]


def learnt(lines: list[dict]) -> list[dict]:
    """What a run came to, without bytes and packets, which each way counts for itself."""
    return [{key: line[key] for key in line
             if key not in COUNTED and not any(each in key for each in ("bytes", "sent_", "lost_"))} for line in lines]


def check_losses(steps: list[dict], bound: float) -> None:
    """Some is lost on the way up, and no more than may be."""
    steps = [line for line in steps if "step" in line]
    require(all(step["lost_up"] <= bound and step["lost_down"] == 0 for step in steps), f"more is lost than may be: {steps}")
    require(any(step["lost_up"] > 0 for step in steps) == (bound > 0), f"what is lost does not fit its bound: {steps}")
    require(sum(step["repeated"] for step in steps) > 0 and all(step["wire_bytes_up"] > 0 for step in steps), str(steps))


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


def together(at: pathlib.Path) -> None:
    """Without a server: with a bound of 0 the run without loss, digit for digit; with one, what is lost comes later."""
    whole = train(at / "whole", *TOGETHER, steps=3)
    reliable = train(at / "reliable", *TOGETHER, *EVERY_FIFTH, steps=3)
    check_losses(reliable, 0)
    require(learnt(reliable) == learnt(whole), f"differ:\n{whole}\n{reliable}")
    first = train(at / "first", *TOGETHER, *BOUNDED_UP, "--max-age", "2", steps=3)
    require(first == train(at / "second", *TOGETHER, *BOUNDED_UP, "--max-age", "2", steps=3), "two runs differ")
    check_losses(first, 0.3)
    gone = train(at / "gone", *TOGETHER, *BOUNDED_UP, "--max-age", "2", "--on-loss", "zero", steps=3)
    require(learnt(gone) != learnt(first), "what is lost is gone either way")


def together_in_payloads(at: pathlib.Path) -> None:
    """Without a server, in any payload, what a server makes; of local updates, too, some may be lost."""
    server = train(at / "server", "--payload", "int8", steps=2)
    workers = train(at / "workers", *TOGETHER, "--payload", "int8", *EVERY_FIFTH, steps=2)
    check_losses(workers, 0)
    require(learnt(workers) == learnt(server), f"differ:\n{server}\n{workers}")
    for updates in ("gradients", "local"):
        lossy = [*TOGETHER, *THREE, "--updates", updates, "--payload", "float16", "--loss-bound", "0.5", *EVERY_FIFTH]
        check_losses(train(at / updates, *lossy, steps=2), 0.6)  # of two chunks one, which may be the longer


def together_over_udp(at: pathlib.Path) -> None:
    """The same over sockets: no other numbers with a bound of 0, and replicas alike with any."""
    whole = train(at / "whole", *TOGETHER, *THREE, steps=3)
    reliable = trained(at / "udp", command(at / "udp", *TOGETHER, *UDP, *EVERY_FIFTH, steps=3))
    check_losses(reliable, 0)
    require(learnt(reliable) == learnt(whole), f"differ:\n{whole}\n{reliable}")
    for name, options in (("bounded", ["--loss-tags", "off"]), ("local", ["--updates", "local", "--stop", "on-probe"])):
        check_losses(trained(at / name, command(at / name, *TOGETHER, *UDP, *BOUNDED_UP, *options, steps=3)), 0.3)


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        at = pathlib.Path(directory)
        cases = (together, together_in_payloads, together_over_udp, without_loss, bounded, resumed)
        at_once(*(partial(case, at / case.__name__) for case in cases))


main()
