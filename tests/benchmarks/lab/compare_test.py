#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What is compared when nothing is said of it: compare_test.py PROGRAM MPIRUN..."""

import json
import math
import pathlib
import tempfile

from runs import MPIRUN, PROGRAM, TRAINING, require, run

OPTIONS = [each for each in TRAINING if each not in ("--runs", "with")] + ["--steps", "2"]
ROWS = {"plain": "plain MPI_Allreduce", "without": "without layer dropping", "with": "with layer dropping"}


def losses(directory: pathlib.Path) -> list[float]:
    return [step["loss"] for step in map(json.loads, (directory / "metrics.jsonl").read_text().splitlines()) if "step" in step]


def compare(output: pathlib.Path, command: list[str], *kinds: str) -> None:
    """All of these, in this order, and nothing else."""
    ended = run([*command, PROGRAM, *OPTIONS, "--output", str(output)])
    require(ended.returncode == 0, ended.stderr)
    table = ended.stdout.partition("Seconds a step")[2].splitlines()[2:]
    for line, kind in zip(table, kinds):
        require(line.startswith(ROWS[kind] + " "), f"not the row of {ROWS[kind]}: {line!r}")
    require(table[len(kinds)].startswith("with, against without "), f"a row too many: {table}")
    require({each.name for each in output.iterdir()} == set(kinds), f"other directories than of {kinds}")
    require(all(len(losses(output / kind)) == 2 for kind in kinds), "a run has not two steps")
    if "plain" in kinds:  # sums in the order that MPI chooses
        for one, other in zip(losses(output / "plain"), losses(output / "without")):
            require(math.isclose(one, other, rel_tol=1e-3), f"plain {one} and without layer dropping {other} differ")


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        at = pathlib.Path(directory)
        compare(at / "server", [*MPIRUN, "-n", "3"], "plain", "without", "with")
        OPTIONS.extend(["--selection", "agreed", "--topology", "allreduce"])
        compare(at / "allreduce", [*MPIRUN, "-n", "2"], "plain", "without", "with")
        OPTIONS.extend(["--transport", "inprocess"])
        compare(at / "in_process", [], "without", "with")


main()
