#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Steps over an emulated cluster with limited rates, and where their seconds go. Workers replay recorded gradients at the paper's pace. What the
output directory has of other rows is kept."""

import argparse
import dataclasses
import pathlib
import statistics

import common
from common import GOODPUT_SHARE, RATES

UDP_GOODPUT_SHARE = 1408 / (42 + 56 + 1408)  # of a packet of lamina/bounded: Ethernet, IP, UDP, its own header
WARM_UP_STEPS = 2  # the first sends the whole model; then residuals are near empty
FEWEST_STEPS = 5


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    options: tuple[str, ...]
    way: str  # nodes: the workers of a machine sum first; flat: each sends its own; allreduce: there is no server

    @property
    def sends_everything(self) -> bool:
        return "everything" in self.name

    @property
    def is_udp(self) -> bool:
        return "udp" in self.options


def _rows() -> list[Row]:
    agreed, local = ("--selection", "agreed"), ("--selection", "local")
    rows = []
    for way in ("nodes", "flat"):
        rows.append(Row(f"{way}, everything", ("--drop-ratio", "0"), way))
        rows += [Row(f"{way}, R = {ratio}", (*local, "--drop-ratio", ratio), way) for ratio in ("0.9", "0.95", "0.99")]
        rows += [Row(f"{way}, budget 5.3 %", (*local, "--budget", "0.053"), way), Row(f"{way}, agreed, R = 0.95", agreed, way)]
        rows += [Row(f"{way}, agreed, budget {percent} %", (*agreed, "--budget", budget), way) for percent, budget in (("5.3", "0.053"), ("3", "0.03"))]
        rows += [Row(f"{way}, R = 0.95, udp, p = {bound}", (*local, "--transport", "udp", "--loss-bound", bound), way) for bound in ("0", "0.1")]
    rows += [Row("allreduce, everything", ("--drop-ratio", "0"), "allreduce"), Row("allreduce, agreed, R = 0.95", agreed, "allreduce"),
             Row("allreduce, agreed, budget 5.3 %", (*agreed, "--budget", "0.053"), "allreduce")]
    return rows


ROWS = {row.name: row for row in _rows()}
QUICK_ROWS = [f"{way}, {what}" for way in ("nodes", "flat") for what in ("everything", "R = 0.95", "agreed, budget 5.3 %", "agreed, budget 3 %")]


@dataclasses.dataclass(frozen=True)
class Topology:
    machines: list[int]  # of each rank; rank 0 is the server
    workers_per_machine: int
    compute_seconds: float  # the paper's, without dropping
    server_seconds: float

    def machines_of(self, row: Row) -> list[int]:
        return self.machines[1:] if row.way == "allreduce" else self.machines

    def options_of(self, row: Row) -> list[str]:
        if row.way == "nodes":
            return ["--workers-per-node", str(self.workers_per_machine)]
        return ["--topology", "allreduce"] if row.way == "allreduce" else []

    def link_bytes(self, row: Row, up: float, down: float) -> float:
        """What a step's frames put on the busiest link, one way after the other: the server's; of an all-reduce any machine's, whose ways are
        busy at once."""
        if row.way == "allreduce":
            workers, here = len(self.machines) - 1, self.workers_per_machine
            return (up + down) * here * (workers - here) / (workers * (workers - 1))
        clients = self.machines[1::self.workers_per_machine] if row.way == "nodes" else self.machines[1:]
        return (up + down) * sum(machine != self.machines[0] for machine in clients) / len(clients)


TOPOLOGIES = {
    "first": Topology([0, 1, 1, 2, 2], 2, 0.388, 0.073),
    "second": Topology([0, 0, 0, 1, 1, 2, 2, 3, 3], 2, 0.222, 0.048),
    # Not the paper's: one worker and the server, each with a core of its own where there are two.
    "pair": Topology([0, 1], 1, 0.388, 0.073),
}
WAYS = {"nodes": "by nodes", "flat": "flat", "allreduce": "allreduce"}

# The paper's Table 1: worker, server, communication and total seconds of a step. 3.457 s is two models each way at 1 Gb/s: one machine's
# workers sent as one. Its second network had 56 Gb/s, more than can be emulated here.
PAPER = {
    ("1 Gb/s", "first, by nodes"): {"the paper, everything": (0.388, 0.073, 3.457, 3.918), "the paper, dropping": (0.408, 0.085, 0.182, 0.675)},
    ("unlimited", "second, by nodes"): {"the paper at 56 Gb/s, everything": (0.222, 0.048, 1.951, 2.222),
                                        "the paper at 56 Gb/s, dropping": (0.230, 0.060, 0.375, 0.665)},
}


@dataclasses.dataclass
class Result:
    row: str
    topology: str
    rate: str
    steps: int
    worker_seconds: float
    server_seconds: float
    communication_seconds: float
    node_seconds: float  # the part of it that is within a node
    total_seconds: float
    bytes_up: float  # a step, of all frames
    bytes_down: float
    sent_up: float
    sent_down: float
    model_seconds: float | None  # bytes over goodput

    @property
    def key(self) -> tuple[str, str, str]:
        return self.rate, self.topology, self.row


def run_row(program: str, row: Row, name: str, rate: str, steps: int, work: list[str]) -> Result:
    topology, bits = TOPOLOGIES[name], RATES[rate]
    ranks = topology.machines_of(row)
    options = [*row.options, *topology.options_of(row), "--steps", str(steps), "--classes", str(common.MODEL_CLASSES), *work]
    if row.is_udp:
        options += ["--interface", "eth0", *(() if bits is None else ("--link-rate", f"{bits:.0f}"))]
    with common.cluster_of(1 + max(ranks), rate) as cluster:
        said = cluster.mpirun(ranks, [program, *options], common.LONGEST_RUN_SECONDS).stdout
    measured = [line for line in common.lines_of(said) if "step" in line][WARM_UP_STEPS:]
    median = {key: statistics.median(line[key] for line in measured)
              for key in (field.name for field in dataclasses.fields(Result)) if key in measured[0] and key != "steps"}
    goodput = UDP_GOODPUT_SHARE if row.is_udp else GOODPUT_SHARE
    model = None if bits is None else 8 * topology.link_bytes(row, median["bytes_up"], median["bytes_down"]) / (bits * goodput)
    return Result(row=row.name, topology=f"{name}, {WAYS[row.way]}", rate=rate, steps=len(measured), model_seconds=model, **median)


HEAD = ("", "worker s", "server s", "communication s", "in the node s", "model s", "total s", "up MB", "down MB", "sent up", "sent down")


def cells_of(each: Result) -> tuple[str, ...]:
    return (each.row, f"{each.worker_seconds:.3f}", f"{each.server_seconds:.3f}", f"{each.communication_seconds:.3f}",
            f"{each.node_seconds:.3f}" if "by nodes" in each.topology else "", "" if each.model_seconds is None else f"{each.model_seconds:.3f}",
            f"{each.total_seconds:.3f}", f"{each.bytes_up / 1e6:.1f}", f"{each.bytes_down / 1e6:.1f}", f"{100 * each.sent_up:.2f} %",
            f"{100 * each.sent_down:.2f} %")


def changes(each: Result, dense: Result) -> tuple[str, ...]:
    def change(key: str) -> str:
        return f"{100 * (getattr(each, key) / getattr(dense, key) - 1):+.1f} %"

    return ("", change("worker_seconds"), change("server_seconds"), change("communication_seconds"), "", "", change("total_seconds"), *[""] * 4)


def table(results: list[Result]) -> str:
    text = ""
    for rate, topology in dict.fromkeys((each.rate, each.topology) for each in results):
        here = [each for each in results if (each.rate, each.topology) == (rate, topology)]
        dense = next((each for each in here if ROWS[each.row].sends_everything), None)
        rows = []
        for each in here:
            rows += [cells_of(each)] + ([changes(each, dense)] if dense is not None and each is not dense else [])
        for name, (worker, server, communication, total) in PAPER.get((rate, topology), {}).items():
            rows.append((name, f"{worker:.3f}", f"{server:.3f}", f"{communication:.3f}", "", "", f"{total:.3f}", *[""] * 4))
        text += f"\n### {rate}, {topology}\n\n" + common.markdown(HEAD, rows)
    return text.lstrip()


def parse() -> argparse.Namespace:
    parser = common.parser("run", __doc__)
    parser.add_argument("--quick", action="store_true", help="some rows in the first topology at 1 Gb/s only")
    parser.add_argument("--rates", nargs="+", choices=RATES, default=["100 Mb/s", "1 Gb/s", "10 Gb/s", "unlimited"], help="of every link, each way")
    parser.add_argument("--topologies", nargs="+", choices=TOPOLOGIES, default=["first", "second"],
                        help="first: a server machine and two machines of two workers; second: four machines of two workers, the server on one "
                             "of them; pair: a server and a worker")
    parser.add_argument("--rows", nargs="+", choices=ROWS, metavar="ROW", help="of " + ", ".join(ROWS).replace("%", "%%"))
    parser.add_argument("--steps", type=int, default=20, help="of each row; of those that send everything a fifth")
    parser.add_argument("--recorded-steps", type=int, default=100, help="of the run whose last gradients are recorded")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/network"))
    given = parser.parse_args()
    if given.quick:
        given.rates, given.topologies, given.steps = ["1 Gb/s"], ["first"], min(given.steps, 12)
    given.rows = given.rows or (QUICK_ROWS if given.quick else list(ROWS))
    return given


def main() -> None:
    given = parse()
    given.output.mkdir(parents=True, exist_ok=True)
    recording = given.output / "gradients"
    # Of two workers that drop layers, in the last six steps: in its first fifty such a run sends more than later.
    common.record(given.program, recording, "worker-1-5.f32", 3, "--steps", str(given.recorded_steps), "--batch", "32")
    results, done = common.read(given.output, lambda fields: Result(**fields)), set()
    for rate in given.rates:
        for name in given.topologies:
            topology = TOPOLOGIES[name]
            # So small a rate that what is replayed does not make numbers grow.
            work = ["--replay", str(recording), "--compute-seconds", str(topology.compute_seconds), "--server-seconds",
                    str(topology.server_seconds), "--learning-rate", "1e-6"]
            for row in (ROWS[each] for each in given.rows):
                if row.way == "allreduce" and len(topology.machines_of(row)) < 2:
                    continue  # there is nobody to exchange with
                steps = WARM_UP_STEPS + max(FEWEST_STEPS, given.steps // 5 if row.sends_everything else given.steps)
                result = run_row(given.program, row, name, rate, steps, work)
                results = common.with_results(results, [result])
                done.add(result.key)
                common.write(given.output, results, common.environment("run", **common.EMULATION), table(results))
                print(f"{rate}, {result.topology}, {row.name}: {result.total_seconds:.3f} s a step", flush=True)
    common.finish(given.output, table([each for each in results if each.key in done]))


if __name__ == "__main__":
    common.main("run", main)
