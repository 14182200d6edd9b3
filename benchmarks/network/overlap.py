#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Steps of workers over an emulated cluster: what communication exposes, with sums after the backward pass and beside it, among the
workers or by a server. All rows of a cell are run in turn, several times over, so that they meet the same load of the machine."""

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import tempfile

import command
from cluster import Cluster
from experiment import GOODPUT_SHARE, MODEL_CLASSES, commit, first_line
from settings import RATES

WARM_UP_STEPS = 3
RECORDED_STEPS = 2  # of those that are recorded: each rank keeps them in memory
LONGEST_RUN_SECONDS = 3600
ELEMENTS = 25_557_032

LAMINA = ("--topology", "allreduce", "--selection", "agreed")
DENSE = (*LAMINA, "--runs", "without")
DROPPING = (*LAMINA, "--runs", "with", "--drop-ratio", "0.95")
SERVER = ("--topology", "ps", "--selection", "local", "--runs", "with", "--drop-ratio", "0.95")
PLAIN = ("--topology", "mpi_allreduce", "--runs", "without")


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    options: tuple[str, ...]
    is_alone: bool = False  # one worker, who has nobody to wait for

    @property
    def has_server(self) -> bool:
        return "ps" in self.options

    def machines(self, workers: int) -> int:
        return 1 if self.is_alone else workers + (1 if self.has_server else 0)

    @property
    def directory(self) -> str:
        """Of the harness's output."""
        return "plain" if "mpi_allreduce" in self.options else "with" if "with" in self.options else "without"


ROWS = {row.name: row for row in (
    Row("the computation alone", PLAIN, is_alone=True),
    Row("plain MPI_Allreduce", PLAIN),
    Row("everything, no overlap", DENSE),
    Row("everything, backward", (*DENSE, "--overlap", "backward")),
    Row("everything, step", (*DENSE, "--overlap", "step")),
    Row("everything, owners, step", (*DENSE, "--overlap", "step", "--exchange", "owners")),
    Row("R = 0.95 at_end, no overlap", DROPPING),
    Row("R = 0.95 ahead, no overlap", (*DROPPING, "--decide", "ahead")),
    Row("R = 0.95 ahead, backward", (*DROPPING, "--decide", "ahead", "--overlap", "backward")),
    Row("R = 0.95 ahead, step", (*DROPPING, "--decide", "ahead", "--overlap", "step")),
    Row("R = 0.95 server, at_end", SERVER),
    Row("R = 0.95 server, as_ready, backward", (*SERVER, "--decide", "as_ready", "--overlap", "backward")),
    Row("R = 0.95 server, as_ready, step", (*SERVER, "--decide", "as_ready", "--overlap", "step")),
)}


@dataclasses.dataclass(frozen=True)
class Cell:
    workers: int
    rate: str
    compute_seconds: float

    @property
    def name(self) -> str:
        return f"P = {self.workers}, {self.rate}, C = {self.compute_seconds:g} s"


def record(program: str, directory: pathlib.Path, steps: int) -> None:
    """Gradients of two workers of a real run and the profile of a step; of the gradients some are enough here."""
    if (directory / "profile.txt").exists():
        return
    print("Recording gradients and the profile of a step ...", flush=True)
    subprocess.run([program, "--transport", "inprocess", "--workers", "2", "--runs", "without", "--steps", str(steps),
                    "--warm-up", "20", "--batch", "8", "--classes", str(MODEL_CLASSES), "--no-evaluation",
                    "--record", str(directory)], check=True, stdout=subprocess.DEVNULL)
    for path in directory.glob("worker-*.f32"):
        if int(path.stem.rsplit("-", 1)[1]) >= RECORDED_STEPS:
            path.unlink()


def run_once(program: str, row: Row, cell: Cell, steps: int, recording: pathlib.Path) -> list[dict]:
    """The steps that count."""
    machines = list(range(row.machines(cell.workers)))
    options = [*row.options, "--steps", str(WARM_UP_STEPS + steps), "--threads", "1", "--replay", str(recording), "--by-layer",
               "--compute-seconds", str(cell.compute_seconds), "--learning-rate", "1e-6", "--classes", str(MODEL_CLASSES)]
    with tempfile.TemporaryDirectory() as directory, Cluster(len(machines), RATES[cell.rate], congestion=None) as cluster:
        cluster.mpirun(machines, [program, *options, "--output", directory], LONGEST_RUN_SECONDS)
        lines = (pathlib.Path(directory) / row.directory / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "step" in line][WARM_UP_STEPS:]


