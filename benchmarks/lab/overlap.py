#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Steps of workers over an emulated cluster: what communication exposes, with sums after the backward pass and during it, and what PyTorch's
DistributedDataParallel makes of the same pace. All rows of a cell are run in turn, several times over, so that they meet the same load of the
machine. What the output directory has is not run again."""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

import common
import torch_ranks
from cluster import Cluster
from common import GOODPUT_SHARE, RATES

NETWORKS = {"resnet50": 4 * 25_557_032, "vgg16": 4 * 138_357_544}  # bytes
RECORDED_STEPS = 2
# PowerSGD sends everything in the first two, and the first step of the lab records the order of gradients.
WARM_UP_STEPS = 3
LONGEST_RUN_SECONDS = 3600
ALPHA_SECONDS = 3e-4  # a message over Gigabit Ethernet
TIE_SHARE = 0.02  # medians that differ by less are not distinguished

# What a row loses of a sum: rows are compared with baselines that lose no more.
EXACT, ROUNDED, COMPRESSED = range(3)


@dataclasses.dataclass(frozen=True)
class Cell:
    workers: int
    rate: str
    compute_seconds: float
    network: str = "resnet50"

    @property
    def name(self) -> str:
        network = "" if self.network == "resnet50" else f"{self.network}, "
        return f"{network}P = {self.workers}, {self.rate}, C = {self.compute_seconds:.3g} s"

    @property
    def dense_seconds(self) -> float:
        """M: the bytes of an all-reduce of everything over the goodput of a link."""
        bits, workers = RATES[self.rate], self.workers
        return 0.0 if bits is None else 8 * 2 * (workers - 1) / workers * NETWORKS[self.network] / (bits * GOODPUT_SHARE)

    @property
    def bucket_bytes(self) -> int:
        """As plan_options::bucket_bytes says, by the rate of the link: the same for all rows that have buckets."""
        wanted = 8 * self.workers * ALPHA_SECONDS * (RATES[self.rate] or 1e11) * GOODPUT_SHARE / 8
        return 1 << (int(min(max(wanted, 64 << 10), 25 << 20)).bit_length() - 1)


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    options: tuple[str, ...]
    loses: int = EXACT
    is_alone: bool = False  # one worker, who has nobody to wait for
    is_ddp: bool = False  # of ddp.py; else of the lab

    @property
    def is_baseline(self) -> bool:
        return self.is_ddp or ("mpi_allreduce" in self.options and not self.is_alone)

    @property
    def waits_in_the_next_step(self) -> bool:
        """For what it has sent: its last step does not wait, and is as much shorter."""
        return "step" in self.options

    def options_in(self, cell: Cell) -> list[str]:
        more = ["--bucket-bytes", str(cell.bucket_bytes)] if "--overlap" in self.options and "--bucket-bytes" not in self.options else []
        return [*(str(cell.bucket_bytes / 2 ** 20) if word == "OURS" else word for word in self.options), *more]


SUMS = ("--topology", "allreduce")
DENSE = (*SUMS, "--drop-ratio", "0")
AHEAD = (*SUMS, "--decide", "ahead")
FRAGMENTS = (*AHEAD, "--drop-ratio", "0.99", "--fragment-elements", "65536")
PLAIN = ("--topology", "mpi_allreduce", "--drop-ratio", "0")
BACKWARD, STEP = ("--overlap", "backward"), ("--overlap", "step")
BFLOAT16 = ("--sum-payload", "bfloat16")
OWNERS = (*STEP, "--exchange", "owners")
ALONE = "the computation alone"
ALGORITHMS = ("pairwise", "ring", "halving_doubling")

ROWS = {row.name: row for row in (
    Row(ALONE, PLAIN, is_alone=True),
    Row("plain MPI_Allreduce", PLAIN),
    Row("DDP as it comes", (), is_ddp=True),
    Row("DDP, buckets as ours", ("--bucket-mb", "OURS"), is_ddp=True),
    Row("DDP, bf16_compress_hook", ("--hook", "bf16"), ROUNDED, is_ddp=True),
    Row("DDP, PowerSGD rank 2", ("--hook", "powersgd"), COMPRESSED, is_ddp=True),
    Row("everything, no overlap", DENSE),
    Row("R = 0.95 at_end, no overlap", SUMS, COMPRESSED),
    Row("everything, backward", (*DENSE, *BACKWARD)),
    Row("everything, step", (*DENSE, *STEP)),
    Row("everything, owners, step", (*DENSE, *OWNERS)),
    Row("everything, bf16, backward", (*DENSE, *BACKWARD, *BFLOAT16), ROUNDED),
    Row("everything, bf16, step", (*DENSE, *STEP, *BFLOAT16), ROUNDED),
    Row("R = 0.95 ahead, backward", (*AHEAD, *BACKWARD), COMPRESSED),
    Row("R = 0.95 ahead, step", (*AHEAD, *STEP), COMPRESSED),
    Row("R = 0.95 ahead, bf16, step", (*AHEAD, *STEP, *BFLOAT16), COMPRESSED),
    Row("R = 0.99 in fragments, ahead, step", (*FRAGMENTS, *STEP), COMPRESSED),
    # By M/C, everything sent: what an algorithm, an order and a size of buckets give.
    *(Row(f"backward, {name}", (*DENSE, *BACKWARD, "--collectives", name)) for name in ALGORITHMS),
    Row("backward, by_type, halving_doubling", (*DENSE, *BACKWARD, "--collectives", "by_type")),
    Row("backward, layer by layer", (*DENSE, *BACKWARD, "--bucket-bytes", "0")),
)}
_NAMES = list(ROWS)
_FIRST, _RATIO = _NAMES[:17], [ALONE, "everything, no overlap", "everything, owners, step", *_NAMES[17:]]
TABLES = {"first": _FIRST, "ratio": _RATIO,
          "quick": [ALONE, "plain MPI_Allreduce", "DDP as it comes", "everything, no overlap", "everything, backward",
                    "everything, owners, step", "R = 0.95 ahead, step"]}


@dataclasses.dataclass
class Result:
    cell: Cell
    row: str
    steps: list[dict]  # that count, of all turns
    load: list[float]  # of the machine before each turn
    refusal: str | None = None  # why there are no steps: a DDP that lacks something

    @property
    def key(self) -> tuple[Cell, str]:
        return self.cell, self.row

    def median(self, key: str) -> float | None:
        return statistics.median(step[key] for step in self.steps) if self.steps and all(key in step for step in self.steps) else None


def result_of(fields: dict) -> Result:
    return Result(**{**fields, "cell": Cell(**fields["cell"])})


def record(program: str, directory: pathlib.Path, network: str, steps: int) -> None:
    """Gradients of two workers and the profile of a step; of VGG-16, all of whose rows send everything, the profile."""
    ranks, what = 2, ["--steps", str(steps), "--batch", "8", "--record-steps", str(RECORDED_STEPS)]
    if network == "vgg16":
        ranks, what = 1, ["--network", network, "--image-size", "224", "--steps", "2", "--batch", "4", "--record-steps", "0"]
    common.record(program, directory, "profile.txt", ranks, *PLAIN, *what)


def run_lab(program: str, row: Row, cell: Cell, cluster: Cluster, steps: int, recording: pathlib.Path) -> list[dict]:
    machines = [0] if row.is_alone else list(range(cell.workers))
    options = ["--network", cell.network, *row.options_in(cell), "--steps", str(WARM_UP_STEPS + row.waits_in_the_next_step + steps), "--replay",
               str(recording), "--by-layer", "--compute-seconds", str(cell.compute_seconds), "--learning-rate", "1e-6", "--classes",
               str(common.MODEL_CLASSES)]
    said = cluster.mpirun(machines, [*common.yielding(len(machines)), program, *options], LONGEST_RUN_SECONDS).stdout
    found = [line for line in common.lines_of(said) if "step" in line][WARM_UP_STEPS:WARM_UP_STEPS + steps]
    # A worker sends so much, and as much comes to it at the same time.
    return [{**{key: line[key] for key in ("total_seconds", "exposed_seconds", "hidden_seconds") if key in line},
             "sent_bytes": (line["sent_up"] + line["sent_down"]) * NETWORKS[cell.network]} for line in found]


def run_ddp(python: str, row: Row, cell: Cell, cluster: Cluster, steps: int, recording: pathlib.Path) -> list[dict]:
    with tempfile.TemporaryDirectory() as directory:
        output = pathlib.Path(directory) / "steps.json"
        program = [python, str(pathlib.Path(__file__).resolve().parent / "ddp.py"), "--model", cell.network, *row.options_in(cell), "--replay",
                   str(recording), "--compute-seconds", str(cell.compute_seconds), "--warm-up", str(WARM_UP_STEPS), "--steps", str(steps),
                   "--interface", "eth0", "--output", str(output)]
        torch_ranks.run(cell.workers, cluster.address(0), "eth0", lambda rank: cluster.command_on(rank, *program), LONGEST_RUN_SECONDS)
        return json.loads(output.read_text())["steps"]


def python_with_torch(wanted: str | None) -> str | None:
    check = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
    candidates = [wanted] if wanted else [sys.executable, "/usr/bin/python3"]
    return next((each for each in candidates if subprocess.run([each, "-c", check], check=False).returncode == 0), None)


def verdict(results: list[Result], of: Result) -> str:
    """The row's step over that of the quickest baseline of the cell that loses no more."""
    row = ROWS.get(of.row)
    if row is None:  # kept from a run of other rows
        return ""
    others = [each for each in results if each.cell == of.cell and each.steps and each.row in ROWS
              and ROWS[each.row].is_baseline and ROWS[each.row].loses <= row.loses]
    if row.is_baseline or row.is_alone or not others or not of.steps:
        return ""
    best = min(others, key=lambda each: each.median("total_seconds"))
    ratio = of.median("total_seconds") / best.median("total_seconds")
    word = "**loses**, " if ratio > 1 + TIE_SHARE else "ties, " if ratio >= 1 - TIE_SHARE else ""
    return f"{word}{ratio:.2f} of {best.row}"


