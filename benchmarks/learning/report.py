# SPDX-License-Identifier: MIT
"""What the rows come to: for each scheme the best of the settings that were tried, as a table, and all that were tried."""

import dataclasses
import json
import math
import pathlib
import statistics

from rows import Row, parsed

TUNED = ("rate", "outer_rate", "outer_momentum")
TUNING_SEED = 0


@dataclasses.dataclass(frozen=True)
class Result:
    row: Row
    validation_loss: "float | None"  #: None: it diverged
    up_share: float
    down_share: float
    curve: tuple

    def sort_key(self):
        return math.inf if self.validation_loss is None else self.validation_loss


def read(directory: pathlib.Path) -> list[Result]:
    found = []
    for path in sorted(directory.glob("*.json")):
        of = json.loads(path.read_text())
        found.append(Result(parsed(path.stem), of["validation_loss"], of["up_share"], of["down_share"], tuple(of["curve"])))
    return found


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of a scheme: the tuned numbers with which it was best on the seed of tuning, and the runs with these."""

    runs: list[Result]
    tried: int  #: settings on the seed of tuning

    @property
    def best(self) -> Result:
        return self.runs[0]

    def losses(self) -> list[float]:
        """Of the seeds that were not tuned on, where there are any."""
        others = [run for run in self.runs if run.row.seed != TUNING_SEED] or self.runs
        return [run.sort_key() for run in others]

    def loss(self) -> float:
        return statistics.fmean(self.losses())

    def error(self) -> "float | None":
        """Standard error of the mean."""
        losses = self.losses()
        return statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else None


def outcomes(results: list[Result]) -> dict[tuple[int, int], list[Outcome]]:
    """By workers and steps; in each the schemes, the best first."""
    by_scheme: dict[Row, list[Result]] = {}
    for result in results:
        defaults = {name: Row.__dataclass_fields__[name].default for name in (*TUNED, "seed")}
        by_scheme.setdefault(dataclasses.replace(result.row, **defaults), []).append(result)
    groups: dict[tuple[int, int], list[Outcome]] = {}
    for scheme, of in by_scheme.items():
        tuning = [each for each in of if each.row.seed == TUNING_SEED] or of
        best = min(tuning, key=Result.sort_key)
        runs = [each for each in of if dataclasses.replace(each.row, seed=best.row.seed) == best.row and each is not best]
        groups.setdefault((scheme.workers, scheme.steps), []).append(Outcome([best, *runs], len(tuning)))
    for (workers, steps), of in groups.items():
        if workers > 1:  # one worker is what anybody has without communication
            of += groups.get((1, steps), [])
        of.sort(key=Outcome.loss)
        of.sort(key=Outcome.loss)
    return {group: of for group, of in sorted(groups.items()) if group[0] > 1 or len(groups) == 1}


def title(row: Row) -> str:
    """The scheme in words, without what was tuned."""
    if row.scheme == "dense":
        return "one worker, no communication" if row.workers == 1 else "dense, fp32"
    payload = row.payload.replace("as_is", "fp32")
    if row.scheme == "gradients":
        words = [f"gradients dropped, R = {row.drop_ratio:g}" if row.drop_ratio else "dense", payload]
    else:
        words = [{"value": "local, parts by value", "turn": "local, parts in turn (Streaming DiLoCo)",
                  "all": "local, all at once (DiLoCo)"}[row.choice], payload]
    if row.choice == "value" and row.value != "mean_abs":
        words.append(row.value)
    if row.part != Row.part:
        words.append(f"parts of {row.part:,}")
    if row.scheme == "local" and row.traffic != Row.traffic:
        words.append(f"{row.traffic:.1%}")
    if row.delay:
        words.append(f"{row.delay} steps later")
    return ", ".join(words + ([row.optimizer] if row.optimizer != Row.optimizer else []))


def number(loss: "float | None") -> str:
    return "diverged" if loss is None or math.isinf(loss) else f"{loss:.3f}"


def tuned(row: Row) -> str:
    if row.scheme != "local":
        return f"{row.rate:g}"
    return f"{row.rate:g}; {row.outer_rate:g}, {row.outer_momentum:g}"


def table(results: list[Result]):
    yield "| W | steps | scheme | up | down | rate; outer rate, momentum | tried | seeds | validation loss | to dense |"
    yield "|---:|---:|---|---:|---:|---|---:|---:|---:|---:|"
    for (workers, steps), of in outcomes(results).items():
        dense = next((each.loss() for each in of if title(each.best.row) == "dense, fp32"), None)
        for outcome in of:
            best = outcome.best
            error = outcome.error()
            yield (f"| {workers} | {steps:,} | {title(best.row)} | {best.up_share:.2%} | {best.down_share:.2%} | {tuned(best.row)} | "
                   f"{outcome.tried} | {len(outcome.losses())} | {number(outcome.loss())}{'' if error is None else f' ± {error:.3f}'} | "
                   f"{'' if dense is None or math.isinf(outcome.loss()) else format(outcome.loss() - dense, '+.3f')} |")


def tried(results: list[Result]):
    """Every run."""
    yield "| row | up | down | validation loss |"
    yield "|---|---:|---:|---:|"
    for each in sorted(results, key=lambda each: (each.row.workers, each.row.steps, each.sort_key())):
        yield f"| {each.row.name()} | {each.up_share:.2%} | {each.down_share:.2%} | {number(each.validation_loss)} |"
