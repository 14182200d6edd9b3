#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Trains ResNet-50 in one process over a network that loses packets, with bounds on what may be missing, and says what
each loses and reaches. Deterministic. Runs that are there already are not repeated: a longer study goes on."""

import argparse
import dataclasses
import json
import pathlib
import shutil
import statistics

import command
from cluster import run_in_group

LONGEST_RUN_SECONDS = 24 * 3600
LAST = 10  # steps that a loss is a mean over


@dataclasses.dataclass(frozen=True)
class Row:
    sends: str  # R = 0 or R = 0.95
    lost: str
    options: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.sends}, {self.lost}"

    @property
    def file_name(self) -> str:
        return "".join(each if each.isalnum() or each == "." else "-" for each in self.name)


def _rows() -> list[Row]:
    # Eager transfers leave out the last p also where nothing is lost; on-probe those of which a share p is.
    def on_probe(p: str) -> tuple[str, ...]:
        return ("--loss-bound", p, "--stop", "on-probe", "--inject-loss", p)

    lost = [("p = 0", ()),
            ("p = 0.1", ("--loss-bound", "0.1")),
            ("p = 0.2", ("--loss-bound", "0.2")),
            ("p = 0.1, gone", ("--loss-bound", "0.1", "--on-loss", "zero")),
            ("p = 0.2, gone", ("--loss-bound", "0.2", "--on-loss", "zero")),
            ("p = 0.2, gone, no tags", ("--loss-bound", "0.2", "--on-loss", "zero", "--loss-tags", "off")),
            ("p = 0.2 on-probe", on_probe("0.2")),
            ("p = 0.2 on-probe, gone", (*on_probe("0.2"), "--on-loss", "zero")),
            ("p = 0.2, down as well", ("--loss-bound", "0.2", "--loss-bound-down", "0.2"))]
    # The best of those tried of the run that sends everything without momentum: docs/benchmarks/convergence.md.
    rate = ("--learning-rate", "0.3")
    ways = [("R = 0", ("--runs", "without", *rate)), ("R = 0.95", ("--runs", "with", "--selection", "local", "--drop-ratio", "0.95", *rate))]
    return [Row(sends, name, (*of_way, *options)) for sends, of_way in ways for name, options in lost]


ROWS = {row.name: row for row in _rows()}


def directory_of(row: Row, seed: int, given: argparse.Namespace) -> pathlib.Path:
    return given.output / f"seed-{seed}" / row.file_name


def arguments_of(row: Row, seed: int, given: argparse.Namespace) -> list[str]:
    return ["--transport", "inprocess", "--workers", str(given.workers), "--threads", str(given.threads), "--data", given.data,
            "--steps", str(given.steps), "--batch", str(given.batch), "--seed", str(seed), "--warm-up", str(given.warm_up),
            *row.options]


def lines_of(row: Row, seed: int, given: argparse.Namespace) -> list[dict]:
    """What a run has written; RuntimeError if it is another one."""
    directory = directory_of(row, seed, given) / row.options[1]
    if not (directory / "metrics.jsonl").exists():
        return []
    said = json.loads((directory / "config.json").read_text())["options"]["command_line"]
    expected = " ".join(arguments_of(row, seed, given))
    if not said.startswith(expected + " --output "):
        raise RuntimeError(f"{directory} is of {said}, and this study has {expected}: give it another --output")
    lines = []
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:  # the last one of a run that was killed: it has not ended, and is trained anew
            break
    return lines


def has_ended(lines: list[dict], given: argparse.Namespace) -> bool:
    return bool(lines) and lines[-1].get("evaluation_after_step") == given.steps


def train(row: Row, seed: int, given: argparse.Namespace) -> None:
    if has_ended(lines_of(row, seed, given), given):
        return
    print(f"seed {seed}, {row.name} ...", flush=True)
    directory = directory_of(row, seed, given)
    shutil.rmtree(directory, ignore_errors=True)
    run_in_group([given.program, *arguments_of(row, seed, given), "--output", str(directory)], LONGEST_RUN_SECONDS)


@dataclasses.dataclass(frozen=True)
class Outcome:
    loss: float
    top1: float
    sent_up: float
    lost_up: float
    lost_down: float


def outcome_of(lines: list[dict]) -> Outcome:
    steps = [line for line in lines if "step" in line]

    def mean(key: str) -> float:
        return statistics.fmean(line.get(key, 0) for line in steps)

    return Outcome(statistics.fmean(line["loss"] for line in steps[-LAST:]), lines[-1]["top1"], mean("sent_up"),
                   mean("lost_up"), mean("lost_down"))


def spread(values: list[float], text: str) -> str:
    mean = text.format(statistics.fmean(values))
    return mean if len(values) == 1 else f"{mean} ({text.format(min(values))}–{text.format(max(values))})"


def table(outcomes: dict[str, dict[int, Outcome]]) -> str:
    lines = ["| | seeds | loss | top-1, % | sent up, % | missing up, % | missing down, % |", "|---|---:|---:|---:|---:|---:|---:|"]
    for name, seeds in outcomes.items():
        found = list(seeds.values())
        cells = [name, str(len(found)), spread([each.loss for each in found], "{:.3f}"),
                 spread([100 * each.top1 for each in found], "{:.1f}")]
        cells += [f"{100 * statistics.fmean(getattr(each, key) for each in found):.2f}"
                  for key in ("sent_up", "lost_up", "lost_down")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def parse() -> argparse.Namespace:
    parser = command.study_parser("converge --bounded", __doc__, steps=300, output="build/bounded")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW",
                        help='of "' + '", "'.join(ROWS) + '"')
    parser.add_argument("--threads", type=int, default=1, help="of which the bits depend on their number")
    return parser.parse_args()


def main() -> None:
    given = parse()
    given.output.mkdir(parents=True, exist_ok=True)
    # All rows of a seed first, so that a study cut short compares like with like.
    for seed in () if given.report_only else given.seeds:
        for name in given.rows:
            train(ROWS[name], seed, given)
    outcomes: dict[str, dict[int, Outcome]] = {}
    for name in given.rows:
        runs = {seed: lines_of(ROWS[name], seed, given) for seed in given.seeds}
        ended = {seed: outcome_of(lines) for seed, lines in runs.items() if has_ended(lines, given)}
        if ended:
            outcomes[name] = ended
    if not outcomes:
        raise RuntimeError(f"{given.output} has no run of {given.steps} steps")
    text = table(outcomes)
    (given.output / "table.md").write_text(text)
    study = {"data": given.data.partition(":")[0], "steps": given.steps, "workers": given.workers,
             "images_a_worker": given.batch, "warm_up_steps": given.warm_up, "threads": given.threads}
    rows = {name: {"options": list(ROWS[name].options),
                   "seeds": {str(seed): dataclasses.asdict(each) for seed, each in seeds.items()}}
            for name, seeds in outcomes.items()}
    (given.output / "results.json").write_text(json.dumps({"study": study, "rows": rows}, indent=1) + "\n")
    print(f"\n{text}\nWritten to {given.output}: results.json, table.md")


if __name__ == "__main__":
    command.run("converge", main)
