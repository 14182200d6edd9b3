# SPDX-License-Identifier: MIT
"""The pictures of ./incast: what a step takes with each transport, and what fan-in, queue, loss and size do to it."""

import pathlib

from plots import COLOURS, MARKERS, finish, plt
from incast_report import Result, groups_of
from incast_rows import ROWS, TRANSPORTS, Row

LIMITED = "#C8CBCE"
STYLE = {name: (COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(TRANSPORTS)}
# What is varied: of a row, and how it is drawn.
AXES = (("workers", lambda row: row.fan_in, "fan_in"), ("packets lost, %", lambda row: 100 * row.loss, "loss"),
        ("queue, KiB", lambda row: row.queue_bytes / 1024, "queue_kib"), ("MB a worker", lambda row: row.megabytes, "megabytes"))


def draw_steps(results: list[Result]) -> plt.Figure:
    """A panel a row: of each transport the median as a bar, up to the 99th percentile a line with its interval, the mean a stroke.
    What the processor limits is grey."""
    groups = groups_of(results)
    figure, panels = plt.subplots(len(groups), 1, squeeze=False, layout="constrained",
                                  figsize=(7, 0.6 + sum(0.7 + 0.24 * len(group) for group in groups.values())),
                                  height_ratios=[1.5 + len(group) for group in groups.values()])
    for ((rate, row), group), axes in zip(groups.items(), panels[:, 0]):
        for place, result in enumerate(group):
            limited, whole = result.is_limited_by_cpu, result.seconds
            colour = LIMITED if limited else STYLE[result.transport][0]
            median, p99 = 1000 * whole.median, 1000 * whole.p99
            axes.barh(place, median, color=colour, height=0.6)
            axes.plot([median, p99], [place, place], color=colour, linewidth=1.5)
            low, high = (1000 * end for end in whole.p99_interval)
            axes.errorbar(p99, place, xerr=[[p99 - low], [high - p99]], color=colour, fmt="o", markersize=3, capsize=2.5, linewidth=0.8)
            axes.plot([1000 * whole.mean] * 2, [place - 0.3, place + 0.3], color="#FFFFFF" if whole.mean < whole.median else "#000000",
                      linewidth=1)
            note = "  limited by CPU" if limited else ""
            axes.text(max(high, p99), place, f"  {median:.0f}, {p99:.0f}{note}", va="center", fontsize=7)
        axes.set_yticks(range(len(group)), [result.transport for result in group])
        axes.invert_yaxis()
        axes.set_title(f"{rate}, {row}", fontsize=9, loc="left")
        finish(axes, "", "")
        axes.tick_params(axis="y", labelsize=7)
        axes.set_xlim(left=0)
        axes.margins(x=0.15)
    panels[-1, 0].set_xlabel("ms of the communication of a step: bar median, stroke mean, dot 99th percentile and its 95 % interval",
                             fontsize=8)
    return figure


def _varied(results: list[Result], field: str) -> dict[str, list[tuple[Row, Result]]]:
    """By rate: the rows that differ from the base in this field alone, with their results; those of two values or more."""
    rows = {(row.rate, row.name): row for row in ROWS}
    usual = {"fan_in": 4, "megabytes": 1.0, "queue_kib": 64, "loss": 0.0, "path_shares": (1.0,)}
    found: dict[str, list[tuple[Row, Result]]] = {}
    for result in results:
        row = rows[result.rate, result.row]
        if not result.is_limited_by_cpu and all(getattr(row, key) == value for key, value in usual.items() if key != field):
            found.setdefault(result.rate, []).append((row, result))
    return {rate: pairs for rate, pairs in found.items() if len({getattr(row, field) for row, _ in pairs}) > 1}


def draw_varied(results: list[Result]) -> plt.Figure | None:
    """The mean, and dotted the 99th percentile, over what is varied from the base. None where nothing is."""
    panels_of = [(rate, pairs, label, value) for label, value, field in AXES for rate, pairs in _varied(results, field).items()]
    if not panels_of:
        return None
    columns = min(2, len(panels_of))
    lines = -(-len(panels_of) // columns)
    figure, panels = plt.subplots(lines, columns, squeeze=False, layout="constrained", figsize=(0.6 + 3.4 * columns, 0.9 + 2.6 * lines))
    drawn = {}
    for axes, (rate, pairs, label, value) in zip(panels.flat, panels_of):
        for name in TRANSPORTS:
            points = sorted((value(row), 1000 * result.seconds.mean, 1000 * result.seconds.p99) for row, result in pairs
                            if result.transport == name)
            if len(points) < 2:
                continue
            x, mean, p99 = zip(*points)
            colour, marker = STYLE[name]
            drawn[name], = axes.plot(x, mean, color=colour, marker=marker, markersize=4, linewidth=1.2)
            axes.plot(x, p99, ":", color=colour, marker=marker, markersize=2.5, linewidth=1)
        axes.set_yscale("log")
        axes.set_title(rate, fontsize=9, loc="left")
        finish(axes, label, "ms a step: mean, dotted p99")
    for axes in panels.flat[len(panels_of):]:
        axes.set_visible(False)
    figure.legend(drawn.values(), drawn.keys(), fontsize=7, frameon=False, loc="upper center", ncols=3, bbox_to_anchor=(0.5, 0))
    return figure


def draw(directory: pathlib.Path, results: list[Result]) -> list[str]:
    """Writes the pictures, and gives their names."""
    names = []
    for name, figure in (("step.svg", draw_steps(results)), ("varied.svg", draw_varied(results))):
        if figure is not None:
            figure.savefig(directory / name, bbox_inches="tight", metadata={"Date": None})
            plt.close(figure)
            names.append(name)
    return names
