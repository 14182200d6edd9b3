#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What the studies of benchmarks/lab make of figures, and one of them, small: studies_test.py STUDY PROGRAM. Over a cluster it ends with 77
where there can be none."""

import json
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile

from here import LAB, require, skip_without_clusters

import common  # noqa: E402
import converge  # noqa: E402
import incast  # noqa: E402
import overlap  # noqa: E402
import run as table_1  # noqa: E402


def experiment(output: pathlib.Path) -> None:
    options = ["--rates", "1 Gb/s", "--topologies", "first", "--steps", "3", "--recorded-steps", "3", "--rows", "nodes, R = 0.95",
               "flat, R = 0.95, udp, p = 0.1"]
    done = subprocess.run([sys.executable, str(LAB / "run.py"), "--program", sys.argv[2], "--output", str(output), *options],
                          capture_output=True, text=True, check=False)
    require(done.returncode == 0, f"{done.stdout}\n{done.stderr}")
    written = json.loads((output / "results.json").read_text())
    require(written["runs"][0]["segments"] == "offloaded", f"does not say over which links: {written['runs']}")
    nodes, packets = written["results"]
    require(nodes["worker_seconds"] >= 0.388 and nodes["server_seconds"] >= 0.072, f"too quick: {nodes}")
    require(0 < nodes["node_seconds"] < nodes["communication_seconds"], f"the node's share is none: {nodes}")
    require(0.03 < nodes["sent_up"] < 0.5 and 0.03 < packets["sent_up"] < 0.5, f"layers are not dropped: {nodes}, {packets}")
    require("| nodes, R = 0.95 |" in (output / "table.md").read_text(), "the table lacks the row")


def reports(_) -> None:
    """What is made of figures that are made up."""
    # Of 60 samples of 100 numbers, drawn from a law whose mean is known: 95 % of the intervals should hold it.
    drawing = random.Random(5)
    held = 0
    for _ in range(60):
        low, high = incast.interval([drawing.expovariate(1.0) for _ in range(100)], statistics.fmean)
        held += low <= 1.0 <= high
    require(50 <= held <= 60, f"{held} of 60 intervals hold the mean")
    values = [float(each) for each in range(1, 201)]
    random.Random(3).shuffle(values)
    require(incast.p99(values) == 198.0 and incast.p99([5.0]) == 5.0, "of 200 the 99th percentile is the 198th")
    names = [(row.rate, row.name) for row in incast.ROWS]
    require(len(set(names)) == len(names) and all((row.rate, row.name) in names for row in incast.QUICK_ROWS), "rows of one name")

    cell = overlap.Cell(2, "1 Gb/s", 0.4)
    found = {"plain MPI_Allreduce": 2.0, "DDP as it comes": 1.0, "DDP, bf16_compress_hook": 0.6, "DDP, PowerSGD rank 2": 0.5, "everything, backward": 1.1,
             "everything, bf16, backward": 0.59, "R = 0.95 ahead, step": 0.4}
    results = [overlap.Result(cell, row, [{"total_seconds": seconds, "sent_bytes": 102.2e6}], [1.0]) for row, seconds in found.items()]
    verdicts = {each.row: overlap.verdict(results, each) for each in results}
    # Each against those that lose no more of a sum.
    require(verdicts["everything, backward"] == "**loses**, 1.10 of DDP as it comes", str(verdicts))
    require(verdicts["everything, bf16, backward"] == "ties, 0.98 of DDP, bf16_compress_hook", str(verdicts))
    require(verdicts["R = 0.95 ahead, step"] == "0.80 of DDP, PowerSGD rank 2", str(verdicts))
    require("| everything, backward | 1.100 | 1.10 to 1.10 | 0.700 |  |  | 102.2 | 0.855 |" in overlap.table(results), overlap.table(results))
    require(all(set(names) <= set(overlap.ROWS) for names in overlap.TABLES.values()), "a table of rows that there are not")
    require(overlap.Cell(4, "1 Gb/s", 1.28).dense_seconds > 1.27, "three quarters of two models at 1 Gb/s")

    first = table_1.TOPOLOGIES["first"]
    model = 4 * 25_557_032
    # By nodes the model goes over the server's link once for each node, each way; flat once for each worker.
    require(first.link_bytes(table_1.ROWS["nodes, everything"], 2 * model, 2 * model) == 4 * model, "two nodes")
    require(first.link_bytes(table_1.ROWS["flat, everything"], 4 * model, 4 * model) == 8 * model, "four workers")
    dense, dropping = (table_1.Result(row, "first, by nodes", "1 Gb/s", 5, 0.4, 0.1, seconds, 0.1, 0.5 + seconds, 2e8, 2e8, 1.0, 1.0, 3.4)
                       for row, seconds in (("nodes, everything", 3.0), ("nodes, R = 0.95", 0.3)))
    text = table_1.table([dense, dropping])
    require("| -90.0 % |" in text and "| the paper, dropping | 0.408 | 0.085 | 0.182 |" in text, text)
    require(all(setting in converge.SETTINGS for setting in ("everything", "R = 0.95")), "the baseline")

    with tempfile.TemporaryDirectory() as directory:
        at = pathlib.Path(directory)
        common.write(at, [dense], {"date": "one"}, "a table")
        both = common.with_results(common.read(at, lambda fields: table_1.Result(**fields)), [dropping, dense])
        require(both == [dense, dropping], f"old results are gone, or stand twice: {both}")
        common.write(at, both, {"date": "two"}, "a table")
        common.write(at, both, {"date": "two"}, "a table")
        require(json.loads((at / "results.json").read_text())["runs"] == [{"date": "one"}, {"date": "two"}], "not the runs")


STUDIES = {"reports": reports, "run": experiment}
name = sys.argv[1]
if name == "run":
    skip_without_clusters()
with tempfile.TemporaryDirectory() as directory:
    STUDIES[name](pathlib.Path(directory))
