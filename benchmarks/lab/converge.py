#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Trains ResNet-50 with each setting and several seeds, and says what each costs in bytes and in accuracy, compared with the run that sends everything.
Runs that are there already are not repeated."""

import argparse
import dataclasses
import pathlib
import statistics
import subprocess

import common

WINDOW = 25  # steps that a loss is a mean over: one batch is noise

# The best rates that were tried, on a seed of its own, of the runs that send everything, and of correction with layers
# chosen ahead.
MOMENTUM = ("--learning-rate", "0.05", "--momentum", "0.9")
CORRECTED = ("--learning-rate", "0.01", "--residual-momentum", "0.9")
PLAIN = ("--learning-rate", "0.3")
LOCAL, AHEAD = ("--selection", "local"), ("--topology", "allreduce", "--decide", "ahead")


def _lossy(bound: str) -> tuple[str, ...]:
    return (*MOMENTUM, *LOCAL, "--transport", "udp", "--link-rate", "1000000000", "--loss-bound", bound, "--inject-loss", "0.05")


SETTINGS = {
    "everything": ("--drop-ratio", "0", *MOMENTUM),
    **{f"R = {ratio}": ("--drop-ratio", ratio, *LOCAL, *MOMENTUM) for ratio in ("0.9", "0.95", "0.99")},
    **{f"agreed, R = {ratio}": ("--drop-ratio", ratio, *MOMENTUM) for ratio in ("0.9", "0.95", "0.99")},
    "budget 5.3 %": ("--budget", "0.053", *LOCAL, *MOMENTUM),
    "agreed, budget 5.3 %": ("--budget", "0.053", *MOMENTUM),
    "agreed, budget 3 %": ("--budget", "0.03", *MOMENTUM),
    "R = 0.95, correction": ("--drop-ratio", "0.95", *LOCAL, *CORRECTED),
    "agreed, R = 0.95, correction": ("--drop-ratio", "0.95", *CORRECTED),
    "agreed, R = 0.95, correction, ahead": ("--drop-ratio", "0.95", *AHEAD, *CORRECTED),
    "agreed, R = 0.95, fragments": ("--drop-ratio", "0.95", "--fragment-elements", "65536", *MOMENTUM),
    "agreed, R = 0.99, warm-up": ("--drop-ratio", "0.99", "--drop-warm-up", "100", *MOMENTUM),
    "R = 0.95, refresh 100": ("--drop-ratio", "0.95", "--refresh", "100", *LOCAL, *MOMENTUM),
    "everything, no momentum": ("--drop-ratio", "0", *PLAIN),
    "R = 0.95, no momentum": ("--drop-ratio", "0.95", *LOCAL, *PLAIN),
    "agreed, R = 0.95, no momentum": ("--drop-ratio", "0.95", *PLAIN),
    "agreed, R = 0.95, no momentum, ahead": ("--drop-ratio", "0.95", *AHEAD, *PLAIN),
    # Bounded loss: one packet of twenty is lost on purpose.
    **{f"R = 0.95, udp, p = {bound}": ("--drop-ratio", "0.95", *_lossy(bound)) for bound in ("0", "0.1", "0.2")},
}


@dataclasses.dataclass
class Result:
    setting: str
    seed: int
    loss: float  # at the end
    top1: float
    sent_up: float  # share of the bytes, without the first step, which sends the whole model
    sent_down: float

    @property
    def key(self) -> tuple[str, int]:
        return self.setting, self.seed


def train(given: argparse.Namespace, setting: str, seed: int) -> Result:
    options = SETTINGS[setting]
    ranks = given.workers + (0 if "allreduce" in options else 1)
    done = subprocess.run([*common.mpirun_here(ranks), given.program, "--data", given.data, "--steps", str(given.steps), "--batch", str(given.batch),
                           "--seed", str(seed), *options], capture_output=True, text=True, check=False)
    lines = common.lines_of(done.stdout)
    steps = [line for line in lines if "step" in line]
    if done.returncode != 0 and "has diverged" not in done.stderr or len(steps) < 2:
        raise RuntimeError(done.stderr.strip())
    # One that diverges is a finding, and no reason to leave the others out.
    top1 = lines[-1].get("top1", float("nan"))
    return Result(setting, seed, statistics.fmean(line["loss"] for line in steps[-WINDOW:]), top1,
                  statistics.fmean(line["sent_up"] for line in steps[1:]), statistics.fmean(line["sent_down"] for line in steps[1:]))


HEAD = ("", "seeds", "loss", "top-1", "of all seeds", "sent up", "sent down")


def table(results: list[Result]) -> str:
    rows = []
    for setting in dict.fromkeys(each.setting for each in results):
        runs = [each for each in results if each.setting == setting]
        ends = [each.top1 for each in runs]
        mean = {key: statistics.fmean(getattr(each, key) for each in runs) for key in ("loss", "top1", "sent_up", "sent_down")}
        rows.append((setting, str(len(runs)), f"{mean['loss']:.3f}", f"{100 * mean['top1']:.1f} %", f"{100 * min(ends):.1f}–{100 * max(ends):.1f}",
                     f"{100 * mean['sent_up']:.2f} %", f"{100 * mean['sent_down']:.2f} %"))
    return common.markdown(HEAD, rows)


def main() -> None:
    parser = common.parser("converge", __doc__)
    parser.add_argument("--data", default="synthetic", help="cifar10:DIR, imagefolder:DIR or synthetic")
    parser.add_argument("--steps", type=int, default=200, help="of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32, help="images of a worker in each step")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="SETTING",
                        help="of " + ", ".join(SETTINGS).replace("%", "%%"))
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/convergence"))
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    results = common.read(given.output, lambda fields: Result(**fields))
    study = {"data": given.data.partition(":")[0], "steps": given.steps, "workers": given.workers, "images_a_worker": given.batch}
    made_by = common.environment("converge", **study)
    # All settings of a seed first, so that a study cut short compares like with like.
    for seed in given.seeds:
        for setting in given.settings:
            if (setting, seed) in {each.key for each in results}:
                continue
            print(f"seed {seed}, {setting} ...", flush=True)
            results = common.with_results(results, [train(given, setting, seed)])
            common.write(given.output, results, made_by, table(results))
    common.finish(given.output, table(results))


if __name__ == "__main__":
    common.main("converge", main)
