#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Trains over an emulated cluster with limited rates, and says where the seconds of a step go. What the output directory
has of other rows stays beside these."""

import argparse
import datetime
import json
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile

import command
import plots
import report
from cluster import Cluster, Counters
from emulation import EMULATION, cluster_of, require_same_emulation
from report import Result
from settings import PAPER_RATES, QUICK_ROWS, RATES, ROWS, TOPOLOGIES, Row, Topology

MODEL_CLASSES = 1000  # as in the paper: 25,557,032 parameters
HEADER_BYTES = 14 + 20 + 32  # Ethernet, IP, and TCP with timestamps
UDP_HEADER_BYTES = 14 + 20 + 8
CHUNK_BYTES, CHUNK_HEADER_BYTES = 1408, 56  # of a packet of lamina/bounded
PACKET_BYTES = 1514  # a full one, as the limit of the rate counts it
SEGMENT_BYTES = PACKET_BYTES - HEADER_BYTES
GOODPUT_SHARE = SEGMENT_BYTES / PACKET_BYTES
UDP_GOODPUT_SHARE = CHUNK_BYTES / (UDP_HEADER_BYTES + CHUNK_HEADER_BYTES + CHUNK_BYTES)
LONGEST_ROW_SECONDS = 24 * 3600
FEWEST_STEPS = 5  # of a median
WARM_UP_STEPS = 2  # the first sends the whole model; then residuals are near empty


def median_of(steps: list[dict], key: str) -> float:
    return statistics.median(step[key] for step in steps)


def record(program: str, directory: pathlib.Path, steps: int) -> None:
    """Gradients of two workers of a real run that drops layers, in its last six steps. In its first fifty it sends more than later
    (docs/decisions/0045)."""
    if (directory / "worker-1-5.f32").exists():
        return
    print("Recording gradients of a training run ...", flush=True)
    subprocess.run([program, "--transport", "inprocess", "--workers", "2", "--runs", "with", "--selection", "agreed",
                    "--drop-ratio", "0.95", "--steps", str(steps), "--warm-up", "20", "--batch", "32",
                    "--classes", str(MODEL_CLASSES), "--record", str(directory)],
                   check=True, stdout=subprocess.DEVNULL)


def payload(row: Row, counted: Counters) -> tuple[int, int]:
    header = UDP_HEADER_BYTES if row.is_udp else HEADER_BYTES
    return counted.received_bytes - header * counted.received_packets, counted.sent_bytes - header * counted.sent_packets


def socket_options(rate_bits: float | None) -> list[str]:
    """Of rows over UDP."""
    return ["--interface", Cluster.network(), *(() if rate_bits is None else ("--link-rate", f"{rate_bits:.0f}"))]


def run_row(program: str, row: Row, topology: Topology, rate: str, steps: int, work: list[str]) -> Result:
    rate_bits = RATES[rate]
    ranks = topology.machines_of(row)
    options = [*row.options, *topology.options_of(row), "--steps", str(steps), "--threads", "1", *work]
    options += socket_options(rate_bits) if row.is_udp else []
    with tempfile.TemporaryDirectory() as directory, cluster_of(1 + max(ranks), rate) as cluster:
        before = cluster.counters(ranks[0])
        cluster.mpirun(ranks, [program, *options, "--output", directory], LONGEST_ROW_SECONDS)
        counted = cluster.counters(ranks[0]).since(before)
        repeated = cluster.repeated_segments(ranks[0])
        run = pathlib.Path(directory) / row.run_name
        all_steps = [line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
                     if "step" in line]
        layers = json.loads((run / "config.json").read_text())["model"]["layers"]
    measured = all_steps[WARM_UP_STEPS:] or all_steps
    up, down = median_of(measured, "bytes_up"), median_of(measured, "bytes_down")
    counted_up, counted_down = (way - SEGMENT_BYTES * again for way, again in zip(payload(row, counted), repeated))
    said_up, said_down = (sum(step[key] for step in all_steps) for key in ("bytes_up", "bytes_down"))
    if row.way == "allreduce":
        # Its steps begin with the parameters of the first worker.
        others = [machine for machine in ranks if machine != ranks[0]]
        said_up, said_down = topology.link_bytes(row, said_up, said_down)
        said_down += len(others) * sum(4 * layer["elements"] for layer in layers)
    else:
        # The parameters that the last step has changed go down after it, in no step's metrics.
        said_down += len(topology.clients(row)) * sum(4 * layers[index]["elements"] for index in all_steps[-1]["arrived"])
        said_up, said_down = topology.link_bytes(row, said_up, said_down)
    to_link, from_link = topology.link_bytes(row, up, down)
    # A server sends when it has received everything; in an allreduce both ways are busy at once.
    in_turn = max(to_link, from_link) if row.way == "allreduce" else to_link + from_link
    return Result(
        row=row.name, topology=topology.name_of(row), rate=rate, steps=len(measured),
        **{key: median_of(measured, key) for key in ("worker_seconds", "server_seconds", "communication_seconds",
                                                     "node_seconds", "total_seconds", "sent_up", "sent_down")},
        bytes_up=up, bytes_down=down,
        model_seconds=None if rate_bits is None else 8 * in_turn / (rate_bits * (UDP_GOODPUT_SHARE if row.is_udp else GOODPUT_SHARE)),
        counted_up=counted_up, counted_down=counted_down, said_up=round(said_up), said_down=round(said_down),
        commit=commit())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./benchmarks/network/run", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="some rows in the first topology at 1 Gb/s alone")
    parser.add_argument("--rates", nargs="+", choices=RATES, default=PAPER_RATES, help="of every link, each way")
    parser.add_argument("--topologies", nargs="+", choices=TOPOLOGIES, default=["first", "second"],
                        help="first: a server machine and two machines of two workers; second: four machines of two "
                             "workers, the server on one of them; pair: a server and a worker")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW",
                        help="of " + ", ".join(ROWS).replace("%", "%%"))
    parser.add_argument("--steps", type=int, default=30, help="of each row; those that send everything take a fifth, "
                        f"and {WARM_UP_STEPS + FEWEST_STEPS} at least")
    parser.add_argument("--train", action="store_true",
                        help="compute gradients in place of replaying recorded ones at the paper's pace")
    parser.add_argument("--output", type=pathlib.Path,
                        help="directory for the results and the recorded gradients; build/network, or with --train "
                             "build/network-trained")
    parser.add_argument("--recorded-steps", type=int, default=100, help="of the run whose last gradients are recorded")
    parser.add_argument("--program", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.output is None:
        given.output = pathlib.Path("build/network-trained" if given.train else "build/network")
    if given.steps < WARM_UP_STEPS + 3:
        parser.error(f"--steps needs at least {WARM_UP_STEPS + 3}")
    if given.quick:
        given.rates, given.topologies, given.steps = ["1 Gb/s"], ["first"], min(given.steps, 12)
        if given.rows == list(ROWS):
            given.rows = QUICK_ROWS
    return given


def first_line(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.partition("\n")[0]


def commit() -> str:
    return first_line("git", "-C", str(pathlib.Path(__file__).resolve().parent), "describe", "--always", "--dirty")


def machine() -> dict:
    """What results were measured with, and when."""
    model = [line.split(":", 1)[1].strip() for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
             if line.startswith("model name")]
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "processor": f"{len(model)} x {model[0] if model else platform.processor()}",
        "kernel": platform.release(),
        "mpi": first_line("mpirun", "--version"),
    }


def environment(given: argparse.Namespace) -> dict:
    return {
        **machine(),
        **EMULATION,
        "compute": "trained" if given.train else "replayed at the paper's pace",
        "command": command.recorded("run"),
    }


def main() -> None:
    given = parse()
    given.output.mkdir(parents=True, exist_ok=True)
    results, done = report.read(given.output), set()
    require_same_emulation(given.output, report.runs(given.output))
    recording = given.output / "gradients"
    if not given.train:
        record(given.program, recording, given.recorded_steps)
    for rate in given.rates:
        for topology in (TOPOLOGIES[name] for name in given.topologies):
            for row in (ROWS[name] for name in given.rows):
                if row.way == "allreduce" and len(topology.machines_of(row)) < 2:
                    continue  # there is nobody to exchange with
                work = ["--batch", "8"] if given.train else topology.replay_options(recording)
                work += ["--classes", str(MODEL_CLASSES)]
                steps = max(WARM_UP_STEPS + FEWEST_STEPS, given.steps // 5) if row.sends_everything else given.steps
                print(f"{rate}, {topology.name}, {row.name} ...", flush=True)
                result = run_row(given.program, row, topology, rate, steps, work)
                print(report.line_of(result), flush=True)
                results = report.with_result(results, result)
                done.add(result.key)
                report.write(given.output, results, environment(given))
    print("\n" + report.table([result for result in results if result.key in done]))
    names = ["results.json", "table.md", *plots.draw(given.output, results)]
    print(f"Written to {given.output}: {', '.join(names)}")


if __name__ == "__main__":
    command.run("run", main)
