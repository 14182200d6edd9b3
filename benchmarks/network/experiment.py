#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Runs the rows of the experiment over the emulated cluster; see ./run --help."""

import argparse
import dataclasses
import datetime
import json
import pathlib
import platform
import signal
import statistics
import subprocess
import sys
import tempfile

import plots
import report
from cluster import Cluster, Counters
from settings import PAPER, QUICK_ROWS, RATES, ROWS, TOPOLOGIES, Row, Topology

MODEL_CLASSES = 1000  # as in the paper: 25,557,032 parameters
HEADER_BYTES = 14 + 20 + 32  # Ethernet, IP, and TCP with timestamps
PACKET_BYTES = 1514  # a full one, as the limit of the rate counts it
SEGMENT_BYTES = PACKET_BYTES - HEADER_BYTES
GOODPUT_SHARE = SEGMENT_BYTES / PACKET_BYTES
WARM_UP_STEPS = 2  # the first sends the whole model; then residuals are near empty


@dataclasses.dataclass
class Result:
    row: str
    topology: str
    rate: str
    steps: int
    worker_seconds: float
    server_seconds: float
    communication_seconds: float
    total_seconds: float
    bytes_up: float  # a step, of all frames
    bytes_down: float
    sent_up: float
    sent_down: float
    model_seconds: float | None  # bytes over goodput
    counted_up: int  # payload at the server's interface, over the whole run, without what TCP repeated
    counted_down: int
    said_up: int  # the same by the program, of the workers on other machines
    said_down: int


def median_of(steps: list[dict], key: str) -> float:
    return statistics.median(step[key] for step in steps)


def record(program: str, directory: pathlib.Path, steps: int) -> None:
    """Gradients of two workers of a real run, in its last six steps."""
    if (directory / "worker-1-5.pt").exists():
        return
    print("Recording gradients of a training run ...", flush=True)
    subprocess.run([program, "--transport", "inprocess", "--workers", "2", "--runs", "without", "--steps", str(steps),
                    "--warm-up", "20", "--batch", "32", "--classes", str(MODEL_CLASSES), "--record", str(directory)],
                   check=True, stdout=subprocess.DEVNULL)


def payload(counted: Counters) -> tuple[int, int]:
    return (counted.received_bytes - HEADER_BYTES * counted.received_packets,
            counted.sent_bytes - HEADER_BYTES * counted.sent_packets)


