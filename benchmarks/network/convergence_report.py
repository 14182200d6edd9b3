# SPDX-License-Identifier: MIT
"""What the runs of the study come to: means over seeds, as a table, as JSON and as pictures."""

import argparse
import dataclasses
import json
import pathlib
import statistics

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter  # noqa: E402

import calibration  # noqa: E402
from plots import COLOURS, finish  # noqa: E402
from settings import CONVERGENCE, Training  # noqa: E402

WINDOW = 25  # steps that a loss is a mean over: one batch alone is noise


@dataclasses.dataclass
class Run:
    losses: list[float]
    sent_up: float  # share of the bytes
    sent_down: float
    seconds: list[float] | None  # of each step at 1 Gb/s; None without a server: the costs of a step are of one with a server
    top1: dict[int, float]  # after a step

    def smoothed(self) -> list[float]:
        return [statistics.fmean(self.losses[max(0, step - WINDOW):step]) for step in range(1, len(self.losses) + 1)]


@dataclasses.dataclass
class Outcome:
    """Of a setting, over its seeds."""

    setting: Training
    runs: list[Run]
    ended_early: int

    def mean(self, values) -> float:
        return statistics.fmean(values(run) for run in self.runs)

    def loss(self) -> list[float]:
        """By step; as far as every run goes."""
        return [statistics.fmean(at) for at in zip(*(run.smoothed() for run in self.runs))]

    def top1(self) -> dict[int, float]:
        return {step: statistics.fmean(run.top1[step] for run in self.runs)
                for step in self.runs[0].top1 if all(step in run.top1 for run in self.runs)}

    def step_seconds(self) -> float | None:
        return self.mean(lambda run: statistics.fmean(run.seconds)) if self.setting.servers else None

    def steps_to_loss(self, goal: float) -> int | None:
        """From where on it stays at or below the goal: a loss that has yet to rise is low, too."""
        above = max((step for step, loss in enumerate(self.loss(), 1) if loss > goal), default=0)
        return above + 1 if above < len(self.loss()) else None

    def steps_to_top1(self, goal: float) -> int | None:
        return next((step for step, top1 in self.top1().items() if top1 >= goal), None)


def read_run(directory: pathlib.Path, setting: Training, workers: int, seconds_of) -> Run | None:
    file = directory / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    steps = [line for line in lines if "step" in line]
    if len(steps) < 2:
        return None
    # Without a server a worker keeps its own slice, and counts what it sends.
    counted = 1.0 if setting.servers or workers == 1 else (workers - 1) / workers
    return Run(losses=[line["loss"] for line in steps],
               # The first sends the whole model.
               sent_up=statistics.fmean(line["sent_up"] for line in steps[1:]) / counted,
               sent_down=statistics.fmean(line["sent_down"] for line in steps[1:]) / counted,
               seconds=[seconds_of(line["bytes_up"] + line["bytes_down"]) for line in steps] if setting.servers else None,
               top1={line["evaluation_after_step"]: line["top1"] for line in lines if "evaluation_after_step" in line})


def outcomes_of(runs: dict[str, list[pathlib.Path]], steps: int, workers: int, seconds_of) -> dict[str, Outcome]:
    outcomes = {}
    for name, directories in runs.items():
        found = [run for run in (read_run(each, CONVERGENCE[name], workers, seconds_of) for each in directories) if run is not None]
        whole = [run for run in found if len(run.losses) == steps and steps in run.top1]
        if whole:
            outcomes[name] = Outcome(CONVERGENCE[name], whole, len(found) - len(whole))
    return outcomes


HEAD = ("", "seeds", "loss", "top-1", "of all seeds", "sent up", "sent down", "s a step", "steps to the loss",
        "s to the loss", "steps to the top-1", "s to the top-1")


def row_of(outcome: Outcome, baseline: Outcome) -> tuple[str, ...]:
    a_step = outcome.step_seconds()

    def reach(steps: int | None) -> tuple[str, str]:
        return "never" if steps is None else str(steps), "" if None in (steps, a_step) else f"{steps * a_step:.0f}"

    ends = [list(run.top1.values())[-1] for run in outcome.runs]
    return (outcome.setting.name, str(len(outcome.runs)) + (f" of {len(outcome.runs) + outcome.ended_early}"
                                                            if outcome.ended_early else ""),
            f"{outcome.loss()[-1]:.3f}", f"{100 * statistics.fmean(ends):.1f} %",
            f"{100 * min(ends):.1f}–{100 * max(ends):.1f}",
            f"{100 * outcome.mean(lambda run: run.sent_up):.2f} %",
            f"{100 * outcome.mean(lambda run: run.sent_down):.2f} %", "" if a_step is None else f"{a_step:.2f}",
            *reach(outcome.steps_to_loss(baseline.loss()[-1])),
            *reach(outcome.steps_to_top1(list(baseline.top1().values())[-1])))


