#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Steps of workers without a server over an emulated cluster: what communication exposes, with sums after the backward pass and
beside it, and what PyTorch's DistributedDataParallel makes of the same pace. All rows of a cell are run in turn, several times over,
so that they meet the same load of the machine. What the output directory has is not run again. --alone: collectives and nothing else. --paper:
the scale of the paper on owners, by arithmetic. Both have a --help of their own."""

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import time

import command
import overlap_alone
import overlap_paper
import overlap_report
import overlap_timeline
import report
from cluster import Cluster
from emulation import EMULATION, cluster_of, require_same_emulation
from experiment import commit, machine
from overlap_report import Result, Turn
from overlap_rows import NETWORKS, ROWS, TABLES, Cell, Row, cell_of_ratio, possible
from overlap_runs import calibrate, drift, python_with_torch, record, run_ddp, run_harness, run_seconds, share_of_counted, steps_of
from settings import RATES


class Session:
    """Runs what is missing of the cells and rows, until the minutes are over."""

    def __init__(self, given: argparse.Namespace):
        self.given = given
        self.recording = given.output / ("gradients" if given.network == "resnet50" else f"gradients-{given.network}")
        self.results = overlap_report.read(given.output)
        require_same_emulation(given.output, report.runs(given.output))
        self.deadline = time.monotonic() + 60 * given.budget_minutes if given.budget_minutes else float("inf")
        self.python = python_with_torch(given.torch_python)
        self.environment = {**machine(), **EMULATION, "command": command.recorded("overlap")}

    def missing(self, cell: Cell, name: str) -> int:
        """Turns of a row that are to be run; those of a row that was refused are not tried again."""
        kept = next((each for each in self.results if each.key == (cell, name)), Result(cell, name))
        return 0 if kept.refusal else max(0, self.given.rounds - len(kept.turns))

    def calibrates(self, cell: Cell) -> bool:
        """Workers measure the network among them, which one alone has not."""
        return self.given.calibrate and cell.workers > 1

    def has_time_for(self, row: Row, cell: Cell) -> bool:
        return time.monotonic() + run_seconds(row, cell, self.given.steps) <= self.deadline

    def keep(self, cell: Cell, name: str, turn: Turn) -> None:
        kept = next((each for each in self.results if each.key == (cell, name)), Result(cell, name))
        self.results = overlap_report.with_result(self.results, Result(cell, name, [*kept.turns, turn]))
        overlap_report.write(self.given.output, self.results, self.environment)

    def run_turn(self, row: Row, cell: Cell, cluster: Cluster) -> Turn:
        steps, load = steps_of(row, cell, self.given.steps), os.getloadavg()[0]
        if not row.is_ddp:
            more = ["--calibrate"] if row.is_overlapped and not row.has_server and self.calibrates(cell) else []
            before = cluster.counters(cell.workers - 1)
            found = run_harness(self.given.program, row, cell, cluster, steps, self.recording, more)
            sent = cluster.counters(cell.workers - 1).since(before).sent_bytes
            is_comparable = row.sends_everything and not more  # what calibration sends is not counted
            return Turn(found, load, commit(), link_share=share_of_counted(sent, found, row) if is_comparable else None)
        try:
            found, version = run_ddp(self.python, row, cell, cluster, steps, self.recording)
        except RuntimeError as error:
            return Turn([], load, commit(), refusal=str(error).splitlines()[-1])
        return Turn(found, load, commit(), torch=version)

    def run_cell(self, cell: Cell, names: list[str]) -> bool:
        """Whether all of it was run."""
        rounds = [[name for name in names if self.missing(cell, name) > turn] for turn in range(self.given.rounds)]
        if not any(rounds):
            return True
        with cluster_of(max(ROWS[name].machines(cell.workers) for name in names), cell.rate) as cluster:
            self.environment = {**self.environment, "packet_steering": cluster.keeps_order}
            measured = calibrate(self.given.alone, cell, cluster) if self.calibrates(cell) else None
            for name in (name for each in rounds for name in each):
                if self.missing(cell, name) == 0:  # it was refused in this session
                    continue
                if not self.has_time_for(ROWS[name], cell):
                    print("The minutes are over; the same command goes on where this one ends.", flush=True)
                    return False
                turn, measured = self.steady_turn(ROWS[name], cell, cluster, measured)
                self.keep(cell, name, turn)
                print(f"{cell.name}, {name}: {said_of(turn)}, load {turn.load:.1f}", flush=True)
        return True

    def steady_turn(self, row: Row, cell: Cell, cluster: Cluster, before: dict | None) -> tuple[Turn, dict | None]:
        """A turn, and the calibration after it. Where that differs too much from the one before, the turn is run once more, and the
        one about which they differ less counts."""
        turns = []
        while True:
            turn, after = self.run_turn(row, cell, cluster), None
            if before is not None:
                after = calibrate(self.given.alone, cell, cluster)
                turn.drift, turn.costs, before = drift(before, after), after, after
            turns.append(turn)
            is_steady = turn.refusal or turn.drift is None or turn.drift <= overlap_report.MOST_DRIFT
            if is_steady or len(turns) == 2 or not self.has_time_for(row, cell):
                return min(turns, key=lambda each: each.drift or 0.0), after

    def run(self, cells: list[Cell], names: list[str]) -> None:
        for cell in cells:
            if not self.run_cell(cell, names):
                return


def said_of(turn: Turn) -> str:
    if turn.refusal:
        return f"refused: {turn.refusal}"
    return f"{statistics.median(step['total_seconds'] for step in turn.steps):.3f} s a step"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./benchmarks/network/overlap", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two workers at 1 Gb/s, some rows, one round: a few minutes")
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rates", nargs="+", choices=RATES, default=["1 Gb/s", "100 Mb/s", "10 Gb/s"], help="of every link, each way")
    parser.add_argument("--compute-seconds", nargs="+", type=float, default=[0.388], help="of a step, paced layer by layer")
    parser.add_argument("--ratios", nargs="+", type=float, metavar="M/C",
                        help="in place of --compute-seconds: by how the bytes of everything over the goodput compare with them; other rows")
    parser.add_argument("--network", choices=NETWORKS, default="resnet50", help="whose step is played")
    parser.add_argument("--table", choices=TABLES, help="the rows of a table, in place of --rows")
    parser.add_argument("--rows", nargs="+", choices=ROWS, metavar="ROW", help="of " + ", ".join(ROWS))
    parser.add_argument("--steps", type=int, default=5, help="measured in each run of a row; fewer where a step takes long")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each row, one round after another")
    parser.add_argument("--no-calibrate", dest="calibrate", action="store_false",
                        help="do not measure the network before and after each row: predictions are then those of 1 Gb/s")
    parser.add_argument("--budget-minutes", type=float, help="begin no row that would end later than so many minutes from now")
    parser.add_argument("--again", action="store_true", help="forget what the output directory has of these rows")
    parser.add_argument("--dry-run", action="store_true", help="list what would be run, and about how long it takes")
    parser.add_argument("--prepare", action="store_true", help="build, record the gradients that are played back, and end")
    parser.add_argument("--recorded-steps", type=int, default=20, help="of the run whose gradients are recorded")
    parser.add_argument("--torch-python", help="a python3 whose PyTorch DDP is run with; the system's without it")
    parser.add_argument("--timeline", action="store_true", help="draw when a step computes and when which layers are summed, and end")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/overlap"))
    parser.add_argument("--program", help=argparse.SUPPRESS)
    parser.add_argument("--alone-program", dest="alone", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.quick:
        given.workers, given.rates, given.rounds, given.steps = [2], ["1 Gb/s"], 1, min(given.steps, 5)
    if given.rows is None:
        given.rows = TABLES[given.table or ("quick" if given.quick else "ratio" if given.ratios else "first")]
    if given.program and not given.alone:
        given.alone = str(pathlib.Path(given.program).with_name("collectives_alone"))
    return given


def cells_of(given: argparse.Namespace) -> list[Cell]:
    if given.ratios:
        return [cell_of_ratio(w, r, ratio, given.network) for r in given.rates for w in given.workers for ratio in given.ratios]
    return [Cell(w, r, c, given.network) for r in given.rates for w in given.workers for c in given.compute_seconds]


def rows_of(given: argparse.Namespace, python: str | None) -> list[str]:
    """Those that the program, the network and this machine have."""
    names = given.rows
    if python is None:
        print("DDP is left out: no python3 with torch; tools/install_packages python installs it", flush=True)
        names = [name for name in names if not ROWS[name].is_ddp]
    help_text = subprocess.run([given.program, "--help"], capture_output=True, text=True, check=False).stdout
    names, left_out = possible(names, help_text, given.network)
    for name, why in left_out.items():
        print(f"{name} is left out: {why}", flush=True)
    return names


def main() -> None:
    given = parse()
    given.output.mkdir(parents=True, exist_ok=True)
    session = Session(given)
    names, cells = rows_of(given, session.python), cells_of(given)
    if given.again:
        session.results = [each for each in session.results if not (each.cell in cells and each.row in names)]
    if given.dry_run:
        total = 0.0
        for cell in cells:
            between = 3.0 if session.calibrates(cell) else 0.0
            seconds = sum(session.missing(cell, name) * (run_seconds(ROWS[name], cell, given.steps) + between) for name in names)
            print(f"{cell.name}: {len(names)} rows, about {seconds / 60:.1f} min")
            total += seconds
        print(f"together about {total / 60:.0f} min")
        return
    record(given.program, session.recording, given.network, given.recorded_steps)
    if given.prepare:
        return
    if given.timeline:
        print(f"Written to {overlap_timeline.run_and_draw(given, session.recording, cells[0])}")
        return
    session.run(cells, names)
    print(overlap_report.tables([each for each in session.results if each.cell in cells]))
    print(f"Written to {given.output}: results.json, table.md")


# Studies of their own, each with its options, by the first word.
STUDIES = {"--alone": overlap_alone.main, "--paper": overlap_paper.main}


if __name__ == "__main__":
    study = next((word for word in sys.argv[1:] if word in STUDIES), None)
    if study:
        sys.argv.remove(study)
    command.run("overlap", STUDIES.get(study, main))