HEAD = ("", "step s", "least to most", "step - C", "waited s", "hidden s", "sent MB", "bytes / goodput s", "over the best baseline", "steps", "load")


def cells_of(results: list[Result], each: Result) -> tuple[str, ...]:
    if not each.steps:
        return (each.row, f"refused: {each.refusal}", *[""] * (len(HEAD) - 2))

    def shown(value: float | None, digits: int = 3) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    total, sent, rate = [step["total_seconds"] for step in each.steps], each.median("sent_bytes"), RATES[each.cell.rate]
    return (each.row, shown(statistics.median(total)), f"{min(total):.2f} to {max(total):.2f}",
            shown(statistics.median(total) - each.cell.compute_seconds), shown(each.median("exposed_seconds")), shown(each.median("hidden_seconds")),
            shown(sent / 1e6, 1), shown(None if rate is None else 8 * sent / (rate * GOODPUT_SHARE)), verdict(results, each), str(len(total)),
            ", ".join(f"{load:.1f}" for load in each.load))


def table(results: list[Result]) -> str:
    return "\n".join(f"**{cell.name}**\n\n" + common.markdown(HEAD, (cells_of(results, each) for each in results if each.cell == cell))
                     for cell in dict.fromkeys(each.cell for each in results))


def parse() -> argparse.Namespace:
    parser = common.parser("overlap", __doc__)
    parser.add_argument("--quick", action="store_true", help="two workers at 1 Gb/s, some rows, one round: a few minutes")
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rates", nargs="+", choices=RATES, default=["1 Gb/s"], help="of every link, each way")
    parser.add_argument("--compute-seconds", nargs="+", type=float, default=[0.388], help="of a step, paced layer by layer")
    parser.add_argument("--ratios", nargs="+", type=float, metavar="M/C",
                        help="in place of --compute-seconds: how the seconds of an all-reduce of everything compare with them")
    parser.add_argument("--network", choices=NETWORKS, default="resnet50", help="whose step is replayed")
    parser.add_argument("--table", choices=TABLES, default="first", help="rows that are run; of vgg16 those that send everything")
    parser.add_argument("--rows", nargs="+", choices=ROWS, metavar="ROW", help="in place of a table: of " + ", ".join(ROWS))
    parser.add_argument("--steps", type=int, default=5, help="measured in each run of a row")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each row, one round after another")
    parser.add_argument("--recorded-steps", type=int, default=20, help="of the run whose gradients are recorded")
    parser.add_argument("--torch-python", help="a python3 whose PyTorch DDP is run with; the system's without it")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/overlap"))
    given = parser.parse_args()
    if given.quick:
        given.workers, given.rates, given.rounds, given.table = [2], ["1 Gb/s"], 1, "quick"
    return given


