#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Steps of frames between workers and a server over an emulated network, what they take with each transport, which take turns. What the
output directory has of other rows stays beside these."""

import argparse
import json
import os
import pathlib
import subprocess
import sys

import command
import incast_plots
import incast_report
from cluster import Cluster
from experiment import commit, machine
from incast_report import Result, Turn
from incast_rows import LAYER_ELEMENTS, LAYERS, QUICK_ROWS, QUICK_TRANSPORTS, RATES, ROWS, TRANSPORTS, Row, Transport
from links import PACKET_BYTES, Unsupported

TURN_STEPS = 50
TURNS_AT_LEAST = 2
# At the beginning of a turn connections are new.
WARM_UP_STEPS = 5
LONGEST_TURN_SECONDS = 3600
PACED_SECONDS = 1.0
PACED_PORT = 7001


def write_layers(file: pathlib.Path) -> None:
    file.write_text("".join(f"layer{l} {LAYER_ELEMENTS}\n" for l in range(LAYERS)))


def words_of(given: argparse.Namespace, row: Row, transport: Transport, steps: int) -> list[str]:
    """Of the program's command line."""
    return [given.program, "--layers", str(given.layers), "--share", f"{row.share:.9f}", "--steps", str(steps),
            *transport.options_in(row)]


def refusal_of(given: argparse.Namespace, row: Row, transport: Transport) -> str | None:
    """Why the program does not take the transport's options; None: it does."""
    done = subprocess.run([*words_of(given, row, transport, 1), "--check"], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    return next(iter((done.stderr or done.stdout).splitlines()), f"the program ended with status {done.returncode}")


def configure(cluster: Cluster, row: Row, transport: Transport) -> None:
    cluster.reconfigure(int(row.queue_bytes * transport.queue_times), transport.tags, transport.congestion, transport.rto_min)


def paced_share(cluster: Cluster, program: pathlib.Path, row: Row) -> float:
    """What one sender, paced at the link's rate, delivers of it."""
    receiver = subprocess.Popen(cluster.command_on(0, str(program), "receive", str(PACED_PORT)), stdout=subprocess.PIPE, text=True)
    try:
        receiver.stdout.readline()  # it is ready
        done = subprocess.run(cluster.command_on(1, str(program), "send", cluster.address(0), str(PACED_PORT), f"{row.rates[0]:.0f}",
                                                 str(PACED_SECONDS)), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(done.stderr.strip())
        received, _ = receiver.communicate(timeout=60)
    finally:
        receiver.kill()
    return int(received) * 8 * PACKET_BYTES / (row.rates[0] * float(done.stdout)) / (1 - row.loss)


def run_turn(cluster: Cluster, given: argparse.Namespace, row: Row, transport: Transport, steps: int) -> Turn:
    warm_up = max(1, min(WARM_UP_STEPS, steps // 5))
    configure(cluster, row, transport)
    machines = range(1 + row.fan_in)
    lost_before = sum(map(cluster.lost_packets, machines))
    load = os.getloadavg()[0]
    said = cluster.mpirun(list(machines), words_of(given, row, transport, warm_up + steps), LONGEST_TURN_SECONDS).stdout
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    if len(lines) != warm_up + steps:
        raise RuntimeError(f"{transport.name} told of {len(lines)} steps of {warm_up + steps}")
    return Turn(lines[warm_up:], cluster.dropped_packets(0), sum(map(cluster.dropped_packets, machines[1:])),
                sum(map(cluster.lost_packets, machines)) - lost_before, load)


def run_row(given: argparse.Namespace, row: Row, transports: list[Transport]) -> list[Result]:
    steps = min(given.steps, row.steps or given.steps)
    turn_steps = min(TURN_STEPS, -(-steps // TURNS_AT_LEAST))
    with Cluster(1 + row.fan_in, row.rates, row.queue_bytes, paths=len(row.path_shares), loss=row.loss) as cluster:
        paced = paced_share(cluster, pathlib.Path(given.program).with_name("paced"), row)
        turns: dict[str, list[Turn]] = {transport.name: [] for transport in transports}
        for begin in range(0, steps, turn_steps):
            for transport in transports:
                turns[transport.name].append(run_turn(cluster, given, row, transport, min(turn_steps, steps - begin)))
    return [incast_report.result_of(row.rate, row.name, name, each, paced, os.cpu_count(), commit()) for name, each in turns.items()]


def those_that_run(given: argparse.Namespace, rows: list[Row]) -> list[Transport]:
    """The transports that the program takes and this machine has; of the others it is said why they do not run."""
    some_row = rows[0]
    left = []
    with Cluster(2, RATES[some_row.rate], some_row.queue_bytes) as cluster:
        for transport in (TRANSPORTS[name] for name in given.transports):
            reason = refusal_of(given, some_row, transport)
            try:
                configure(cluster, some_row, transport)
            except Unsupported as error:
                reason = reason or str(error)
            if reason is None:
                left.append(transport)
            else:
                print(f"{transport.name} is left out: {reason}", flush=True)
    return left


def parse() -> argparse.Namespace:
    names = list(dict.fromkeys(row.name for row in ROWS))
    parser = argparse.ArgumentParser(prog="./benchmarks/network/incast", description=__doc__)
    parser.add_argument("--quick", action="store_true",
                        help="three rows of small frames at 200 Mb/s with four transports, 100 steps each")
    parser.add_argument("--rates", nargs="+", choices=RATES, default=list(RATES), help="of every link, each way")
    parser.add_argument("--rows", nargs="+", choices=names, default=names, metavar="ROW",
                        help='of "' + '", "'.join(names).replace("%", "%%") + '"')
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS), metavar="TRANSPORT",
                        help='of "' + '", "'.join(TRANSPORTS) + '"')
    parser.add_argument("--steps", type=int, default=1000, help="measured of each transport in each row, in turns; large frames take fewer")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/incast"), help="directory for the results")
    parser.add_argument("--program", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.steps < TURNS_AT_LEAST:
        parser.error(f"--steps needs at least {TURNS_AT_LEAST}")
    chosen = [row for row in ROWS if row.rate in given.rates and row.name in given.rows]
    if given.quick:
        chosen = QUICK_ROWS
        given.steps = min(given.steps, 100)
        if given.transports == list(TRANSPORTS):
            given.transports = QUICK_TRANSPORTS
    if not chosen:
        parser.error("none of these rows is run at these rates")
    given.chosen = chosen
    return given


def main() -> None:
    given = parse()
    given.output.mkdir(parents=True, exist_ok=True)
    given.layers = given.output / "layers.txt"
    write_layers(given.layers)
    results, done = incast_report.read(given.output), set()
    environment = {**machine(), "command": command.recorded("incast")}
    running = those_that_run(given, given.chosen)
    if not running:
        raise RuntimeError("none of these transports runs here")
    for row in given.chosen:
        transports = [transport for transport in running if transport.runs_in(row)]
        if not transports:
            print(f"{row.rate}, {row.name} is left out: none of these transports runs in it", flush=True)
            continue
        print(f"{row.rate}, {row.name} ...", flush=True)
        new = run_row(given, row, transports)
        print("\n".join(map(incast_report.line_of, new)), flush=True)
        results = incast_report.with_results(results, new)
        done |= {result.key for result in new}
        incast_report.write(given.output, results, environment)
    print("\n" + incast_report.table([result for result in results if result.key in done]))
    names = ["results.json", "table.md", *incast_plots.draw(given.output, results)]
    print(f"Written to {given.output}: {', '.join(names)}")


if __name__ == "__main__":
    command.run("incast", main)