def summary_of(row: Row, cell: Cell, runs: list[dict]) -> dict:
    steps = [step for run in runs for step in run["steps"]]
    total = [step["total_seconds"] for step in steps]
    # A worker sends so much, and as much comes to it at the same time; with a server, what its link carries the fuller way.
    def share_of(step: dict) -> float:
        if row.has_server:
            return cell.workers * max(step["sent_up"], step["sent_down"])
        return step["sent_up"] + step["sent_down"]

    sent_bytes = statistics.median(map(share_of, steps)) * 4 * ELEMENTS
    rate = RATES[cell.rate]
    result = {"cell": dataclasses.asdict(cell), "row": row.name, "options": " ".join(row.options), "steps": len(steps),
              "total_seconds": statistics.median(total), "least_seconds": min(total), "most_seconds": max(total),
              "exposed_seconds": statistics.median(total) - cell.compute_seconds,
              "waited_seconds": None, "hidden_seconds": None, "predicted_exposed_seconds": None,
              "sent_mb": sent_bytes / 1e6,
              "bytes_over_goodput": 8 * sent_bytes / (rate * GOODPUT_SHARE) if rate else None,
              "load": [run["load"] for run in runs], "commit": commit()}
    for key, field in (("exposed_seconds", "waited_seconds"), ("hidden_seconds", "hidden_seconds"),
                       ("predicted_exposed_seconds", "predicted_exposed_seconds")):
        if all(key in step for step in steps):
            result[field] = statistics.median(step[key] for step in steps)
    return result


HEAD = ("", "step s", "least to most", "step - C", "waited s", "hidden s", "predicted", "sent MB", "bytes / goodput s", "load")


def table(results: list[dict]) -> str:
    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.3f}"

    lines = []
    for name in dict.fromkeys(Cell(**each["cell"]).name for each in results):
        lines += [f"\n**{name}**\n", "| " + " | ".join(HEAD) + " |", "|---|" + "---:|" * (len(HEAD) - 1)]
        for each in results:
            if Cell(**each["cell"]).name != name:
                continue
            cells = (each["row"], number(each["total_seconds"]), f"{each['least_seconds']:.2f} to {each['most_seconds']:.2f}",
                     number(each["exposed_seconds"]), number(each["waited_seconds"]), number(each["hidden_seconds"]),
                     number(each["predicted_exposed_seconds"]), f"{each['sent_mb']:.1f}", number(each["bytes_over_goodput"]),
                     ", ".join(f"{load:.1f}" for load in each["load"]))
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def write(output: pathlib.Path, results: list[dict], given: argparse.Namespace) -> None:
    model = [line.split(":", 1)[1].strip() for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
             if line.startswith("model name")]
    environment = {"date": datetime.date.today().isoformat(), "processor": f"{len(model)} x {model[0] if model else '?'}",
                   "kernel": platform.release(), "mpi": first_line("mpirun", "--version"),
                   "congestion_control": first_line("sysctl", "-n", "net.ipv4.tcp_congestion_control").strip(),
                   "steps_a_run": given.steps, "rounds": given.rounds}
    (output / "results.json").write_text(json.dumps({"environment": environment, "results": results}, indent=2) + "\n")
    (output / "table.md").write_text(table(results))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./benchmarks/network/overlap", description=__doc__)
    parser.add_argument("--workers", nargs="+", type=int, default=[2])
    parser.add_argument("--rates", nargs="+", choices=RATES, default=["1 Gb/s"], help="of every link, each way")
    parser.add_argument("--compute-seconds", nargs="+", type=float, default=[0.388], help="of a step, paced layer by layer")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help="of " + ", ".join(ROWS))
    parser.add_argument("--steps", type=int, default=5, help="measured in each run of a row")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each row, one round after another")
    parser.add_argument("--recorded-steps", type=int, default=20, help="of the run whose gradients are recorded")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/overlap"))
    parser.add_argument("--program", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    given = parse()
    given.output.mkdir(parents=True, exist_ok=True)
    recording = given.output / "gradients"
    record(given.program, recording, given.recorded_steps)
    file = given.output / "results.json"
    results = json.loads(file.read_text())["results"] if file.exists() else []
    for cell in (Cell(*each) for each in ((w, r, c) for w in given.workers for r in given.rates for c in given.compute_seconds)):
        runs: dict[str, list[dict]] = {name: [] for name in given.rows}
        for turn in range(given.rounds):
            for name in given.rows:
                load = os.getloadavg()[0]
                steps = run_once(given.program, ROWS[name], cell, given.steps, recording)
                runs[name].append({"load": load, "steps": steps})
                median = statistics.median(step["total_seconds"] for step in steps)
                print(f"{cell.name}, round {turn + 1}, {name}: {median:.3f} s a step, load {load:.1f}", flush=True)
        done = [summary_of(ROWS[name], cell, runs[name]) for name in given.rows]
        kept = [each for each in results if not any((each["cell"], each["row"]) == (new["cell"], new["row"]) for new in done)]
        results = [*kept, *done]
        write(given.output, results, given)
    print(table(results))


if __name__ == "__main__":
    command.run("overlap", main)
