#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Draws the runs of an output directory: plot.py DIRECTORY makes DIRECTORY/runs.svg. Needs matplotlib."""

import csv
import sys
from pathlib import Path

try:
    import matplotlib
except ImportError:
    sys.exit("plot.py: there is no picture, since matplotlib is not installed")
matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def read(path):
    """The steps of a run and its tests, each by its step: a line that comes again replaces the one before."""
    steps, tests = {}, {}
    with open(path) as file:
        for row in csv.DictReader(file):
            kind = steps if row["loss"] else tests
            kind[int(row["step"])] = {name: float(value) for name, value in row.items() if value}
    return [steps[s] for s in sorted(steps)], [tests[s] for s in sorted(tests)]


def smoothed(values, count=10):
    return [sum(values[max(0, i + 1 - count) : i + 1]) / min(count, i + 1) for i in range(len(values))]


def main():
    if len(sys.argv) != 2 or not list(Path(sys.argv[1]).glob("*/metrics.csv")):
        sys.exit("plot.py: give a directory with runs, RUN/metrics.csv")
    directory = Path(sys.argv[1])
    figure, (by_step, by_bytes, sent) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for path in sorted(directory.glob("*/metrics.csv")):
        steps, tests = read(path)
        name = path.parent.name
        if tests:
            name += f", {100 * tests[-1]['test_accuracy']:.1f} % of the test images right"
        at, loss = [row["step"] for row in steps], smoothed([row["loss"] for row in steps])
        total, totals = 0, []
        for row in steps:
            total += row["up_bytes"] + row["down_bytes"]
            totals.append(total / 1e6)
        by_step.plot(at, loss, label=name)
        by_bytes.plot(totals, loss)
        sent.plot(at, [row["up_bytes"] / 1e6 for row in steps])
    by_step.set(xlabel="step", ylabel="training loss, mean of 10 steps", ylim=0)
    by_bytes.set(xlabel="MB of a sender, up and down", xscale="log", ylim=0)
    sent.set(xlabel="step", ylabel="MB sent up in a step", ylim=0)
    by_step.legend(fontsize="small")
    figure.savefig(directory / "runs.svg")
    print(directory / "runs.svg")


if __name__ == "__main__":
    main()
