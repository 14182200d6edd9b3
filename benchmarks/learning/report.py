# SPDX-License-Identifier: MIT
"""What the rows come to: for each scheme the best of the settings that were tried, as a table, and all that were tried."""

import dataclasses
import json
import math
import pathlib
import statistics

from rows import Row, parsed

BASELINES = {"powersgd": "PowerSGD", "sparseloco": "SparseLoCo", "dgc": "DGC", "scalecom": "ScaleCom", "demo": "DeMo",
          "onebit": "1-bit Adam"}
OWN_PAYLOAD = ("sparseloco", "onebit", "levels")  # of theirs titles say nothing
TUNED = ("rate", "outer_rate", "outer_momentum")
TUNING_SEED = 0


@dataclasses.dataclass(frozen=True)
class Result:
    row: Row
    data: dict  #: what was learned
    validation_loss: "float | None"  #: None: it diverged
    up_share: float
    down_share: float
    curve: tuple
    elements: int  #: of the model
    period_loss: "float | None" = None  #: the mean over the last steps, of some of the validation; None: it was not taken, or diverged
    top1: "float | None" = None  #: of the data to test with, the share that is right; None: the task has none, or it diverged

    def sort_key(self):
        return math.inf if self.validation_loss is None else self.validation_loss

    def share(self) -> float:
        """Of the dense run's bytes, up and down together."""
        return (self.up_share + self.down_share) / 2

    def wire_seconds(self) -> float:
        """For which the bytes of one worker, up and then down, keep a link of 1 Gb/s busy, in all steps together."""
        return 8 * 4 * self.elements * self.row.steps * 2 * self.share() / 1e9


def records(directory: pathlib.Path) -> dict[str, dict]:
    """What the directory has of each row, by its name."""
    path = directory / "records.jsonl"
    return {each["row"]: each for each in map(json.loads, path.read_text().splitlines())} if path.exists() else {}


