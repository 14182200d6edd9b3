# SPDX-License-Identifier: MIT
"""What the pictures have in common: colours, curves, axes and legends."""
from __future__ import annotations

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from matplotlib.transforms import ScaledTranslation

from run_directory import Run

# Okabe and Ito's colours, told apart with any colour vision; orange and sky blue are left for the parts of a step.
RUN_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#999933", "#882255")
PART_COLOURS = {"worker_seconds": "#B5B9BD", "communication_seconds": "#E69F00", "server_seconds": "#56B4E9"}
PART_NAMES = {"worker_seconds": "worker", "communication_seconds": "communication", "server_seconds": "server"}
INK = "#333333"
STYLE = {
    "font.size": 9, "axes.labelsize": 9, "xtick.labelsize": 8, "ytick.labelsize": 8, "legend.fontsize": 8,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": INK, "axes.labelcolor": INK,
    "text.color": INK, "xtick.color": INK, "ytick.color": INK, "axes.linewidth": 0.7,
    "xtick.major.width": 0.7, "ytick.major.width": 0.7, "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6, "axes.axisbelow": True, "legend.frameon": False, "legend.handlelength": 1.6,
    "savefig.dpi": 200, "svg.fonttype": "none", "svg.hashsalt": "lamina",
}
WIDTH, HEIGHT = 6.0, 3.4  # inches
MOST_COLUMNS = 300  # in a picture with steps on x; of more steps, several share a column


def colours(runs: list[Run]) -> list:
    if len(runs) <= len(RUN_COLOURS):
        return list(RUN_COLOURS[: len(runs)])
    return list(matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(runs))))


def window_of(runs: list[Run]) -> int:
    """Steps to take the mean of, an odd number."""
    return min(101, max(len(run.steps) for run in runs) // 20) | 1


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of the steps around each; fewer at both ends, and without those that are NaN."""
    known = np.isfinite(values)
    kernel = np.ones(min(window, (len(values) - 1) | 1))
    with np.errstate(invalid="ignore"):
        return np.convolve(np.where(known, values, 0), kernel, "same") / np.convolve(known, kernel, "same")


def steps_or_time(runs: list[Run], by_time: bool) -> tuple[str, float]:
    """The label of the x axis, and what to divide seconds by."""
    if not by_time:
        return "Step", 1
    longest = max(run.elapsed[-1] for run in runs)
    for unit, seconds in (("h", 3600), ("min", 60)):
        if longest > 3 * seconds:
            return f"Elapsed time ({unit})", seconds
    return "Elapsed time (s)", 1


def curve(axes: Axes, x: np.ndarray, y: np.ndarray, colour: object, window: int, gid: str) -> None:
    """Each step as a thin line, their mean over the window as a thick one."""
    if window > 1:
        axes.plot(x, y, color=colour, linewidth=0.6, alpha=0.3)
    axes.plot(x, smooth(y, window), color=colour, linewidth=1.5, gid=gid)


def kind_colour(runs: list[Run]) -> object:
    """Of the handles that tell kinds of line apart: the run's own where there is one."""
    return colours(runs)[0] if len(runs) == 1 else "#777777"


def curve_kinds(colour: str, window: int, what: str = "") -> list[Line2D]:
    if window == 1:
        return [Line2D([], [], color=colour, linewidth=1.5, label=f"{what}each step")] if what else []
    return [Line2D([], [], color=colour, linewidth=0.6, alpha=0.5, label=f"{what}each step"),
            Line2D([], [], color=colour, linewidth=1.5, label=f"{what}mean of {window} steps")]


def legend(axes: Axes, runs: list[Run], kinds: list[Line2D]) -> None:
    """Above the axes, where it hides nothing: the runs, and under them what the kinds of line mean."""
    def above(points: float, handles: list[Line2D], columns: int, **more: object) -> Legend:
        place = axes.transAxes + ScaledTranslation(0, points / 72, axes.figure.dpi_scale_trans)
        by_row = [handle for column in range(columns) for handle in handles[column::columns]]
        return axes.legend(handles=by_row, loc="lower left", bbox_to_anchor=(0, 1), bbox_transform=place, ncol=columns,
                           borderaxespad=0, borderpad=0.3, **more)

    lower = above(3, kinds, len(kinds)) if kinds else None
    if runs and lower:
        axes.add_artist(lower)
    if len(runs) == 1:  # a colour tells runs apart; one alone needs its name only
        above(19 if kinds else 3, [Line2D([], [], linewidth=0, label=runs[0].name)], 1, handlelength=0, handletextpad=0,
              fontsize=9)
    elif runs:
        handles = [Line2D([], [], color=colour, linewidth=3, label=run.name)
                   for run, colour in zip(runs, colours(runs))]
        columns = max(1, min(4, len(runs), 95 // (6 + max(len(run.name) for run in runs))))
        above(19 if kinds else 3, handles, columns)


def percent_axis(axes: Axes, lowest: float) -> None:
    axes.set_yscale("log")
    axes.set_ylim(lowest / 1.5, 130)
    axes.yaxis.set_major_locator(LogLocator(subs=(1,) if lowest < 0.5 else (1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def finish(axes: Axes, x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(axis="y")
    axes.set_xlim(left=0)
