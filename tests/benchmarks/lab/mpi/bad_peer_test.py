#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What becomes of a run one of whose workers sends a bad frame or dies at a push: bad_peer_test.py BAD_PEER MPIRUN..."""

import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from runs import MPIRUN, PROGRAM, require, run  # noqa: E402

SAID = {
    "corrupted": "the server: worker 1 sent a bad frame: checksum mismatch",
    "truncated": "the server: worker 1 sent a bad frame: frame is truncated",
    "replayed": "the server: worker 1 sent a bad frame: ",
    "of_another_model": "the server: worker 1 sent a bad frame: ",
    "killed_before": "",
    "killed_during": "",
    "killed_after": "",
}


def main() -> None:
    good = run([*MPIRUN, "-n", "3", PROGRAM, "none"])
    require(good.returncode == 0, "a run without a fault failed: " + good.stderr)
    for fault, said in SAID.items():
        begun_at = time.monotonic()
        bad = run([*MPIRUN, "-n", "3", PROGRAM, fault])
        require("the fault" in bad.stderr, f"{fault}: the fault did not take place: {bad.stderr}")
        require(bad.returncode != 0, f"{fault}: the run ended with status 0")
        require(said in bad.stderr, f"{fault}: expected {said!r}, got {bad.stderr!r}")
        require(time.monotonic() - begun_at < 30, f"{fault}: the run went on")


main()
