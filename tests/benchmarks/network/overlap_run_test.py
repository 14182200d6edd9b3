#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""A tiny run of benchmarks/network/overlap over an emulated cluster: rows are run, kept, and not run again; collectives alone are timed.
Arguments: the harness of a tiny network, and the program of collectives alone."""

import json
import pathlib
import subprocess
import sys
import tempfile

from here import NETWORK, python_with_matplotlib, require, skip_without_clusters

PROGRAM, ALONE = sys.argv[1:]
ROW = "everything, bf16, step"


def run(output: str, *options: str) -> str:
    done = subprocess.run([python_with_matplotlib(), str(NETWORK / "overlap.py"), "--program", PROGRAM, "--alone-program", ALONE,
                           "--output", output, *options], capture_output=True, text=True, check=False)
    require(done.returncode == 0, f"{options}: {done.stdout}\n{done.stderr}")
    return done.stdout


def main() -> None:
    skip_without_clusters()
    with tempfile.TemporaryDirectory() as output:
        options = ("--workers", "2", "--rates", "1 Gb/s", "--compute-seconds", "0.01", "--rounds", "1", "--steps", "2",
                   "--recorded-steps", "2", "--rows", ROW)
        said = run(output, *options)
        require(f"{ROW}: " in said and "is left out" not in said, said)
        written = json.loads((pathlib.Path(output) / "results.json").read_text())
        (environment,), (result,) = written["runs"], written["results"]
        require(isinstance(environment["packet_steering"], bool), f"{environment}")
        turn, = result["turns"]
        require(result["row"] == ROW and len(turn["steps"]) == 2, f"{result}")
        require(turn["drift"] >= 0 and turn["costs"]["alpha"] > 0, f"not calibrated: {turn}")
        require(turn["link_share"] is None, f"with what calibration sent: {turn}")
        require(all(step["sent_bytes"] > 0 and step["total_seconds"] > 0 for step in turn["steps"]), f"{turn}")
        require("together about 0 min" in run(output, *options, "--dry-run"), "what is there would be run again")
        require("The minutes are over" in run(output, *options, "--again", "--budget-minutes", "0.001"), "a session without time goes on")

        run(output, *options, "--again", "--no-calibrate")
        turn, = json.loads((pathlib.Path(output) / "results.json").read_text())["results"][0]["turns"]
        # Of bytes that are counted for ResNet-50, where a tiny network sends its own.
        require(0 < turn["link_share"] < 1, f"nothing of what the interface sent: {turn}")

        run(output, "--alone", "--workers", "2", "--sizes", "4096", "--seconds", "0.01", "--torch-python", "/nonexistent")
        alone = json.loads((pathlib.Path(output) / "alone.json").read_text())
        ways = {each["way"] for each in alone}
        require({"pairwise", "ring", "tree", "pairwise, bfloat16", "MPI_Allreduce", "MPI_Allreduce, ring", "MPI_Iallreduce"} <= ways, f"{ways}")
        require(all({"commit", "congestion_control", "segments", "packet_steering", "within_burst"} <= each.keys() for each in alone), f"{alone}")
        require(all(0 < each["least"] <= each["seconds"] <= each["most"] for each in alone), f"{alone}")


main()