def read(directory: pathlib.Path) -> list[Result]:
    return [Result(parsed(of["row"]), of["data"], of["validation_loss"], of["up_share"], of["down_share"], tuple(of["curve"]),
                   of["elements"], of.get("period_loss"), of.get("test_top1"))
            for _, of in sorted(records(directory).items())]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of a scheme: the tuned numbers with which it was best on the tuning seed, and the runs with these."""

    runs: list[Result]
    tried: int  #: settings on the tuning seed
    is_inside: bool  #: of the learning rates that were tried some are smaller and some larger
    all_runs: list[Result]  #: with any of the tuned numbers

    @property
    def best(self) -> Result:
        return self.runs[0]

    def counted(self) -> list[Result]:
        """Those of the seeds that were not tuned on, where there are any."""
        return [run for run in self.runs if run.row.seed != TUNING_SEED] or self.runs

    def losses(self) -> list[float]:
        return [run.sort_key() for run in self.counted()]

    def loss(self) -> float:
        return statistics.fmean(self.losses())

    def error(self) -> "float | None":
        """Standard error of the mean."""
        losses = self.losses()
        return statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else None

    def behind(self, other: "Outcome") -> list[float]:
        """By how much each run ended behind the best that `other` has with the same seed, whatever its tuned numbers: those of
        seeds not tuned on, where both have any."""
        best = {}
        for run in other.all_runs:
            best[run.row.seed] = min(run.sort_key(), best.get(run.row.seed, math.inf))
        pairs = [(run.row.seed, run.sort_key() - best[run.row.seed]) for run in self.runs if run.row.seed in best]
        return [by for seed, by in pairs if seed != TUNING_SEED] or [by for _, by in pairs]

    def period_loss(self) -> "float | None":
        """The mean of the runs that losses() counts; None where one has none."""
        of = [run.period_loss for run in self.counted()]
        return None if None in of else statistics.fmean(of)

    def top1(self) -> str:
        """The same of what is right in the test, in per cent, with its standard error."""
        of = [run.top1 for run in self.counted()]
        if None in of:
            return ""
        error = f" ± {100 * statistics.stdev(of) / math.sqrt(len(of)):.2f}" if len(of) > 1 else ""
        return f"{100 * statistics.fmean(of):.2f}{error}"


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
        rates = [each.row.rate for each in tuning]
        outcome = Outcome([best, *runs], len(tuning), min(rates) < best.row.rate < max(rates), of)
        groups.setdefault((scheme.workers, scheme.steps), []).append(outcome)
    for (workers, steps), of in groups.items():
        if workers > 1:  # one worker is what anybody has without communication
            of += groups.get((1, steps), [])
        of.sort(key=Outcome.loss)
    return {group: of for group, of in sorted(groups.items()) if group[0] > 1 or len(groups) == 1}


def family(row: Row) -> str:
    """The scheme in words."""
    if row.workers == 1:
        return "one worker, no communication"
    if row.scheme == "local":
        return {"value": "local, by score", "turn": "local, fragments in turn (Streaming DiLoCo)",
                "all": "local, all at once (DiLoCo)"}[row.choice]
    if row.scheme == "levels":
        return "local, in levels"
    if row.scheme in BASELINES:
        return BASELINES[row.scheme]
    return f"gradients dropped, R = {row.drop_ratio:g}" if row.scheme == "gradients" and row.drop_ratio else "dense"


def is_trial(row: Row) -> bool:
    """Whether it has what neither a paper nor the library has, but that was tried to find something out."""
    return (any(getattr(row, field) != getattr(Row, field) for field in ("delta_kept", "left_kept", "unsent", "sends"))
            or row.scheme == "levels" or row.payload in ("int1", "int2", "top1", "top2", "top4") or row.optimizer in ("adamw_of_mean", "muon"))


def title(row: Row) -> str:
    """The same, and what it was told, without what was tuned."""
    is_averaged = row.scheme == "local" and row.choice == "all" and not row.outer_momentum  # which is not DiLoCo's outer optimizer
    words = [family(row).replace("(DiLoCo)", "(averaged)") if is_averaged else family(row)]
    if row.workers > 1 and row.scheme not in OWN_PAYLOAD:
        words.append(row.payload.replace("as_is", "fp32"))
    if row.scheme == "local":
        words += ["error feedback"] if row.error_feedback else []
        words += [row.value] if row.choice == "value" and row.value != Row.value else []
        words += [f"age^{row.age_power:g}" if row.age_power else "age not counted"] if row.choice == "value" and row.age_power != 1 else []
        words += [f"at least every {row.at_least_every} steps"] if row.at_least_every else []
        words += [{"fading": "momentum fades", "steps": "momentum in time"}[row.outer_clock]] if row.outer_clock != Row.outer_clock else []
        words += [f"{row.traffic:.1%}"] if row.traffic != Row.traffic else []
        words += [f"{row.delta_kept:g} of a local delta kept"] if row.delta_kept != Row.delta_kept else []
        words += [f"{row.delay} step{'s' if row.delay > 1 else ''} later"] if row.delay else []
    words += [f"{row.code}, every {row.period:g} steps" if row.code in ("entropy", "top") else row.code] if row.scheme == "levels" else []
    words += [f"rank {row.rank}"] if row.scheme == "powersgd" else []
    words += [f"the first {row.dense_steps} steps dense"] if row.dense_steps else []
    if row.scheme == "sparseloco":
        words += [f"{100 * row.share:g} % of the fragments" if row.sends == "fragments" else f"{row.top:,} of 4,096"]
        words[-1] += f" every {row.interval} steps"
    words += [f"mean over all {row.averaged}"] if row.averaged != Row.averaged else []
    words += ["the rest within the parameters"] if row.unsent != Row.unsent else []
    words += ["nothing fades" if row.left_kept == 1 else f"{row.left_kept:g} of the rest kept"] if row.left_kept != Row.left_kept else []
    words += [f"answers {row.answer}"] if row.answer != Row.answer else []
    words += [f"{row.top} a tile"] if row.scheme == "demo" else []
    words += [f"momentum kept {row.momentum_kept:g}"] if row.momentum_kept != Row.momentum_kept else []
    words += [f"{100 * row.share:g} % of the elements"] if row.scheme in ("dgc", "scalecom") else []
    words += [f"fewer and fewer over {row.ramp_steps} steps"] if row.ramp_steps else []
    words += [f"low pass {row.low_pass:g}"] if row.low_pass != Row.low_pass else []
    words += [f"momentum correction {row.correction:g}"] if row.correction else ["no momentum correction"] * (row.scheme == "dgc")
    words += ["each clipped"] if row.clipped != Row.clipped else []
    words += ["state stands still"] if row.held_back != Row.held_back else []
    words += [f"fragments of {row.fragment:,}"] if row.fragment != Row.fragment else []
    words += [row.optimizer] if row.optimizer != Row.optimizer else []
    return ", ".join(words)


def number(loss: "float | None") -> str:
    return "diverged" if loss is None or math.isinf(loss) else f"{loss:.3f}"


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def difference(of: list[float]) -> str:
    """The mean of differences of the same seed, and its standard error."""
    if not of or not math.isfinite(sum(of)):
        return ""
    error = f" ± {statistics.stdev(of) / math.sqrt(len(of)):.3f}" if len(of) > 1 else ""
    return f"{statistics.fmean(of):+.3f}{error}"


def tuned(row: Row) -> str:
    if row.scheme == "sparseloco":
        return f"{row.rate:g}; {row.outer_rate:g}"
    if row.scheme != "local":
        return f"{row.rate:g}"
    return f"{row.rate:g}; {row.outer_rate:g}, {row.outer_momentum:g}"


def dense_of(groups, workers: int, steps: int, optimizer: str = Row.optimizer) -> "Outcome | None":
    """What rows of so many steps are compared with: the best dense run of as many, or of fewer where there is none of as many. Those of
    Muon are compared with its own, all others with the best of any other optimizer."""
    for length in sorted((length for group, length in groups if group == workers and length <= steps), reverse=True):
        for outcome in groups[workers, length]:
            row = outcome.best.row
            if row.scheme == "dense" and row.workers > 1 and (row.optimizer == "muon") == (optimizer == "muon"):
                return outcome
    return None


def table(results: list[Result]):
    is_tested = any(each.top1 is not None for each in results)
    yield ("| W | steps | scheme | up | down | s on the wire | rate; outer rate, momentum | tried | seeds | validation loss | to dense | over a period |"
           + " test top-1, % |" * is_tested)
    yield "|---:|---:|---|---:|---:|---:|---|---:|---:|---:|---:|---:|" + "---:|" * is_tested
    groups = outcomes(results)
    for (workers, steps), of in groups.items():
        for outcome in of:
            row, loss, error = outcome.best.row, outcome.loss(), outcome.error()
            dense = dense_of(groups, workers, steps, row.optimizer)
            cells = (workers, f"{steps:,}", title(row), percent(outcome.best.up_share), percent(outcome.best.down_share),
                     f"{outcome.best.wire_seconds():.1f}", tuned(row),
                     f"{outcome.tried}{'' if outcome.is_inside else ', at the edge'}", ", ".join(str(run.row.seed) for run in outcome.counted()),
                     number(loss) + ("" if error is None else f" ± {error:.3f}"),
                     "" if dense is None or outcome is dense else difference(outcome.behind(dense)),
                     "" if outcome.period_loss() is None else number(outcome.period_loss()), *[outcome.top1()] * is_tested)
            yield f"| {' | '.join(map(str, cells))} |"


def tried(results: list[Result]):
    """Every run."""
    yield "| row | up | down | validation loss |"
    yield "|---|---:|---:|---:|"
    for each in sorted(results, key=lambda each: (each.row.workers, each.row.steps, each.sort_key())):
        yield f"| {each.row.name()} | {percent(each.up_share)} | {percent(each.down_share)} | {number(each.validation_loss)} |"
