# SPDX-License-Identifier: MIT
"""Trains a small network with each row's scheme of communication, and writes a table and pictures of what it reaches with its bytes. The
task char-gpt is a transformer that foretells letters, cifar a residual network that tells images apart. A row that is complete is not
trained again; one that was interrupted goes on from its last snapshot. Without rows: the table of what is there."""

import argparse
import json
import pathlib
import sys

import torch

import pictures
import report
import training
from char_gpt import CharGpt
from cifar import Cifar
from rows import QUICK, Row, parsed
from schemes import scheme_of

ROOT = pathlib.Path(__file__).resolve().parents[2]
TASKS = {task.name: task for task in (CharGpt, Cifar)}


def arguments(words=None):
    parser = argparse.ArgumentParser(prog="benchmarks/learning/run", description=__doc__)
    parser.add_argument("--task", choices=TASKS, default=CharGpt.name)
    parser.add_argument("--data", type=pathlib.Path, metavar="PATH",
                        help="char-gpt: the text to learn (tiny Shakespeare in what is recorded), by default the repository's own "
                             "documentation; cifar: the directory of CIFAR-10's binary version")
    parser.add_argument("--quick", action="store_true", help=f"{len(QUICK)} rows of {QUICK[0].steps} steps: 3 to 8 minutes on two cores")
    parser.add_argument("--row", action="append", type=row, metavar="FIELD=VALUE,...", default=[], dest="rows",
                        help="a row, as results are named; may be repeated; rows.py says what the fields are")
    parser.add_argument("--rows", type=pathlib.Path, metavar="FILE", dest="list", help="a row a line")
    parser.add_argument("--output", type=pathlib.Path, metavar="DIRECTORY", default=ROOT / "build/learning/results")
    given = parser.parse_args(words)
    try:
        if given.list:
            given.rows += [parsed(line) for line in given.list.read_text().splitlines() if line.strip() and line[0] != "#"]
        if given.quick and given.task != CharGpt.name:
            raise ValueError(f"--quick is of the task {CharGpt.name}")
        given.rows += QUICK if given.quick else []
        given.data = TASKS[given.task].read(given.data) if given.rows else None
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return given


def row(text: str) -> Row:
    try:
        return parsed(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def is_complete(directory: pathlib.Path, row: Row, said: dict) -> bool:
    """Whether there is a result of this very data."""
    return report.records(directory).get(row.name(), {}).get("data") == said


def run(kind, data, row: Row, directory: pathlib.Path) -> None:
    """ValueError for a row that cannot be."""
    task = kind(data, row.seed, row.workers)
    scheme = scheme_of(task, row)
    snapshot = ROOT / "build/learning/snapshots" / task.data["sha256"][:8] / f"{row.name()}.pt"
    print(f"training {row.name()}", file=sys.stderr, flush=True)
    torch.set_flush_denormal(True)
    result = training.train(task, scheme, row, snapshot)
    torch.set_flush_denormal(False)  # numpy wonders about it
    training.write(directory, row, result)
    snapshot.unlink(missing_ok=True)
    print(f"  {report.number(result['validation_loss'])}, {report.percent(result['up_share'])} up, "
          f"{report.percent(result['down_share'])} down, {result['seconds']:.0f} s", file=sys.stderr, flush=True)


def page(results) -> str:
    return "\n".join([*report.table(results), "", "Every run:", "", *report.tried(results)]) + "\n"


def main() -> None:
    given = arguments()
    kind = TASKS[given.task]
    directory = given.output / kind.name
    said = kind.data_of(given.data) if given.rows else None
    for each in given.rows:
        if not is_complete(directory, each, said):
            try:
                run(kind, given.data, each, directory)
            except ValueError as error:
                sys.exit(f"benchmarks/learning/run: {each.name()}: {error}")
    results = report.read(directory)
    if given.rows:
        results = [each for each in results if each.row in given.rows]
    if not results:
        sys.exit(f"benchmarks/learning/run: no results in {directory}; --quick or --rows makes some")
    sets = len({json.dumps(each.data, sort_keys=True) for each in results})
    if sets > 1:
        sys.exit(f"benchmarks/learning/run: the results in {directory} are of {sets} sets of data; each wants an --output of its own")
    print("\n".join(report.table(results)))
    if not given.rows:
        (directory / "table.md").write_text(page(results))
    for path in pictures.draw(directory, results):
        print(path, file=sys.stderr)


if __name__ == "__main__":
    main()
