# SPDX-License-Identifier: MIT
"""When a step computes, and when which layers are summed: from traces that the training harness writes with --timeline."""

import dataclasses
import json
import pathlib
import statistics

import plots
from emulation import cluster_of
from overlap_rows import AHEAD, BACKWARD, DENSE, STEP, Cell, Row
from overlap_runs import run_harness

STEPS = 8

# Without overlap there is no trace, but one bucket of all convolutions is complete with the last gradient: its sum comes after the
# backward pass. That of the fully connected layer, which is a class of its own, does not.
DRAWN = (
    Row("everything, all convolutions in one sum", (*DENSE, *BACKWARD, "--bucket-bytes", "1000000000")),
    Row("everything, beside the backward pass", (*DENSE, *BACKWARD)),
    Row("R = 0.95 chosen ahead, beside both passes", (*AHEAD, *STEP)),
)


@dataclasses.dataclass(frozen=True)
class Span:
    """Seconds from the beginning of the step, and of what: of a collective its bucket."""

    begin: float
    end: float
    index: int = 0


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of one worker, until the next begins."""

    seconds: float
    computation: Span
    waiting: list[Span]
    collectives: list[Span]
    buckets: int  # of the whole trace


def _spans(events: list[dict], name: str) -> list[tuple[float, float, int, int]]:
    """Begin and end in seconds, index, step, of what is named so."""
    found, begun = [], {}
    for event in events:
        what, index = event["name"].split()
        if what != name:
            continue
        if event["ph"] == "B":
            begun[index] = event
        elif event["ph"] == "E" and index in begun:
            first = begun.pop(index)
            found.append((first["ts"] / 1e6, event["ts"] / 1e6, int(index), first["args"]["step"]))
    return found


def steps_of(trace: str) -> list[Step]:
    """The steps of a trace that are whole: those that another follows."""
    events = json.loads(trace)["traceEvents"]
    computations = sorted(_spans(events, "computation"))
    waiting, collectives = _spans(events, "waiting"), _spans(events, "collective")
    steps = []
    for (begin, end, _, _), (following, _, _, _) in zip(computations, computations[1:]):
        def within(spans: list, begin=begin, following=following) -> list[Span]:
            return [Span(max(first, begin) - begin, min(last, following) - begin, index) for first, last, index, _ in spans
                    if last > begin and first < following]

        steps.append(Step(following - begin, Span(0, end - begin), within(waiting), within(collectives),
                          1 + max((index for _, _, index, _ in collectives), default=0)))
    return steps


def typical(steps: list[Step]) -> Step:
    """The one of the median length."""
    if not steps:
        raise RuntimeError("the trace has no whole step")
    middle = statistics.median_low(step.seconds for step in steps)
    return next(step for step in steps if step.seconds == middle)


def run_and_draw(given, recording: pathlib.Path, cell: Cell) -> pathlib.Path:
    drawn = []
    with cluster_of(cell.workers, cell.rate) as cluster:
        for row in (each for each in DRAWN if not each.lacks_gradients(cell.network)):
            file = given.output / f"{'-'.join(row.name.replace(',', '').replace('=', '').split())}.json"
            run_harness(given.program, row, cell, cluster, STEPS, recording, ["--timeline", str(file.resolve())])
            drawn.append((row.name, typical(steps_of(file.with_name(f"{file.stem}-0.json").read_text()))))
    picture = given.output / "timeline.svg"
    figure = plots.draw_timeline(cell.name, drawn)
    figure.savefig(picture, bbox_inches="tight", metadata={"Date": None})
    return picture
