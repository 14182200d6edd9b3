# SPDX-License-Identifier: MIT
"""The picture of DDP's communication hooks and lamina's: bytes and seconds of a step."""

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tools"))
import plots  # noqa: E402

FAMILIES = {"lamina": "#009E73", "powerSGD": "#0072B2", "fp16": "#E69F00", "bf16": "#E69F00"}
DENSE = "#8C8C8C"


def hooks(slow: dict, quick: dict) -> plots.plt.Figure:
    """A row for each hook: bytes at the left, on a logarithmic scale; seconds at the right, over both networks."""
    names = list(slow["medians"])[::-1]
    colours = [next((colour for family, colour in FAMILIES.items() if name.startswith(family)), DENSE) for name in names]
    figure, (sent, taken) = plots.plt.subplots(1, 2, figsize=(9.5, 4.2), layout="constrained", sharey=True, width_ratios=(2, 3))
    places = range(len(names))

    megabytes = [slow["medians"][name]["bytes"] / 1e6 for name in names]
    sent.hlines(places, 0.5, megabytes, colors=colours, linewidth=1.2)
    sent.scatter(megabytes, places, c=colours, s=26)
    for place, number in zip(places, megabytes):
        sent.text(number * 1.25, place, f"{number:.1f}" if number < 100 else f"{number:.0f}", fontsize=7, va="center")
    plots.finish(sent, "MB sent a step and rank, logarithmic", "", "x")
    sent.set_xlim(0.5, 400)
    sent.set_xticks([1, 10, 100], ["1", "10", "100"])
    sent.set_yticks(places, names, fontsize=8)

    seconds, least = ([slow["medians"][name][what] for name in names] for what in ("step", "least step"))
    free = [quick["medians"][name]["step"] for name in names]
    taken.barh(places, seconds, color=colours, height=0.62)
    taken.barh(0, 0, color=DENSE, label=slow["network"])  # for the legend
    taken.scatter(least, places, marker="|", s=60, color="black", linewidths=1, label=f"{slow['network']}, least", zorder=3)
    taken.scatter(free, places, marker="D", s=18, facecolors="white", edgecolors="black", linewidths=0.8, label=quick["network"],
                  zorder=3)
    for place, number, other in zip(places, seconds, free):
        taken.text(max(number, other) + 0.03, place, f"{number:.2f}", fontsize=7, va="center")
    taken.set_xlim(0, 1.1 * max(seconds))
    plots.finish(taken, "seconds a step", "", "")
    for axes in (sent, taken):
        axes.tick_params(axis="y", length=0)
    taken.legend(fontsize=7, frameon=False, loc="lower right")
    return figure


def main(directory: pathlib.Path) -> None:
    slow, quick = (json.loads((directory / f"{name}.json").read_text()) for name in ("1Gbs", "loopback"))
    figure = hooks(slow, quick)
    figure.savefig(directory / "hooks.svg", metadata={"Date": None})
    print(directory / "hooks.svg")


if __name__ == "__main__":
    try:
        main(pathlib.Path(sys.argv[1]))
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"benchmarks/pytorch/plot: {sys.argv[1]}: {error}")