def table(outcomes: dict[str, Outcome]) -> str:
    lines = ["| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|"]
    for outcome in outcomes.values():
        if outcome.setting.baseline in outcomes:
            lines.append("| " + " | ".join(row_of(outcome, outcomes[outcome.setting.baseline])) + " |")
    return "\n".join(lines) + "\n"


def in_families(outcomes: dict[str, Outcome], by_time: bool) -> list[Outcome]:
    """Those that a picture shows: by time, if their steps have seconds."""
    return [each for each in outcomes.values() if each.setting.family and (each.step_seconds() is not None or not by_time)]


def draw(outcomes: dict[str, Outcome], key: str, by_time: bool) -> plt.Figure:
    """A panel a family, its baseline in grey; bands span the seeds."""
    drawn = in_families(outcomes, by_time)
    families = list(dict.fromkeys(each.setting.family for each in drawn))
    columns = min(3, len(families))
    lines = -(-len(families) // columns)
    figure, panels = plt.subplots(lines, columns, squeeze=False, sharex=True, sharey=True, layout="constrained",
                                  figsize=(0.6 + 3.1 * columns, 0.3 + 2.6 * lines))
    for axes, family in zip(panels.flat, families):
        members = [each for each in drawn if each.setting.family == family]
        baselines = [outcomes[name] for name in dict.fromkeys(each.setting.baseline for each in members) if name in outcomes]
        for number, outcome in enumerate([*baselines, *(each for each in members if each not in baselines)]):
            of_run = [dict(enumerate(run.smoothed(), 1)) if key == "loss" else
                      {step: 100 * top1 for step, top1 in run.top1.items()} for run in outcome.runs]
            steps = [step for step in of_run[0] if key != "loss" or step >= min(WINDOW, len(of_run[0]))]
            x = [step * outcome.step_seconds() for step in steps] if by_time else steps
            colour = "#909498" if outcome in baselines else COLOURS[(1, 2, 3, 7)[(number - len(baselines)) % 4]]
            axes.fill_between(x, [min(run[s] for run in of_run) for s in steps],
                              [max(run[s] for run in of_run) for s in steps], color=colour, alpha=0.18, linewidth=0)
            axes.plot(x, [statistics.fmean(run[s] for run in of_run) for s in steps], color=colour, linewidth=1.4,
                      marker=None if key == "loss" else "o", markersize=3, label=outcome.setting.name)
        axes.set_title(family, fontsize=9, loc="left")
        finish(axes, "seconds at 1 Gb/s" if by_time else "step",
               f"training loss, mean of {WINDOW} steps" if key == "loss" else "test accuracy, %")
        axes.legend(fontsize=6.5, frameon=False)
        axes.tick_params(labelbottom=True)
        for axis, set_scale, is_logarithmic in ((axes.xaxis, axes.set_xscale, by_time),
                                                (axes.yaxis, axes.set_yscale, key == "loss")):
            if is_logarithmic:
                set_scale("log")
                axis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
                axis.set_major_formatter(ScalarFormatter())
                axis.set_minor_locator(NullLocator())
        if axes not in panels[:, 0]:
            axes.set_ylabel("")
    for axes in panels.flat[len(families):]:
        axes.set_visible(False)
    return figure


def as_json(outcomes: dict[str, Outcome], given: argparse.Namespace, line: calibration.Line) -> dict:
    return {
        "study": {"data": given.data.partition(":")[0], "steps": given.steps, "workers": given.workers,
                  "images_a_worker": given.batch, "warm_up_steps": given.warm_up, "seeds": given.seeds},
        "step_seconds": dataclasses.asdict(line),
        "settings": {name: {"options": list(outcome.setting.options), "sent_up": outcome.mean(lambda run: run.sent_up),
                            "sent_down": outcome.mean(lambda run: run.sent_down), "step_seconds": outcome.step_seconds(),
                            "loss": [run.smoothed()[-1] for run in outcome.runs],
                            "top1": [run.top1 for run in outcome.runs]}
                     for name, outcome in outcomes.items()},
    }


def write(runs: dict[str, list[pathlib.Path]], given: argparse.Namespace, line: calibration.Line) -> None:
    """`line`: seconds of a step over the bytes of its frames."""
    outcomes = outcomes_of(runs, given.steps, given.workers, line.at)
    if not outcomes:
        raise RuntimeError(f"{given.output} has no run of {given.steps} steps")
    text = table(outcomes)
    (given.output / "table.md").write_text(text)
    (given.output / "results.json").write_text(json.dumps(as_json(outcomes, given, line), indent=1) + "\n")
    pictures = []
    for key in ("loss", "accuracy"):
        for by_time in (each for each in (False, True) if in_families(outcomes, each)):
            pictures.append(f"{key}_by_{'time' if by_time else 'step'}.svg")
            figure = draw(outcomes, key, by_time)
            figure.savefig(given.output / pictures[-1], bbox_inches="tight", metadata={"Date": None})
            plt.close(figure)
    print(f"\n{text}\nWritten to {given.output}: {', '.join(['results.json', 'table.md', *pictures])}")
