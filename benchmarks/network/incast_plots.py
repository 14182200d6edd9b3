# SPDX-License-Identifier: MIT
"""The pictures of ./incast: what a step takes with each transport, and what fan-in, queue, loss and size do to it."""

import itertools
import pathlib

from plots import COLOURS, MARKERS, finish, label_decades, plt
from incast_report import Result, groups_of
from incast_rows import ROWS, TRANSPORTS, Row

LIMITED = "#C8CBCE"
# With more transports than colours the second of a colour has another marker.
STYLE = {name: (COLOURS[i % len(COLOURS)], MARKERS[(i + i // len(COLOURS)) % len(MARKERS)]) for i, name in enumerate(TRANSPORTS)}
# What is varied: its name, its value of a row, the row's field, the scale.
AXES = (("workers", lambda row: row.fan_in, "fan_in", "linear"), ("packets lost, %", lambda row: 100 * row.loss, "loss", "linear"),
        ("queue, KiB", lambda row: row.queue_bytes / 1024, "queue_kib", "log"),
        ("MB a worker", lambda row: row.megabytes, "megabytes", "log"))


def _draw_bar(axes: plt.Axes, place: int, result: Result) -> None:
    limited, whole = result.is_limited_by_cpu, result.seconds
    colour = LIMITED if limited else STYLE[result.transport][0]
    mean, median, p99, low, high = (1000 * each for each in (whole.mean, whole.median, whole.p99, *whole.p99_interval))
    axes.barh(place, median, color=colour, height=0.6)
    axes.errorbar(p99, place, xerr=[[p99 - low], [high - p99]], color=colour, fmt="o", markersize=3, capsize=2.5, linewidth=0.8)
    axes.plot([median, p99], [place, place], color=colour, linewidth=1.5)
    axes.plot([mean, mean], [place - 0.3, place + 0.3], color="#FFFFFF" if mean < median else "#000000", linewidth=1)
    numbers = ", ".join(f"{each:.0f}" if each >= 100 else f"{each:.3g}" for each in (median, p99))
    axes.text(high, place, f"  {numbers}{' (limited by CPU)' if limited else ''}", va="center", fontsize=7)


def draw_steps(results: list[Result]) -> plt.Figure:
    """A column a rate, a panel a row: of each transport the median as a bar, up to the 99th percentile a line with its interval, the mean
    a stroke. What the processor limits is grey."""
    columns: dict[str, list[tuple[str, list[Result]]]] = {}
    for (rate, row), group in groups_of(results).items():
        columns.setdefault(rate, []).append((row, group))
    bars_of = [max(len(group) for _, group in panels) for panels in itertools.zip_longest(*columns.values(), fillvalue=("", []))]
    figure, grid = plt.subplots(len(bars_of), len(columns), squeeze=False, layout="constrained",
                                figsize=(1 + 6 * len(columns), 0.7 + sum(0.6 + 0.22 * bars for bars in bars_of)),
                                height_ratios=[1.5 + bars for bars in bars_of])
    for (rate, rows), column in zip(columns.items(), grid.T):
        for axes, (row, group) in zip(column, rows):
            for place, result in enumerate(group):
                _draw_bar(axes, place, result)
            axes.set_yticks(range(len(group)), [result.transport for result in group])
            axes.invert_yaxis()
            axes.set_title(f"{rate}, {row}", fontsize=9, loc="left")
            finish(axes, "", "")
            axes.tick_params(axis="y", labelsize=7)
            axes.margins(x=0.2)
            axes.set_xlim(left=0)
        for axes in column[len(rows):]:
            axes.set_visible(False)
    figure.supxlabel("Milliseconds of the communication of a step. Bar: median; stroke: mean; dot: 99th percentile with its 95 % interval.\n"
                     "Numbers: median, 99th percentile.", fontsize=8)
    return figure


def apart(values: list[float]) -> list[float]:
    """Of sorted values those whose labels do not run into each other."""
    kept = values[:1]
    for value in values[1:]:
        if value - kept[-1] >= (values[-1] - values[0]) / 20:
            kept.append(value)
    return kept


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
    panels_of = [(rate, pairs, label, value, scale) for label, value, field, scale in AXES for rate, pairs in _varied(results, field).items()]
    if not panels_of:
        return None
    columns = min(2, len(panels_of))
    lines = -(-len(panels_of) // columns)
    figure, panels = plt.subplots(lines, columns, squeeze=False, layout="constrained", figsize=(0.6 + 3.4 * columns, 0.9 + 2.6 * lines))
    drawn = {}
    for axes, (rate, pairs, label, value, scale) in zip(panels.flat, panels_of):
        for name in TRANSPORTS:
            points = sorted((value(row), 1000 * result.seconds.mean, 1000 * result.seconds.p99) for row, result in pairs
                            if result.transport == name)
            if len(points) < 2:
                continue
            x, mean, p99 = zip(*points)
            colour, marker = STYLE[name]
            drawn[name], = axes.plot(x, mean, color=colour, marker=marker, markersize=4, linewidth=1.2)
            axes.plot(x, p99, ":", color=colour, marker=marker, markersize=2.5, linewidth=1)
        axes.set_xscale(scale)
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis) if scale == "log" else (axes.yaxis,):
            label_decades(axis)
        if scale == "linear":  # no half of a worker
            axes.set_xticks(apart(sorted({value(row) for row, _ in pairs})))
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
