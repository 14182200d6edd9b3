# SPDX-License-Identifier: MIT
"""The pictures of one run, or of several side by side."""
from __future__ import annotations

from pathlib import Path
from typing import Callable

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from layers import draw_layers_sent
from run_directory import SECONDS, Run
from style import (HEIGHT, MOST_COLUMNS, PART_COLOURS, PART_NAMES, STYLE, WIDTH, colours, curve, curve_kinds, finish,
                   kind_colour, legend, percent_axis, smooth, steps_or_time, window_of)


def draw_loss(figure: Figure, runs: list[Run], by_time: bool) -> None:
    axes = figure.add_subplot()
    x_label, unit = steps_or_time(runs, by_time)
    window = window_of(runs)
    for run, colour in zip(runs, colours(runs)):
        x = np.array(run.elapsed if by_time else run.steps) / unit
        curve(axes, x, np.array(run.columns["loss"]), colour, window, f"loss: {run.name}")
    axes.set_ylim(bottom=0)
    finish(axes, x_label, "Training loss")
    legend(axes, runs, curve_kinds(kind_colour(runs), window))


def draw_accuracy(figure: Figure, runs: list[Run], by_time: bool) -> None:
    axes = figure.add_subplot()
    x_label, unit = steps_or_time(runs, by_time)
    window = window_of(runs)
    tests = {"top1": ("top-1", "o", "-"), "top5": ("top-5", "s", ":")}
    for run, colour in zip(runs, colours(runs)):
        x = np.array(run.elapsed if by_time else run.steps) / unit
        y = 100 * np.array(run.columns["accuracy"])
        axes.plot(x, smooth(y, window), color=colour, linewidth=0.8, alpha=0.7, gid=f"accuracy: {run.name}")
        x = np.array([point["elapsed_seconds" if by_time else "step"] for point in run.evaluations]) / unit
        for key, (_, marker, dashes) in tests.items():
            y = 100 * np.array([point[key] for point in run.evaluations])
            axes.plot(x, y, dashes, color=colour, linewidth=1.5, marker=marker, markersize=4.5, markeredgewidth=1.1,
                      markerfacecolor=colour if key == "top1" else "white", markevery=max(1, len(x) // 25),
                      clip_on=False, zorder=3, gid=f"{key}: {run.name}")
    axes.set_ylim(0, 103)
    finish(axes, x_label, "Accuracy (%)")
    colour = kind_colour(runs)
    training = "training" + (f", mean of {window} steps" if window > 1 else "")
    kinds = [Line2D([], [], color=colour, linewidth=0.8, label=training)]
    for key, (name, marker, dashes) in tests.items():
        kinds.append(Line2D([], [], color=colour, linestyle=dashes, marker=marker, markersize=4.5,
                            markerfacecolor=colour if key == "top1" else "white", label=f"test, {name}"))
    legend(axes, runs, kinds)


def draw_sent_fraction(figure: Figure, runs: list[Run]) -> None:
    figure.set_figheight(4.6)
    window = window_of(runs)
    panels = figure.subplots(2, 1, sharex=True, sharey=True)
    lowest = 100.0
    for axes, column, way in zip(panels, ("sent_up", "sent_down"), ("up", "down")):
        for run, colour in zip(runs, colours(runs)):
            y = 100 * np.array(run.columns[column])
            y[y <= 0] = np.nan  # a logarithm has no place for it
            curve(axes, np.array(run.steps), y, colour, window, f"{column}: {run.name}")
            lowest = min(lowest, np.nanmin(y, initial=100))
        finish(axes, "Step" if axes is panels[-1] else "", f"Sent {way} (% of the model)")
    percent_axis(panels[0], lowest)
    legend(panels[0], runs, curve_kinds(kind_colour(runs), window))


def draw_lost(figure: Figure, runs: list[Run]) -> None:
    figure.set_figheight(4.6)
    window = window_of(runs)
    panels = figure.subplots(2, 1, sharex=True, sharey=True)
    for axes, column, way in zip(panels, ("lost_up", "lost_down"), ("up", "down")):
        for run, colour in zip(runs, colours(runs)):
            curve(axes, np.array(run.steps), 100 * np.array(run.columns[column]), colour, window, f"{column}: {run.name}")
        finish(axes, "Step" if axes is panels[-1] else "", f"Missing {way} (% of the sent)")
    panels[0].set_ylim(bottom=0)
    legend(panels[0], runs, curve_kinds(kind_colour(runs), window))


def may_lose(runs: list[Run]) -> bool:
    return any(not np.isnan(run.columns["lost_up"]).all() for run in runs)


def draw_step_time(figure: Figure, runs: list[Run]) -> None:
    axes = figure.add_subplot()
    if len(runs) > 1:
        draw_median_step(figure, axes, runs)
    else:
        steps = np.array(runs[0].steps)
        starts = np.arange(0, len(steps), -(-len(steps) // MOST_COLUMNS))
        edges = np.append(steps[starts] - 0.5, steps[-1] + 0.5)
        below = np.zeros(len(starts))
        for part in SECONDS:
            seconds = np.maximum(np.array(runs[0].columns[part]), 0)
            above = below + np.add.reduceat(seconds, starts) / np.diff(np.append(starts, len(steps)))
            axes.stairs(above, edges, baseline=below, fill=True, color=PART_COLOURS[part], linewidth=0, gid=part)
            below = above
        finish(axes, "Step", "Time a step (s)")
        axes.set_xlim(edges[0], edges[-1])
        usual, peak = np.sort(below)[int(0.95 * (len(below) - 1))], below.max()
        if peak > 2.5 * usual:
            axes.set_ylim(0, 1.3 * usual)
            at = (edges[:-1] + edges[1:])[below.argmax()] / 2
            left = at < edges.mean()
            axes.annotate(f"\u2191 {peak:.2g} s", (at, 1.3 * usual), (8 if left else -8, 0), textcoords="offset points",
                          ha="left" if left else "right", va="top", fontsize=8, gid="peak",
                          bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
    parts = [Line2D([], [], color=PART_COLOURS[part], linewidth=6, label=PART_NAMES[part]) for part in SECONDS]
    legend(axes, runs if len(runs) == 1 else [], parts)


def draw_median_step(figure: Figure, axes: Axes, runs: list[Run]) -> None:
    figure.set_figheight(1.1 + 0.4 * len(runs))
    medians = [[max(0.0, float(np.median(run.columns[part][1:] or run.columns[part]))) for part in SECONDS]
               for run in runs]
    longest = max(map(sum, medians))
    digits = max(0, 2 - int(np.floor(np.log10(longest)))) if longest > 0 else 0
    for row, (run, parts) in enumerate(zip(runs, medians)):
        left = 0.0
        for part, seconds in zip(SECONDS, parts):
            axes.barh(row, seconds, 0.62, left, color=PART_COLOURS[part], gid=f"{part}: {run.name}")
            if seconds > 0.09 * longest:
                axes.text(left + seconds / 2, row, f"{seconds:.{digits}f}", ha="center", va="center", fontsize=8)
            left += seconds
        axes.text(left + 0.01 * longest, row, f"{left:.{digits}f} s", va="center", fontsize=8, fontweight="bold")
    axes.set_yticks(range(len(runs)), [run.name for run in runs])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * longest)
    axes.set_xlabel("Time a step (s), medians of its parts without the first step")


FIGURES: dict[str, Callable[[Figure, list[Run]], None]] = {
    "loss_by_step": lambda figure, runs: draw_loss(figure, runs, False),
    "loss_by_time": lambda figure, runs: draw_loss(figure, runs, True),
    "accuracy_by_step": lambda figure, runs: draw_accuracy(figure, runs, False),
    "accuracy_by_time": lambda figure, runs: draw_accuracy(figure, runs, True),
    "sent_fraction": draw_sent_fraction,
    "lost": draw_lost,
    "step_time": draw_step_time,
    "layers_sent": draw_layers_sent,
}


def write_all(runs: list[Run], output: Path, suffix: str) -> list[Path]:
    output.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, draw in FIGURES.items():
        if name == "lost" and not may_lose(runs):
            continue
        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=(WIDTH, HEIGHT), constrained_layout=True)
            draw(figure, runs)
            paths.append(output / f"{name}.{suffix}")
            figure.savefig(paths[-1], metadata={"Date": None} if suffix == "svg" else None)
    return paths
