#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What benchmarks/network/overlap.py makes of runs whose figures are made up."""

import importlib.util
import os
import sys

from here import NETWORK, python_with_matplotlib, require

if importlib.util.find_spec("matplotlib") is None:  # which experiment.py draws with
    os.execv(python_with_matplotlib(), [python_with_matplotlib(), *sys.argv])
sys.path.insert(0, str(NETWORK))

import overlap  # noqa: E402


def run(totals: list[float], **more: float) -> dict:
    return {"load": 1.5, "steps": [{"total_seconds": total, "sent_up": 0.5, "sent_down": 0.5, **more} for total in totals]}


def main() -> None:
    cell = overlap.Cell(2, "1 Gb/s", 0.4)
    row = overlap.ROWS["everything, backward"]
    seen = overlap.summary_of(row, cell, [run([1.0, 9.0, 1.1], exposed_seconds=0.5, hidden_seconds=0.25),
                                          run([1.2, 1.3], exposed_seconds=0.7, hidden_seconds=0.35)])
    require(seen["steps"] == 5 and seen["total_seconds"] == 1.2, f"not the median of all runs: {seen}")
    require((seen["least_seconds"], seen["most_seconds"]) == (1.0, 9.0), f"not the spread: {seen}")
    require(abs(seen["exposed_seconds"] - 0.8) < 1e-12, f"not the step without C: {seen}")
    require((seen["waited_seconds"], seen["hidden_seconds"]) == (0.5, 0.25), f"not what the program said: {seen}")
    require(seen["predicted_exposed_seconds"] is None, f"a prediction that nobody made: {seen}")
    require(seen["load"] == [1.5, 1.5], f"not the load of each run: {seen}")
    # The whole model once, at 1448 of 1514 bytes of 1 Gb/s.
    require(abs(seen["bytes_over_goodput"] - 0.8551) < 1e-3, f"not the bytes over the goodput: {seen}")
    plain = overlap.summary_of(overlap.ROWS["plain MPI_Allreduce"], overlap.Cell(2, "unlimited", 0.4), [run([1.0])])
    require(plain["waited_seconds"] is None and plain["bytes_over_goodput"] is None, f"figures of nobody: {plain}")
    text = overlap.table([seen, plain])
    require("**P = 2, 1 Gb/s, C = 0.4 s**" in text and "**P = 2, unlimited, C = 0.4 s**" in text, text)
    require("| everything, backward | 1.200 | 1.00 to 9.00 | 0.800 | 0.500 | 0.250 |  | 102.2 | 0.855 | 1.5, 1.5 |" in text, text)
    for each in overlap.ROWS.values():
        require(each.directory == {"mpi_allreduce": "plain"}.get(each.options[1], each.options[each.options.index("--runs") + 1]),
                f"another directory than the harness writes: {each}")


main()