def cells_wanted(given: argparse.Namespace) -> list[Cell]:
    cells = [Cell(w, r, c, given.network) for r in given.rates for w in given.workers for c in given.compute_seconds]
    if given.ratios:
        dense = [Cell(w, r, 0, given.network) for r in given.rates for w in given.workers]
        cells = [dataclasses.replace(each, compute_seconds=float(f"{each.dense_seconds / ratio:.3g}")) for each in dense for ratio in given.ratios]
    if any(each.compute_seconds == 0 for each in cells):
        raise ValueError("--ratios needs a limited rate and two workers at least")
    return cells


def main() -> None:
    given = parse()
    given.output.mkdir(parents=True, exist_ok=True)
    cells, names, python = cells_wanted(given), given.rows or TABLES[given.table], python_with_torch(given.torch_python)
    if given.network == "vgg16":  # of which no gradients are recorded, which PowerSGD and layer dropping go by
        names = [name for name in names if ROWS[name].loses != COMPRESSED]
    if python is None:
        print("DDP is left out: no python3 with torch", flush=True)
        names = [name for name in names if not ROWS[name].is_ddp]
    recording = given.output / f"gradients-{given.network}"
    record(given.program, recording, given.network, given.recorded_steps)
    results = common.read(given.output, result_of)
    for cell in cells:
        kept = {each.row: each for each in results if each.cell == cell}
        rounds = [[name for name in names if name not in kept or not kept[name].refusal and len(kept[name].load) <= turn]
                  for turn in range(given.rounds)]
        if not any(rounds):
            continue
        with common.cluster_of(cell.workers, cell.rate) as cluster:
            for name in (name for each in rounds for name in each):
                row, load = ROWS[name], os.getloadavg()[0]
                result = kept.setdefault(name, Result(cell, name, [], []))
                try:
                    runner, program = (run_ddp, python) if row.is_ddp else (run_lab, given.program)
                    result.steps += runner(program, row, cell, cluster, given.steps, recording)
                except RuntimeError as error:
                    if not row.is_ddp:
                        raise
                    result.refusal = str(error).splitlines()[-1]
                result.load.append(load)
                results = common.with_results(results, [result])
                common.write(given.output, results, common.environment("overlap", **common.EMULATION), table(results))
                print(f"{cell.name}, {name}: {result.refusal or '%.3f s a step' % result.median('total_seconds')}", flush=True)
    common.finish(given.output, table([each for each in results if each.cell in cells]))


if __name__ == "__main__":
    common.main("overlap", main)
