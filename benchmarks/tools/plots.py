# SPDX-License-Identifier: MIT
"""The pictures of what was measured: what a step costs and what it gives, thresholds, the server, and sizes."""

import pathlib
import sys

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

import digest  # noqa: E402
import suite  # noqa: E402

# Okabe and Ito's colours, told apart with any colour vision.
COLOURS = ("#D55E00", "#E69F00", "#0072B2", "#7A3E00", "#56B4E9", "#CC79A7", "#009E73", "#5B8C00", "#5B8C00", "#5B8C00", "#5B8C00", "#C000C0",
           "#00A0A0", "#000000", "#8C8C8C", "#B8A500")
MARKERS = "osDp^vP1234dH*Xh"


def finish(axes, x_label: str, y_label: str, logarithmic: str = "xy") -> None:
    axes.set_xlabel(x_label, fontsize=8)
    axes.set_ylabel(y_label, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    if "x" in logarithmic:
        axes.set_xscale("log")
    if "y" in logarithmic:
        axes.set_yscale("log")


def legend(axes) -> None:
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


def methods(measured: dict[str, suite.Benchmark]) -> plt.Figure:
    """Cost over bytes sent, and error over bytes sent: down and to the left is better in both."""
    plain = measured["plain_add"].seconds()
    figure, (cost, error) = plt.subplots(1, 2, figsize=(9.5, 3.6), layout="constrained")
    for number, (name, title) in enumerate(digest.METHODS.items()):
        found = sorted((each.counters["sent_percent"], measured["step" + key.removeprefix("quality_drawn")].seconds() / plain,
                        each.counters["relative_error"]) for key, each in measured.items()
                       if key.split("/")[:2] == ["quality_drawn", name])
        if not found:
            continue
        sent, times, errors = zip(*found)
        style = {"color": COLOURS[number], "marker": MARKERS[number], "markersize": 5, "linewidth": 1.2}
        cost.plot(sent, times, **style)
        error.plot(sent, errors, label=title, **style)
    cost.axhline(1, color="#8C8C8C", linewidth=0.8, linestyle=":")
    cost.text(cost.get_xlim()[1], 1.05, "a += g", fontsize=7, ha="right", color="#555555")
    steps = next(each for key, each in measured.items() if key.startswith("quality_drawn/")).counters["steps"]
    finish(cost, "% of the bytes sent", "time of a step, in multiples of a += g")
    finish(error, "% of the bytes sent", f"relative error after {steps:.0f} steps", "x")
    legend(error)
    return figure


def element_threshold(measured: dict[str, suite.Benchmark]) -> plt.Figure:
    figure, axes = plt.subplots(figsize=(7.5, 3.4), layout="constrained")
    models = sorted((elements, model) for model, (_, elements) in digest.MODELS.items() if f"exact/{model}" in measured)
    for number, (search, title) in enumerate(digest.SEARCHES.items()):
        axes.plot([elements for elements, _ in models],
                  [measured[f"{search}/{model}"].seconds() for _, model in models],
                  color=COLOURS[number], marker=MARKERS[number], markersize=4, linewidth=1.2, label=title)
    finish(axes, "elements", "seconds")
    legend(axes)
    return figure


def server(measured: dict[str, suite.Benchmark]) -> plt.Figure:
    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    for number, (name, title) in enumerate((("dense_sum", "dense sum and SGD"), ("aggregate/everything", "lamina, all sent"),
                                            ("aggregate/some", "lamina, R = 0.95"))):
        points = sorted((int(key.rpartition("/")[2]), each.seconds()) for key, each in measured.items()
                        if key.rpartition("/")[0] == name)
        axes.plot(*zip(*points), color=COLOURS[-number - 1], marker=MARKERS[number], markersize=4, linewidth=1.2, label=title)
    finish(axes, "workers", "seconds a step")
    legend(axes)
    return figure


def scaling(measured: dict[str, suite.Benchmark]) -> plt.Figure:
    figure, axes = plt.subplots(figsize=(6.5, 3), layout="constrained")
    sizes = sorted(int(name.partition("/")[2]) for name in measured if name.startswith("plain_add/"))
    for number, (name, title) in enumerate((("plain_add/{}", "a += g"), ("step/{}/threads:1", "step, one thread"),
                                            ("step/{}/threads:2", "step, two threads"))):
        axes.plot(sizes, [measured[name.format(size)].seconds() / size * 1e9 for size in sizes],
                  color=COLOURS[number], marker=MARKERS[number], markersize=4, linewidth=1.2, label=title)
    finish(axes, "elements", "ns an element", "x")
    axes.set_ylim(bottom=0)
    legend(axes)
    return figure


def main(results_path: pathlib.Path, directory: pathlib.Path) -> None:
    _, results, _ = suite.read(results_path)
    directory.mkdir(parents=True, exist_ok=True)
    for draw in (methods, element_threshold, server, scaling):
        if draw.__name__ not in results:
            continue
        figure = draw(results[suite.widest(results, "methods") if draw is methods else draw.__name__])
        path = directory / f"{draw.__name__}.svg"
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
        print(path)


if __name__ == "__main__":
    try:
        main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"benchmarks/plot: {sys.argv[1]}: {error}")
