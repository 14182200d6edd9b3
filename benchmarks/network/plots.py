# SPDX-License-Identifier: MIT
"""The pictures of the experiment: where the seconds of a step go, and what the rate of the network does to them."""

import pathlib

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import LogLocator  # noqa: E402

from report import Result, groups_of  # noqa: E402
from settings import PAPER, RATES, ROWS  # noqa: E402

# Okabe and Ito's colours, told apart with any colour vision.
PARTS = (("worker_seconds", "worker", "#B5B9BD"), ("communication_seconds", "communication", "#E69F00"),
         ("server_seconds", "server", "#56B4E9"))
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
MARKERS = "osD^vP*X"


def finish(axes, x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label, fontsize=8)
    axes.set_ylabel(y_label, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def label_decades(axis) -> None:
    """Of a logarithmic axis: 1, 2 and 5 of each decade, as plain numbers; what matplotlib labels by itself runs into itself."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


def draw_steps(results: list[Result]) -> plt.Figure:
    """A bar a row, stacked; a panel for each rate and topology, with the paper's two bars where it has any."""
    groups = groups_of(results)
    bars_of = [[*rows, *PAPER.get(group, ())] for group, rows in groups.items()]
    figure, panels = plt.subplots(len(groups), 1, squeeze=False, layout="constrained",
                                  figsize=(7, 0.6 + sum(0.7 + 0.2 * len(bars) for bars in bars_of)),
                                  height_ratios=[1 + len(bars) for bars in bars_of])
    for (rate, topology), bars, axes in zip(groups, bars_of, panels[:, 0]):
        for place, bar in enumerate(bars):
            left = 0.0
            for key, name, colour in PARTS:
                axes.barh(place, getattr(bar, key), left=left, color=colour, height=0.7,
                          label=name if place == 0 else None)
                left += getattr(bar, key)
            axes.text(left, place, f" {left:.2f}", va="center", fontsize=7)
        names = [bar.row.partition(", ")[2] if isinstance(bar, Result) else bar.name for bar in bars]
        axes.set_yticks(range(len(bars)), names, fontsize=7)
        axes.invert_yaxis()
        axes.set_title(f"{rate}, {topology}", fontsize=9, loc="left")
        finish(axes, "seconds a step", "")
        axes.tick_params(axis="y", labelsize=7)
        axes.margins(x=0.08)
    panels[0, 0].legend(fontsize=8, frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(PARTS))
    return figure


def draw_communication(results: list[Result]) -> plt.Figure | None:
    """Communication over the rate of the links; dotted is the model's bytes over goodput. None for a single rate."""
    rates = {name: rate / 1e9 for name, rate in RATES.items() if rate is not None}
    limited = [result for result in results if result.rate in rates]
    by_topology: dict[str, list[Result]] = {}
    for result in limited:
        by_topology.setdefault(result.topology, []).append(result)
    panels_of = {topology: rows for topology, rows in by_topology.items() if len({each.rate for each in rows}) > 1}
    if not panels_of:
        return None
    columns = min(3, len(panels_of))
    lines = -(-len(panels_of) // columns)
    figure, panels = plt.subplots(lines, columns, squeeze=False, sharex=True, sharey=True, layout="constrained",
                                  figsize=(0.6 + 3.1 * columns, 0.9 + 2.6 * lines))
    kinds = list(dict.fromkeys(row.partition(", ")[2] for row in ROWS))
    drawn = {}
    for axes, (topology, rows) in zip(panels.flat, panels_of.items()):
        for number, kind in enumerate(kinds):
            points = sorted((rates[each.rate], each.communication_seconds, each.model_seconds) for each in rows
                            if each.row.partition(", ")[2] == kind)
            if len(points) < 2:
                continue
            x, seconds, model = zip(*points)
            colour, marker = COLOURS[number % len(COLOURS)], MARKERS[(number + number // len(COLOURS)) % len(MARKERS)]
            drawn[kind], = axes.plot(x, seconds, color=colour, marker=marker, markersize=4, linewidth=1.2)
            axes.plot(x, model, ":", color=colour, linewidth=1)
        for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
            scale("log")
            label_decades(axis)
        axes.set_title(topology, fontsize=9, loc="left")
        finish(axes, "Gb/s of each link", "communication, s a step")
    for axes in panels.flat[len(panels_of):]:
        axes.set_visible(False)
    for axes in panels.flat:
        axes.label_outer()
    figure.legend(drawn.values(), drawn.keys(), fontsize=7, frameon=False, loc="upper center", ncols=4,
                  bbox_to_anchor=(0.5, 0))
    return figure


def draw_timeline(title: str, steps: list[tuple[str, object]]) -> plt.Figure:
    """A panel for each Step of overlap_timeline.py: what the worker computes and waits for above, what is summed below."""
    figure, panels = plt.subplots(len(steps), 1, squeeze=False, sharex=True, layout="constrained",
                                  figsize=(8, 0.8 + 1.15 * len(steps)))
    layers = plt.get_cmap("viridis")
    for axes, (name, step) in zip(panels[:, 0], steps):
        axes.barh(0, step.computation.end, color="#D5D8DB", height=0.7)
        for span in step.waiting:
            axes.barh(0, span.end - span.begin, left=span.begin, color="#D55E00", height=0.7)
        for span in step.collectives:
            # A hair of white tells a sum from the next one.
            axes.barh(1, span.end - span.begin, left=span.begin, height=0.7, edgecolor="white", linewidth=0.3,
                      color=layers(1 - span.index / max(1, step.buckets - 1)))
        axes.axvline(step.seconds, color="black", linewidth=0.8)
        axes.text(step.seconds, 0.5, f" {step.seconds:.2f} s", va="center", fontsize=8)
        axes.set_yticks([0, 1], ["computes", "sums"], fontsize=8)
        axes.invert_yaxis()
        axes.set_title(name, fontsize=9, loc="left")
        finish(axes, "", "")
        axes.tick_params(axis="y", length=0)
    panels[-1, 0].set_xlabel(f"seconds of a step, {title}", fontsize=8)
    panels[-1, 0].set_xlim(0, 1.1 * max(step.seconds for _, step in steps))
    keys = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in ("#D5D8DB", "#D55E00", layers(0.95), layers(0.05))]
    figure.legend(keys, ["computation", "waits for sums", "sums of the last layers", "of the first layers"], fontsize=8, frameon=False,
                  loc="upper center", ncols=4, bbox_to_anchor=(0.5, 0))
    return figure


def draw(directory: pathlib.Path, results: list[Result]) -> list[str]:
    """Writes the pictures, and gives their names."""
    names = []
    for name, figure in (("step.svg", draw_steps(results)), ("communication.svg", draw_communication(results))):
        if figure is not None:
            figure.savefig(directory / name, bbox_inches="tight", metadata={"Date": None})
            plt.close(figure)
            names.append(name)
    return names
