# SPDX-License-Identifier: MIT
"""The picture of the table: where the seconds of a step go."""

import pathlib

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

# Okabe and Ito's colours, told apart with any colour vision.
PARTS = (("worker_seconds", "worker", "#B5B9BD"), ("communication_seconds", "communication", "#E69F00"),
         ("server_seconds", "server", "#56B4E9"))


def draw(directory: pathlib.Path, results: list, paper: dict) -> None:
    """step.svg: a bar a row, stacked, one panel for each rate and topology, with the paper's two bars where it has any."""
    groups = list(dict.fromkeys((result.rate, result.topology) for result in results))
    bars_of = []
    for rate, topology in groups:
        bars = [(result.row, [getattr(result, key) for key, _, _ in PARTS]) for result in results
                if (result.rate, result.topology) == (rate, topology)]
        for kind in ("everything", "dropping"):
            if (rate, topology, kind) in paper:
                worker, server, communication, _ = paper[rate, topology, kind]
                bars.append((f"the paper, {kind}", [worker, communication, server]))
        bars_of.append(bars)
    figure, panels = plt.subplots(len(groups), 1, squeeze=False, layout="constrained",
                                  figsize=(7, 0.6 + sum(0.7 + 0.25 * len(bars) for bars in bars_of)),
                                  height_ratios=[1 + len(bars) for bars in bars_of])
    for (rate, topology), bars, axes in zip(groups, bars_of, panels[:, 0]):
        for place, (_, seconds) in enumerate(bars):
            left = 0.0
            for (_, name, colour), width in zip(PARTS, seconds):
                axes.barh(place, width, left=left, color=colour, height=0.7, label=name if place == 0 else None)
                left += width
            axes.text(left, place, f" {left:.2f}", va="center", fontsize=7)
        axes.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=8)
        axes.invert_yaxis()
        axes.set_title(f"{rate}, {topology}", fontsize=9, loc="left")
        axes.set_xlabel("seconds a step", fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.08)
    panels[0, 0].legend(fontsize=8, frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(PARTS))
    figure.savefig(directory / "step.svg")
    plt.close(figure)