def run_row(program: str, row: Row, topology: Topology, rate: str, steps: int, work: list[str]) -> Result:
    rate_bits = RATES[rate]
    clients = topology.clients(row.by_nodes)
    remote = sum(machine != topology.machines[0] for machine in clients) / len(clients)
    options = [*row.options, "--steps", str(steps), "--threads", "1", *work]
    if row.by_nodes:
        options += ["--topology", "hybrid", "--workers-per-node", str(topology.workers_per_machine)]
    with tempfile.TemporaryDirectory() as directory, Cluster(len(set(topology.machines)), rate_bits) as cluster:
        before = cluster.counters(topology.machines[0])
        cluster.mpirun(topology.machines, [program, *options, "--output", directory], seconds=3600)
        counted = cluster.counters(topology.machines[0]).since(before)
        repeated = cluster.repeated_segments(topology.machines[0])
        run = pathlib.Path(directory) / row.run_name
        all_steps = [line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
                     if "step" in line]
        layers = json.loads((run / "config.json").read_text())["model"]["layers"]
    measured = all_steps[WARM_UP_STEPS:] or all_steps
    up, down = median_of(measured, "bytes_up"), median_of(measured, "bytes_down")
    counted_up, counted_down = (way - SEGMENT_BYTES * again for way, again in zip(payload(counted), repeated))
    # The parameters that the last step has changed go down after it, in no step's metrics.
    last = len(clients) * sum(4 * layers[index]["elements"] for index in all_steps[-1]["arrived"])
    return Result(
        row=row.name, topology=topology.name + (", by nodes" if row.by_nodes else ", flat"), rate=rate,
        steps=len(measured),
        worker_seconds=median_of(measured, "worker_seconds"), server_seconds=median_of(measured, "server_seconds"),
        communication_seconds=median_of(measured, "communication_seconds"),
        total_seconds=median_of(measured, "total_seconds"), bytes_up=up, bytes_down=down,
        sent_up=median_of(measured, "sent_up"), sent_down=median_of(measured, "sent_down"),
        model_seconds=None if rate_bits is None else 8 * remote * (up + down) / (rate_bits * GOODPUT_SHARE),
        counted_up=counted_up, counted_down=counted_down,
        said_up=round(remote * sum(step["bytes_up"] for step in all_steps)),
        said_down=round(remote * (last + sum(step["bytes_down"] for step in all_steps))))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./benchmarks/network/run", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="some rows in the first topology at 1 Gb/s alone")
    parser.add_argument("--rates", nargs="+", choices=RATES, default=list(RATES), help="of every link, each way")
    parser.add_argument("--topologies", nargs="+", choices=TOPOLOGIES, default=list(TOPOLOGIES),
                        help="first: a server machine and two machines of two workers; second: four machines of two "
                             "workers, the server on one of them")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW",
                        help="of " + ", ".join(ROWS))
    parser.add_argument("--steps", type=int, default=30, help="of each row; those that send everything take a fifth")
    parser.add_argument("--train", action="store_true",
                        help="compute gradients in place of replaying recorded ones at the paper's pace")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/network"),
                        help="directory for the results and the recorded gradients")
    parser.add_argument("--recorded-steps", type=int, default=30, help="of the run whose last gradients are recorded")
    parser.add_argument("--program", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.steps < WARM_UP_STEPS + 3:
        parser.error(f"--steps needs at least {WARM_UP_STEPS + 3}")
    if given.quick:
        given.rates, given.topologies, given.steps = ["1 Gb/s"], ["first"], min(given.steps, 15)
        if given.rows == list(ROWS):
            given.rows = QUICK_ROWS
    return given


def environment(given: argparse.Namespace) -> dict:
    def first_line(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.partition("\n")[0]

    model = [line.split(":", 1)[1].strip() for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
             if line.startswith("model name")]
    here = pathlib.Path(__file__).resolve().parent
    return {
        "date": datetime.date.today().isoformat(),
        "commit": first_line("git", "-C", str(here), "describe", "--always", "--dirty"),
        "processor": f"{len(model)} x {model[0] if model else platform.processor()}",
        "kernel": platform.release(),
        "mpi": first_line("mpirun", "--version"),
        "compute": "trained" if given.train else "replayed at the paper's pace",
    }


def main() -> None:
    given = parse()
    # So that an interruption takes the cluster down as an error does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    given.output.mkdir(parents=True, exist_ok=True)
    recording = given.output / "gradients"
    if not given.train:
        record(given.program, recording, given.recorded_steps)
    results = []
    for rate in given.rates:
        for topology in (TOPOLOGIES[name] for name in given.topologies):
            for row in (ROWS[name] for name in given.rows):
                work = ["--batch", "8"] if given.train else topology.replay_options(recording, row)
                work += ["--classes", str(MODEL_CLASSES)]
                steps = max(WARM_UP_STEPS + 2, given.steps // 5) if row.sends_everything else given.steps
                print(f"{rate}, {topology.name}, {row.name} ...", flush=True)
                results.append(run_row(given.program, row, topology, rate, steps, work))
                print(report.line_of(results[-1]), flush=True)
    report.write(given.output, results, environment(given), PAPER)
    plots.draw(given.output, results, PAPER)


if __name__ == "__main__":
    try:
        main()
    except (RuntimeError, OSError) as error:
        sys.exit(f"benchmarks/network/run: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
