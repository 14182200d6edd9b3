# SPDX-License-Identifier: MIT
"""The pictures of the study: quality over bytes, over steps, and over workers."""

import math
import pathlib
import statistics
import sys

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import NullLocator  # noqa: E402

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tools"))
from plots import finish  # noqa: E402

import report  # noqa: E402


def panels(groups):
    figure, axes = plt.subplots(1, len(groups), squeeze=False, layout="constrained", figsize=(3.2 + 3.1 * len(groups), 3.4))
    return figure, axes[0]


# By how the name of a scheme begins: the same in all pictures.
STYLES = {"dense": ("#000000", "o"), "local, by score": ("#0072B2", "s"), "local, fragments in turn": ("#E69F00", "^"),
          "local, all at once": ("#009E73", "v"), "local, in levels": ("#333399", "<"), "gradients dropped": ("#5B8C00", "d"), "one worker": ("#8C8C8C", "x"),
          "SparseLoCo": ("#D55E00", "D"), "PowerSGD": ("#CC79A7", "P"), "DeMo": ("#56B4E9", "X"), "DGC": ("#7A3E00", "p"),
          "ScaleCom": ("#C000C0", "*"), "1-bit Adam": ("#B8A500", "h")}


def style(name):
    colour, marker = next(of for begin, of in STYLES.items() if name.startswith(begin))
    return {"color": colour, "marker": marker, "markersize": 5}


BEHIND = (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)  # the ticks of a loss


def height(outcome, dense) -> float:
    """By how much it ends behind the dense run, and without one what it ends at; NaN without a seed that both have."""
    if outcome is dense:
        return 0.0
    losses = outcome.losses() if dense is None else outcome.behind(dense)
    return statistics.fmean(losses) if losses else math.nan


def over_bytes(groups) -> plt.Figure:
    """How far the best of each scheme ends behind the dense run: down and to the left is better. Without a dense run what it ends at. Bytes
    are those of both ways, as some receive what all others send."""
    shown = {key: of for key, of in groups.items() if len(of) > 3} or groups  # three rows are no front
    names = sorted({report.family(outcome.best.row) for of in shown.values() for outcome in of})
    figure, axes = panels(shown)
    for panel, ((workers, steps), of) in zip(axes, shown.items()):
        dense = report.dense_of(groups, workers, steps)
        for name in names:
            points = sorted((100 * outcome.best.share(), height(outcome, dense)) for outcome in of if report.family(outcome.best.row) == name)
            points = [point for point in points if math.isfinite(point[1])]
            if points and not points[0][0]:  # has no place on a logarithmic axis
                panel.axhline(points[0][1], color=style(name)["color"], linewidth=1, linestyle="--", label=name)
            elif points:
                panel.plot(*zip(*points), linestyle="none", label=name, **style(name))
        panel.set_title(f"W = {workers}, {steps:,} steps", fontsize=9, loc="left")
        finish(panel, "% of the bytes, up and down together", "validation loss" if dense is None else "validation loss behind the dense run", "x")
        panel.xaxis.set_major_formatter("{x:g}")
        if dense is not None:
            panel.set_yscale("symlog", linthresh=BEHIND[1], linscale=0.4)
            panel.set_yticks(BEHIND, [f"{tick:g}" for tick in BEHIND], minor=False)
            panel.yaxis.set_minor_locator(NullLocator())
            heights = [y for line in panel.lines for y in line.get_ydata()]
            panel.set_ylim(min([-0.002, *(2 * height for height in heights)]), 1.3 * max([BEHIND[2], *heights]))
    return with_legend(figure, axes)


def over_step(groups) -> plt.Figure:
    """Of each scheme the best of its variants."""
    figure, axes = panels(groups)
    for panel, ((workers, steps), of) in zip(axes, groups.items()):
        best = {}
        for outcome in of:
            best.setdefault(report.family(outcome.best.row), outcome.best)
        for name, run in best.items():
            panel.plot([point["step"] for point in run.curve], [point["validation_loss"] for point in run.curve],
                       linewidth=1.2, label=name, **style(name))
        panel.set_title(f"W = {workers}, {steps:,} steps", fontsize=9, loc="left")
        finish(panel, "step", "validation loss", "")
    return with_legend(figure, axes)


def over_workers(groups) -> "plt.Figure | None":
    """Of each scheme the best of its variants with about 1 % of the bytes of both ways at most, and the dense run. None where all rows have
    as many workers."""
    by_steps: dict[int, dict[int, dict[str, float]]] = {}
    for (workers, steps), of in groups.items():
        for outcome in of:
            row, share = outcome.best.row, outcome.best.share()
            if row.workers > 1 and (row.scheme == "dense" or share < 0.0125):
                by_steps.setdefault(steps, {}).setdefault(workers, {}).setdefault(report.family(row), outcome.loss())
    by_steps = {steps: of for steps, of in by_steps.items() if len(of) > 1}
    if not by_steps:
        return None
    names = sorted({name for of in by_steps.values() for losses in of.values() for name in losses})
    figure, axes = panels(by_steps)
    for panel, (steps, of) in zip(axes, by_steps.items()):
        for name in names:
            points = [(workers, losses[name]) for workers, losses in of.items() if name in losses]
            if points:
                panel.plot(*zip(*points), linewidth=1.2, label=name, **style(name))
        panel.set_xscale("log", base=2)
        panel.set_xticks(list(of), [str(workers) for workers in of])
        panel.set_title(f"{steps:,} steps", fontsize=9, loc="left")
        finish(panel, "workers", "validation loss", "")
    return with_legend(figure, axes)


def with_legend(figure, axes) -> plt.Figure:
    """One for all panels."""
    drawn = {}
    for panel in axes:
        handles, labels = panel.get_legend_handles_labels()
        drawn |= dict(zip(labels, handles))
    figure.legend(drawn.values(), drawn.keys(), fontsize=7, frameon=False, loc="upper center", ncols=2, bbox_to_anchor=(0.5, 0))
    return figure


def drawn_groups(results):
    """What there are pictures of: not of trials, which would stand for schemes that nobody has, nor of a row that has nothing to be compared with."""
    groups = report.outcomes([each for each in results if not report.is_trial(each.row)])
    return {key: of for key, of in groups.items() if len(of) > 1} or groups


def draw(directory: pathlib.Path, results) -> list[pathlib.Path]:
    """Writes the pictures; their paths, none where all results are of trials."""
    groups = drawn_groups(results)
    paths: list[pathlib.Path] = []
    if not groups:
        return paths
    for drawing in (over_bytes, over_step, over_workers):
        figure = drawing(groups)
        if figure is None:
            continue
        paths.append(directory / f"{drawing.__name__}.svg")
        figure.savefig(paths[-1], bbox_inches="tight", metadata={"Date": None})
        plt.close(figure)
    return paths
