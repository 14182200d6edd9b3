#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Trains ResNet-50 with each setting and several seeds, and says what each costs in steps, in time at 1 Gb/s and in
accuracy, beside the run that sends everything. Runs that are there already are not repeated: a longer study goes on."""

import argparse
import dataclasses
import json
import pathlib
import shutil

import calibration
import command
import convergence_report
from cluster import run_in_group
from settings import CONVERGENCE, Training

LONGEST_RUN_SECONDS = 24 * 3600


@dataclasses.dataclass(frozen=True)
class Run:
    """A setting with a seed."""

    setting: Training
    seed: int
    given: argparse.Namespace

    def output(self) -> pathlib.Path:
        return self.given.output / f"seed-{self.seed}" / self.setting.file_name

    def directory(self) -> pathlib.Path:
        """That the harness writes."""
        return self.output() / ("without" if self.setting.sends_everything else "with")

    def arguments(self) -> list[str]:
        given = self.given
        return ["--data", given.data, "--steps", str(given.steps), "--batch", str(given.batch), "--seed", str(self.seed),
                "--warm-up", str(given.warm_up), "--evaluate-every", str(given.evaluate_every),
                *self.setting.options]

    def has_begun(self) -> bool:
        """RuntimeError if what is there is another run: it may be of hours."""
        config = self.directory() / "config.json"
        if not config.exists() or not (self.directory() / "metrics.jsonl").exists():
            return False
        said = json.loads(config.read_text())
        before, after = said["options"]["command_line"].split(" "), " ".join(self.arguments())
        place = before.index("--output")
        before = " ".join(before[:place] + before[place + 2:])
        if (before, said["workers"]) != (after, self.given.workers):
            raise RuntimeError(f"{self.directory()} is of {said['workers']} workers with {before}, and this study has "
                               f"{self.given.workers} with {after}: give it another --output")
        return True

    def has_ended(self) -> bool:
        if not self.has_begun():
            return False
        lines = (self.directory() / "metrics.jsonl").read_text().splitlines()
        return bool(lines) and json.loads(lines[-1]).get("evaluation_after_step") == self.given.steps


def train(run: Run) -> None:
    if run.has_ended():
        return
    print(f"seed {run.seed}, {run.setting.name} ...", flush=True)
    shutil.rmtree(run.output(), ignore_errors=True)
    try:
        run_in_group(["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--quiet",
                      "-n", str(run.setting.servers + run.given.workers), run.given.program, *run.arguments(),
                      "--output", str(run.output())], LONGEST_RUN_SECONDS)
    except RuntimeError as error:
        if not run.has_begun():
            raise
        # One that diverges is a finding, and no reason to leave the others out.
        print(f"  {error}", flush=True)


def parse() -> argparse.Namespace:
    parser = command.study_parser("converge", __doc__, steps=200, output="build/convergence")
    parser.add_argument("--settings", nargs="+", choices=CONVERGENCE, default=list(CONVERGENCE), metavar="SETTING",
                        help="of " + ", ".join(CONVERGENCE).replace("%", "%%"))
    parser.add_argument("--evaluate-every", type=int, default=50, help="steps between evaluations")
    parser.add_argument("--network", type=pathlib.Path, default=calibration.SHIPPED,
                        help="directory of the experiment's results, which give a step's seconds at 1 Gb/s; default: "
                             "those that came with the sources")
    return parser.parse_args()


def main() -> None:
    given = parse()
    given.output.mkdir(parents=True, exist_ok=True)
    # All settings of a seed first, so that a study cut short compares like with like.
    runs = [Run(CONVERGENCE[name], seed, given) for seed in given.seeds for name in given.settings]
    seconds = calibration.step_seconds(calibration.read(given.network))
    for run in runs:
        run.has_begun()  # or else, before hours of training
    if not given.report_only:
        for run in runs:
            train(run)
    convergence_report.write({name: [run.directory() for run in runs if run.setting.name == name and run.has_begun()]
                              for name in given.settings}, given, seconds)


if __name__ == "__main__":
    command.run("converge", main)
