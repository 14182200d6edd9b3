#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Steps of frames between workers and a server over an emulated network, and what they take with each transport, which take turns. What the
output directory has of other rows is kept."""

import argparse
import dataclasses
import math
import os
import pathlib
import random
import statistics

import common
from cluster import Cluster
from common import RATES
from links import Unsupported

TURN_STEPS = 50
WARM_UP_STEPS = 5  # at the beginning of a turn connections are new
RESAMPLES = 1000
# Where all ranks together spend so much of the cores, it is these that limit a row.
CORES_SHARE_BELOW = 0.9

# ResNet-50's bytes in equal layers, so that all frames of a row are of one size.
LAYER_ELEMENTS, LAYERS = 15_625, 1_636
MODEL_MB = LAYERS * LAYER_ELEMENTS * 4 / 1e6


@dataclasses.dataclass(frozen=True)
class Row:
    rate: str
    fan_in: int = 4
    megabytes: float = 1.0  # of each worker's frame
    queue_kib: int | None = 64  # of the switch's ports; None: 50 ms
    loss: float = 0.0  # of all packets alike
    path_shares: tuple[float, ...] = (1.0,)  # of the rate, of each path
    most_steps: int = 1000

    @property
    def name(self) -> str:
        queue = "50 ms" if self.queue_kib is None else f"{self.queue_kib} KiB"
        loss = f", loss {100 * self.loss:g} %" if self.loss else ""
        paths = "" if len(self.path_shares) == 1 else ", 2 paths" if self.path_shares == (1.0, 1.0) else ", 2 paths of 3:1"
        return f"{self.fan_in} to 1, {self.megabytes:g} MB, queue {queue}{loss}{paths}"

    @property
    def rates(self) -> list[float]:
        return [RATES[self.rate] * share for share in self.path_shares]

    @property
    def queue_bytes(self) -> int:
        return int(RATES[self.rate] / 8 * 0.05) if self.queue_kib is None else 1024 * self.queue_kib


def _rows_at(rate: str) -> list[Row]:
    base = Row(rate)
    varied = [*({"fan_in": fan_in} for fan_in in (1, 8)), *({"queue_kib": queue} for queue in (16, 256, None)),
              *({"loss": loss} for loss in (0.001, 0.01, 0.02, 0.05)), {"megabytes": 0.25}, {"megabytes": 5.0, "most_steps": 300},
              *({"path_shares": shares} for shares in ((1.0, 1.0), (1.0, 1 / 3))), {"fan_in": 8, "megabytes": 0.25},
              {"megabytes": 0.25, "loss": 0.02}]
    if rate == "1 Gb/s":
        varied.append({"megabytes": MODEL_MB, "most_steps": 20})
    return [base, *(dataclasses.replace(base, **each) for each in varied)]


ROWS = [row for rate in ("200 Mb/s", "1 Gb/s") for row in _rows_at(rate)]
QUICK_ROWS = [Row("200 Mb/s", megabytes=0.25), Row("200 Mb/s", megabytes=0.25, fan_in=8), Row("200 Mb/s", megabytes=0.25, loss=0.02)]


@dataclasses.dataclass(frozen=True)
class Transport:
    name: str
    options: tuple[str, ...]  # of the program
    congestion: str = "cubic"
    rto_min: str | None = None
    queue_times: float = 1.0  # the row's queue
    tags: bool = False  # the switch has a queue for each class

    @property
    def is_udp(self) -> bool:
        return "udp" in self.options

    def options_in(self, row: Row) -> list[str]:
        if not self.is_udp:
            return list(self.options)
        interfaces = ",".join(f"eth{path}" for path in range(len(row.path_shares)))
        return [*self.options, "--link-rate", f"{sum(row.rates):.0f}", "--interface", interfaces]


def _udp(name: str, *options: str, tags: bool = True) -> Transport:
    return Transport(f"udp, {name}", ("--transport", "udp", *options), tags=tags)


MPI = ("--transport", "mpi")
TRANSPORTS = {each.name: each for each in (
    Transport("MPI, cubic", MPI),
    Transport("MPI, cubic, rto_min 5 ms", MPI, rto_min="5ms"),
    Transport("MPI, bbr", MPI, congestion="bbr"),
    # Classes have queues of their own: together those of the data have so much.
    Transport("MPI, cubic, 2.5 times the queue", MPI, queue_times=2.5),
    _udp("p = 0"),
    *(_udp(f"p = {bound}", "--loss-bound", bound) for bound in ("0.05", "0.1", "0.2")),
    _udp("p = 0.1, on-probe", "--loss-bound", "0.1", "--stop-on-probe"),
    _udp("p = 0.1, no tags", "--loss-bound", "0.1", "--loss-tags", "off", tags=False),
    _udp("p = 0.1, no rate control", "--loss-bound", "0.1", "--rate-control", "off"),
)}
QUICK_TRANSPORTS = ["MPI, cubic", "MPI, cubic, rto_min 5 ms", "udp, p = 0", "udp, p = 0.1"]


def p99(values: list[float]) -> float:
    return sorted(values)[max(0, math.ceil(0.99 * len(values)) - 1)]


def interval(values: list[float], statistic) -> tuple[float, float]:
    """The 95 % bootstrap interval of a statistic. The same at every call."""
    drawing = random.Random(1)
    drawn = sorted(statistic(drawing.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return drawn[int(0.025 * RESAMPLES)], drawn[math.ceil(0.975 * RESAMPLES) - 1]


@dataclasses.dataclass
class Result:
    rate: str
    row: str
    transport: str
    seconds: list[float]  # of the communication of each step
    up_seconds: list[float]
    down_seconds: list[float]
    missing_up: float  # share of the elements, mean over steps
    droppable: float | None  # share of the chunks that were missing
    packets: float | None  # a step; None: they are the kernel's
    repeated: float | None
    late: float | None
    dropped_up: int  # packets, by the switch's queue towards the server
    dropped_down: int
    lost: int  # by the network, where it loses some
    cpu_seconds_a_gb: float
    cores_share: float  # that all ranks spent, of all there are
    load: list[float]

    @property
    def key(self) -> tuple[str, str, str]:
        return self.rate, self.row, self.transport


class Turns:
    """Steps of one transport in one row: some in each turn."""

    def __init__(self) -> None:
        self.steps: list[dict] = []
        self.load: list[float] = []
        self.dropped_up = self.dropped_down = self.lost = 0

    def run(self, cluster: Cluster, given: argparse.Namespace, row: Row, transport: Transport, steps: int) -> None:
        warm_up, machines = max(1, min(WARM_UP_STEPS, steps // 5)), list(range(1 + row.fan_in))
        configure(cluster, row, transport)
        lost_before = sum(map(cluster.lost_packets, machines))
        self.load.append(os.getloadavg()[0])
        program = [given.program, "--layers", str(given.layers), "--share", f"{row.megabytes / MODEL_MB:.9f}", "--steps", str(warm_up + steps),
                   *transport.options_in(row)]
        lines = common.lines_of(cluster.mpirun(machines, program, 3600).stdout)
        if len(lines) != warm_up + steps:
            raise RuntimeError(f"{transport.name} told of {len(lines)} steps of {warm_up + steps}")
        self.steps += lines[warm_up:]
        self.dropped_up += cluster.dropped_packets(0)
        self.dropped_down += sum(map(cluster.dropped_packets, machines[1:]))
        self.lost += sum(map(cluster.lost_packets, machines)) - lost_before

    def result(self, row: Row, transport: Transport) -> Result:
        def mean(key: str) -> float | None:
            return statistics.fmean(step[key] for step in self.steps) if key in self.steps[0] else None

        cpu, missing = sum(step["cpu_seconds"] for step in self.steps), mean("missing_chunks")
        return Result(row.rate, row.name, transport.name, *([step[key] for step in self.steps] for key in ("seconds", "up_seconds", "down_seconds")),
                      missing_up=mean("missing_up"), droppable=mean("missing_droppable") / missing if missing else None, packets=mean("packets"),
                      repeated=mean("repeated"), late=mean("late"), dropped_up=self.dropped_up, dropped_down=self.dropped_down, lost=self.lost,
                      cpu_seconds_a_gb=cpu / (sum(step["bytes_up"] + step["bytes_down"] for step in self.steps) / 1e9),
                      cores_share=cpu / ((os.cpu_count() or 1) * sum(step["period_seconds"] for step in self.steps)), load=self.load)


def configure(cluster: Cluster, row: Row, transport: Transport) -> None:
    cluster.reconfigure(int(row.queue_bytes * transport.queue_times), transport.tags, transport.congestion, transport.rto_min)


def run_row(given: argparse.Namespace, row: Row, transports: list[Transport]) -> list[Result]:
    steps = min(given.steps, row.most_steps)
    turns = {transport: Turns() for transport in transports}
    with Cluster(1 + row.fan_in, row.rates, row.queue_bytes, paths=len(row.path_shares), loss=row.loss) as cluster:
        for begin in range(0, steps, TURN_STEPS):
            for transport in transports:
                turns[transport].run(cluster, given, row, transport, min(TURN_STEPS, steps - begin))
    return [turns[transport].result(row, transport) for transport in transports]


def those_that_run(names: list[str]) -> list[Transport]:
    """The transports that this machine has; of the others it is said why they do not run."""
    left = []
    with Cluster(2, RATES["200 Mb/s"], 64 * 1024) as cluster:
        for transport in (TRANSPORTS[name] for name in names):
            try:
                configure(cluster, Row("200 Mb/s"), transport)
                left.append(transport)
            except Unsupported as error:
                print(f"{transport.name} is left out: {error}", flush=True)
    return left


HEAD = ("", "mean", "median", "p99", "most", "up mean", "up p99", "down mean", "missing up", "droppable", "packets", "repeated", "late",
        "dropped up", "dropped down", "lost", "CPU s a GB", "of the cores", "load")


def cells_of(each: Result) -> tuple[str, ...]:
    def ms(seconds: float) -> str:
        return f"{1000 * seconds:.1f}"

    def within(values: list[float], statistic) -> str:
        low, high = interval(values, statistic)
        return f"{ms(statistic(values))} ({ms(low)} to {ms(high)})"

    name = each.transport + (" *(limited by CPU)*" if each.cores_share >= CORES_SHARE_BELOW else "")
    counts = ["" if value is None else f"{value:.0f}" for value in (each.packets, each.repeated, each.late)]
    return (name, within(each.seconds, statistics.fmean), ms(statistics.median(each.seconds)), within(each.seconds, p99), ms(max(each.seconds)),
            ms(statistics.fmean(each.up_seconds)), within(each.up_seconds, p99), ms(statistics.fmean(each.down_seconds)),
            f"{100 * each.missing_up:.2f} %", "" if each.droppable is None else f"{100 * each.droppable:.0f} %", *counts, str(each.dropped_up),
            str(each.dropped_down), str(each.lost), f"{each.cpu_seconds_a_gb:.2f}", f"{100 * each.cores_share:.0f} %", f"{max(each.load):.1f}")


def table(results: list[Result]) -> str:
    return "\n".join(f"### {rate}, {row}\n\nMilliseconds of the communication of a step.\n\n" +
                     common.markdown(HEAD, (cells_of(each) for each in results if (each.rate, each.row) == (rate, row)))
                     for rate, row in dict.fromkeys((each.rate, each.row) for each in results))


def parse() -> argparse.Namespace:
    names = list(dict.fromkeys(row.name for row in ROWS))
    parser = common.parser("incast", __doc__)
    parser.add_argument("--quick", action="store_true", help="three rows of small frames at 200 Mb/s with four transports, 100 steps each")
    parser.add_argument("--rates", nargs="+", choices=("200 Mb/s", "1 Gb/s"), default=["200 Mb/s", "1 Gb/s"], help="of every link, each way")
    parser.add_argument("--rows", nargs="+", choices=names, default=names, metavar="ROW", help='of "' + '", "'.join(names).replace("%", "%%") + '"')
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, metavar="TRANSPORT", help='of "' + '", "'.join(TRANSPORTS) + '"')
    parser.add_argument("--steps", type=int, default=1000, help="measured of each transport in each row; large frames take fewer")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/incast"), help="directory for the results")
    given = parser.parse_args()
    given.chosen = QUICK_ROWS if given.quick else [row for row in ROWS if row.rate in given.rates and row.name in given.rows]
    if given.quick:
        given.steps = min(given.steps, 100)
    given.transports = given.transports or (QUICK_TRANSPORTS if given.quick else list(TRANSPORTS))
    if not given.chosen:
        parser.error("none of these rows is run at these rates")
    return given


def main() -> None:
    given = parse()
    given.output.mkdir(parents=True, exist_ok=True)
    given.layers = given.output / "layers.txt"
    given.layers.write_text("".join(f"layer{layer} {LAYER_ELEMENTS}\n" for layer in range(LAYERS)))
    results, done = common.read(given.output, lambda fields: Result(**fields)), set()
    running = those_that_run(given.transports)
    for row in given.chosen:
        print(f"{row.rate}, {row.name} ...", flush=True)
        new = run_row(given, row, [each for each in running if each.is_udp or len(row.path_shares) == 1])
        results = common.with_results(results, new)
        done |= {each.key for each in new}
        common.write(given.output, results, common.environment("incast"), table(results))
    common.finish(given.output, table([each for each in results if each.key in done]))


if __name__ == "__main__":
    common.main("incast", main)
