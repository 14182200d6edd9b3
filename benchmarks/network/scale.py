#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What the scheme gives with more workers and quicker networks than there are here: a model of a step, calibrated on what
./benchmarks/network/run measured and on how much of the model the workers of real training send together."""

import argparse
import dataclasses
import json
import math
import pathlib
import shutil
import statistics

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

import calibration  # noqa: E402
import command  # noqa: E402
from cluster import run_in_group  # noqa: E402
from experiment import GOODPUT_SHARE  # noqa: E402
from plots import finish  # noqa: E402
from settings import TOPOLOGIES  # noqa: E402

MODEL_BYTES = 4 * 25_557_032
WORKERS = [2 ** power for power in range(2, 11)]
RATES_GBIT = [1, 10, 25, 100, 400]
DRAWN_RATES_GBIT = [1, 10, 100, 400]
RATIO = 0.95
LONGEST_RUN_SECONDS = 24 * 3600
CHUNK_BYTES = 16 << 20  # that the harness sums at a time in an allreduce
# Assumed, as of TCP in a rack: in a cluster on one machine it drowns in the turns that the ranks take on its cores.
MESSAGE_SECONDS = 50e-6
COMPUTE_SECONDS = TOPOLOGIES["first"].compute_seconds


@dataclasses.dataclass(frozen=True)
class Union:
    """What W workers of real training sent, each, and what they changed together: shares of the model."""

    workers: int
    sent_up: float
    sent_down: float


def measure_union(given: argparse.Namespace, workers: int) -> Union:
    directory = given.output / f"union-{workers}"
    shutil.rmtree(directory, ignore_errors=True)
    print(f"Training with {workers} workers in one process ...", flush=True)
    run_in_group([given.program, "--transport", "inprocess", "--workers", str(workers), "--data", given.data,
                    "--runs", "with", "--selection", "local", "--drop-ratio", str(RATIO), "--batch", "8", "--steps", str(given.steps),
                    "--warm-up", "10", "--learning-rate", "0.01", "--threads", "1", "--output", str(directory)], LONGEST_RUN_SECONDS)
    steps = [line for line in map(json.loads, (directory / "with" / "metrics.jsonl").read_text().splitlines())
             if "step" in line]
    settled = steps[len(steps) // 2:]
    # What a step changed goes down at the beginning of the next.
    return Union(workers, statistics.fmean(each["sent_up"] for each in settled),
                 statistics.fmean(each["sent_down"] for each in settled))


def unions(given: argparse.Namespace) -> list[Union]:
    """Measured once: a file keeps them, with what they were measured with."""
    file = given.output / "unions.json"
    how = {"data": given.data, "steps": given.steps, "drop_ratio": RATIO}
    kept = json.loads(file.read_text()) if file.exists() else {}
    known = {each["workers"]: Union(**each) for each in kept["unions"]} if kept.get("how") == how else {}
    for workers in given.union_workers:
        if workers not in known:
            known[workers] = measure_union(given, workers)
            file.write_text(json.dumps({"how": how, "unions": [dataclasses.asdict(each) for _, each in sorted(known.items())]},
                                       indent=1) + "\n")
    return [known[workers] for workers in sorted(set(given.union_workers))]


def independence(measured: list[Union]) -> float:
    """The exponent g for which W workers send together what W**g would who choose by themselves: 1 - (1 - up)**(W**g). 0:
    all send the same; 1: nobody's choice says anything of another's."""
    points = [(math.log(each.workers), math.log(math.log1p(-each.sent_down) / math.log1p(-each.sent_up)))
              for each in measured if 0 < each.sent_down < 1]
    if not points:
        raise ValueError("no training held anything back")
    return sum(x * y for x, y in points) / sum(x * x for x, _ in points)


@dataclasses.dataclass(frozen=True)
class Scheme:
    name: str
    by_allreduce: bool
    drops: bool
    agrees: bool
    colour: str
    dashes: str


SCHEMES = [
    Scheme("server, everything", False, False, False, "#909498", "-"),
    Scheme("server, local selection", False, True, False, "#E69F00", "-"),
    Scheme("server, agreed selection", False, True, True, "#0072B2", "-"),
    Scheme("allreduce, everything", True, False, True, "#909498", "--"),
    Scheme("allreduce, agreed selection", True, True, True, "#0072B2", "--"),
]


@dataclasses.dataclass(frozen=True)
class Model:
    costs: calibration.Costs
    sent: float  # what a worker sends of the model when it drops layers
    exponent: float  # see independence()

    def together(self, workers: int) -> float:
        """What all workers send together with local selection."""
        return 1 - (1 - self.sent) ** (workers ** self.exponent)

    def step_seconds(self, scheme: Scheme, workers: int, gbit: float) -> float:
        up = self.sent if scheme.drops else 1.0
        down = self.together(workers) if scheme.drops and not scheme.agrees else up
        goodput = gbit * 1e9 / 8 * GOODPUT_SHARE
        worker = COMPUTE_SECONDS + self.costs.worker.at((up + down) * MODEL_BYTES)
        line = self.costs.communication["allreduce" if scheme.by_allreduce else "server"]
        # One message to and one from each other rank at the busiest link, and as many to agree on what is sent.
        messages = 2 * workers * (2 if scheme.drops and scheme.agrees else 1)
        if scheme.by_allreduce:
            messages = 2 * workers + 2 * (workers - 1) * math.ceil(up * MODEL_BYTES / CHUNK_BYTES)
        if scheme.by_allreduce:
            on_link = 2 * (workers - 1) / workers * up * MODEL_BYTES
            server = self.costs.server.at_zero * down  # each updates its own replica
        else:
            on_link = workers * (up + down) * MODEL_BYTES
            server = self.costs.server.at_zero * down + self.costs.server.slope * workers * up * MODEL_BYTES
        return worker + server + messages * MESSAGE_SECONDS + line.slope * on_link / goodput


def draw_union(model: Model, measured: list[Union]) -> plt.Figure:
    figure, axes = plt.subplots(figsize=(4.6, 3.2), layout="constrained")
    everywhere = [2 ** (power / 4) for power in range(0, 41)]
    axes.plot(everywhere, [100 * model.together(workers) for workers in everywhere], color="#E69F00",
              label=f"down, local selection: 1 − (1 − up)^(W^{model.exponent:.2f})")
    axes.plot([each.workers for each in measured], [100 * each.sent_down for each in measured], "o", color="#E69F00",
              markersize=4, label="down, measured")
    axes.plot([each.workers for each in measured], [100 * each.sent_up for each in measured], "s", color="#009E73",
              markersize=4, label="up, measured")
    axes.plot([1, 1024], [100 * model.sent] * 2, color="#0072B2", label="up, and down with agreed selection")
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 4, 16, 64, 256, 1024], ["1", "4", "16", "64", "256", "1,024"])
    axes.set_ylim(0, 100)
    finish(axes, "workers", f"% of the model a step, R = {RATIO}")
    axes.legend(fontsize=7, frameon=False, loc="upper left")
    return figure


def draw_steps(model: Model) -> plt.Figure:
    figure, panels = plt.subplots(2, 2, figsize=(7, 5.4), sharex=True, sharey=True, layout="constrained")
    for axes, gbit in zip(panels.flat, DRAWN_RATES_GBIT):
        for scheme in SCHEMES:
            axes.plot(WORKERS, [model.step_seconds(scheme, workers, gbit) for workers in WORKERS], scheme.dashes,
                      color=scheme.colour, linewidth=1.4, label=scheme.name)
        axes.axhline(COMPUTE_SECONDS, color="black", linewidth=0.6, linestyle=":")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([4, 16, 64, 256, 1024], ["4", "16", "64", "256", "1,024"])
        axes.set_title(f"{gbit} Gb/s", fontsize=9, loc="left")
        finish(axes, "workers", "seconds a step")
        axes.label_outer()
    panels[0, 0].legend(fontsize=7, frameon=False)
    return figure


def table(model: Model) -> str:
    shown = [4, 16, 64, 256, 1024]
    lines = ["| Gb/s | | " + " | ".join(f"{workers:,} workers" for workers in shown) + " |", "|---" * (2 + len(shown)) + "|"]
    for gbit in RATES_GBIT:
        for scheme in SCHEMES:
            seconds = [model.step_seconds(scheme, workers, gbit) for workers in shown]
            lines.append(f"| {gbit if scheme is SCHEMES[0] else ''} | {scheme.name} | "
                         + " | ".join(f"{each:.2f}" if each < 100 else f"{each:.0f}" for each in seconds) + " |")
    return "\n".join(lines) + "\n"


def most_workers(model: Model, quicker: Scheme, slower: Scheme, gbit: float) -> int:
    """Up to how many workers the one is quicker than the other; 0: with none."""
    upto = 0
    for workers in range(2, WORKERS[-1] + 1):
        if model.step_seconds(quicker, workers, gbit) >= model.step_seconds(slower, workers, gbit):
            return upto
        upto = workers
    return upto


def limits(model: Model) -> str:
    named = {scheme.name: scheme for scheme in SCHEMES}
    pairs = [("server, local selection", "allreduce, everything"), ("server, agreed selection", "allreduce, everything"),
             ("server, agreed selection", "allreduce, agreed selection")]
    lines = ["| up to how many workers | " + " | ".join(f"{gbit} Gb/s" for gbit in RATES_GBIT) + " |",
             "|---" * (1 + len(RATES_GBIT)) + "|"]
    for quicker, slower in pairs:
        counts = [most_workers(model, named[quicker], named[slower], gbit) for gbit in RATES_GBIT]
        lines.append(f"| {quicker}, beats {slower} | " + " | ".join(f"{each:,}" for each in counts) + " |")
    filled = next((workers for workers in range(1, 10 ** 6) if model.together(workers) > 0.5), None)
    half = "with no number of workers" if filled is None else f"from {filled:,} workers on"
    return "\n".join(lines) + f"\n\nWith local selection half of the model comes down {half}.\n"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./benchmarks/network/scale", description=__doc__)
    parser.add_argument("--network", type=pathlib.Path, default=calibration.SHIPPED,
                        help="directory of the experiment's results; default: those that came with the sources")
    parser.add_argument("--data", default="synthetic", help="cifar10:DIR, imagefolder:DIR or synthetic")
    parser.add_argument("--steps", type=int, default=40, help="of training, for each number of workers")
    parser.add_argument("--union-workers", type=int, nargs="+", default=[2, 4, 8, 16],
                        help="with which to train; a worker takes some 400 MB")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/scale"))
    parser.add_argument("--program", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if min(given.union_workers) < 2 or given.steps < 4:
        parser.error("--union-workers needs at least 2, --steps at least 4")
    return given


def main() -> None:
    given = parse()
    results = calibration.read(given.network)
    given.output.mkdir(parents=True, exist_ok=True)
    measured = unions(given)
    costs = calibration.costs(results)
    model = Model(costs, statistics.fmean(each.sent_up for each in measured), independence(measured))
    text = f"{table(model)}\n{limits(model)}"
    (given.output / "table.md").write_text(text)
    (given.output / "results.json").write_text(json.dumps(
        {"model": dataclasses.asdict(model), "errors_in_second_topology": calibration.errors(results, costs), "unions": [dataclasses.asdict(each) for each in measured],
         "step_seconds": {scheme.name: {str(gbit): {str(workers): model.step_seconds(scheme, workers, gbit)
                                                    for workers in WORKERS} for gbit in RATES_GBIT}
                          for scheme in SCHEMES}}, indent=1) + "\n")
    for name, figure in (("union.svg", draw_union(model, measured)), ("step.svg", draw_steps(model))):
        figure.savefig(given.output / name, bbox_inches="tight", metadata={"Date": None})
        plt.close(figure)
    print(f"\n{text}\nWritten to {given.output}: results.json, table.md, union.svg, step.svg")


if __name__ == "__main__":
    command.run("scale", main)
