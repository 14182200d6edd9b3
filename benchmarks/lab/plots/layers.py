# SPDX-License-Identifier: MIT
"""When each layer was sent: one row a layer, the first layer at the top."""
from __future__ import annotations

from itertools import groupby

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from run_directory import Run
from style import INK, MOST_COLUMNS

STEPS_WIDTHS, SIZES_WIDTH = (3.6, 2.8, 2.2), 0.6  # inches; of one run, of each of two, of each of more
NAMES_POINTS = 7
# White is never; the lightest blue, one step of many, is still seen.
SHADES = ListedColormap(matplotlib.colormaps["Blues"](np.linspace(0.25, 1, 256)))
SHADES.set_under("white")


def draw_layers_sent(figure: Figure, runs: list[Run]) -> None:
    rows = max(len(run.layer_names) for run in runs)
    height = min(max(2.2, 1.2 + 0.13 * rows), 9.5)
    # A run whose next one has the same layers leaves the bars of their sizes to it, and it takes this one's names.
    models = [(run.layer_names, run.layer_elements) for run in runs]
    first = [index == 0 or models[index] != models[index - 1] for index in range(len(runs))]
    last = [*first[1:], True]
    steps_width = STEPS_WIDTHS[min(len(runs), 3) - 1]
    widths = [width for ends in last for width in (steps_width, SIZES_WIDTH)[: 1 + ends]]
    figure.set_size_inches(sum(widths) + 1.3 * sum(first), height)
    grid = iter(figure.add_gridspec(1, len(widths), width_ratios=widths))

    heats, binned = [], False
    for run, begins, ends in zip(runs, first, last):
        row_points = 72 * (height - 1.2) / len(run.layer_names)
        heats.append(figure.add_subplot(next(grid)))
        columns_steps, shares = run.sent_share(MOST_COLUMNS)
        binned = binned or columns_steps > 1
        _draw_steps(heats[-1], run, columns_steps, shares)
        places, names, borders = label_layers(run.layer_names, row_points)
        heats[-1].set_yticks(places, names if begins else [""] * len(names), fontsize=NAMES_POINTS)
        heats[-1].set_yticks(borders, minor=True)
        heats[-1].tick_params(axis="y", which="minor", length=6, width=0.5)
        for border in borders:
            heats[-1].axhline(border, color="#B8B8B8", linewidth=0.4)
        if ends:
            _draw_sizes(figure.add_subplot(next(grid), sharey=heats[-1]), run, min(0.75, 5 / row_points))
    if binned:
        bar = figure.colorbar(heats[0].images[0], ax=heats, location="bottom", aspect=50, fraction=0.02, pad=0.01)
        bar.set_ticks([1e-9, 0.25, 0.5, 0.75, 1], labels=["> 0", "25", "50", "75", "100"])
        bar.set_label("Steps in which at least one worker sent the layer (%)")
        bar.outline.set_linewidth(0.5)
    else:
        figure.supxlabel("A filled cell: at least one worker sent the layer in that step", fontsize=8)


def label_layers(names: list[str], row_points: float) -> tuple[list[float], list[str], list[float]]:
    """Where to write what, and where to draw a line: every name if rows are high enough, else the blocks of layers."""
    if row_points >= NAMES_POINTS:
        return list(range(len(names))), names, []
    places: list[float] = []
    labels: list[str] = []
    borders: list[float] = []
    begin = 0
    for block, members in groupby(names, key=lambda name: ".".join(name.split(".")[:2])):
        rows = len(list(members))
        centre = begin + (rows - 1) / 2
        if not places or (centre - places[-1]) * row_points > 1.3 * NAMES_POINTS:
            places.append(centre)
            labels.append(block)
        if begin and rows > 1:
            borders.append(begin - 0.5)
        begin += rows
    return places, labels, borders


def _draw_steps(axes: Axes, run: Run, columns_steps: int, shares: list[list[float]]) -> None:
    begin, rows = run.steps[0] - 0.5, len(shares)
    image = axes.imshow(np.array(shares), cmap=SHADES, norm=Normalize(1e-9, 1), aspect="auto", interpolation="none",
                        extent=(begin, begin + columns_steps * len(shares[0]), rows - 0.5, -0.5))
    image.set_gid(f"layers: {run.name}")
    axes.set_xlim(begin, begin + len(run.steps))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_xlabel("Step")
    axes.set_title(run.name, loc="left", fontsize=9)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(True)


def _draw_sizes(axes: Axes, run: Run, thickness: float) -> None:
    axes.barh(range(len(run.layer_elements)), run.layer_elements, thickness, color="#9AA0A6", linewidth=0)
    axes.set_xscale("log")
    axes.set_xlim(0.8, 2 * max(run.layer_elements))
    axes.xaxis.set_major_locator(LogLocator(1000))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("Elements", color=INK)
    axes.tick_params(axis="y", which="both", left=False, labelleft=False)
    axes.spines["left"].set_visible(False)
