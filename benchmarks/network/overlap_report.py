# SPDX-License-Identifier: MIT
"""What the runs of the experiment on overlap come to: medians, who is quicker, what the model said, and the criteria."""

import dataclasses
import pathlib
import statistics
from collections.abc import Iterator

import report
from experiment import GOODPUT_SHARE
from overlap_rows import ALGORITHMS, EXACT, NO_OVERLAP, ROWS, Cell
from settings import RATES

# Of the seconds that a step is said to wait for communication: within that share, or so many seconds.
MODEL_SHARE, MODEL_SECONDS = 0.15, 0.010
MOST_DRIFT = 0.05
TIE_SHARE = 0.02  # medians that differ by less are not told apart
LINK_SHARE = 0.03  # by which the bytes that a worker counts may differ from those of its interface


@dataclasses.dataclass
class Turn:
    """One run of a row: the steps that count, the load of the machine before it, the constants of the network after it, and how far they
    are from those before; where workers calibrate nothing, what the interface of the last one sent in all of it, over what the steps have
    counted."""

    steps: list[dict]
    load: float
    commit: str
    link_share: float | None = None
    drift: float | None = None
    costs: dict | None = None
    torch: str | None = None
    refusal: str | None = None  # why there are no steps


@dataclasses.dataclass
class Result:
    cell: Cell
    row: str
    turns: list[Turn] = dataclasses.field(default_factory=list)

    @property
    def key(self) -> tuple[Cell, str]:
        return self.cell, self.row

    @property
    def steps(self) -> list[dict]:
        return [step for turn in self.turns for step in turn.steps]

    @property
    def refusal(self) -> str | None:
        return next((turn.refusal for turn in self.turns if turn.refusal), None)

    def median(self, key: str) -> float | None:
        """None unless all steps say it."""
        steps = self.steps
        return statistics.median(step[key] for step in steps) if steps and all(key in step for step in steps) else None

    @property
    def step_seconds(self) -> float | None:
        return self.median("total_seconds")

    @property
    def drift(self) -> float | None:
        return max((turn.drift for turn in self.turns if turn.drift is not None), default=None)

    @property
    def link_share(self) -> float | None:
        """The one that is farthest from 1."""
        return max((turn.link_share for turn in self.turns if turn.link_share is not None), key=lambda each: abs(each - 1), default=None)

    @property
    def is_as_predicted(self) -> bool | None:
        """Whether what the computation waited is what the model says of it; None where it says nothing."""
        waited, predicted = self.median("exposed_seconds"), self.median("predicted_exposed_seconds")
        if waited is None or predicted is None:
            return None
        return abs(waited - predicted) <= max(MODEL_SHARE * predicted, MODEL_SECONDS)


def result_of(fields: dict) -> Result:
    return Result(Cell(**fields["cell"]), fields["row"], [Turn(**turn) for turn in fields["turns"]])


def read(directory: pathlib.Path) -> list[Result]:
    return report.read(directory, result_of)


def write(directory: pathlib.Path, results: list[Result], environment: dict) -> None:
    report.write(directory, results, environment, tables)


def with_result(results: list[Result], new: Result) -> list[Result]:
    """In the order of cells as they came, and of rows; it takes the place of an older one."""
    cells = list(dict.fromkeys([each.cell for each in results] + [new.cell]))
    names = list(ROWS)
    return sorted([*(each for each in results if each.key != new.key), new],
                  key=lambda each: (cells.index(each.cell), names.index(each.row)))


def best_rival(results: list[Result], of: Result) -> Result | None:
    """Of the same cell, that loses no more of a sum than this row: the one of the shortest step."""
    rivals = [each for each in results if each.cell == of.cell and ROWS[each.row].is_rival and each.steps and
              ROWS[each.row].loses <= ROWS[of.row].loses]
    return min(rivals, key=lambda each: each.step_seconds, default=None)


def verdict(results: list[Result], of: Result) -> str:
    """The row's step over that of its best rival, in words where it loses."""
    row, rival = ROWS[of.row], best_rival(results, of)
    if row.is_rival or row.is_alone or rival is None or not of.steps:
        return ""
    ratio = of.step_seconds / rival.step_seconds
    word = "**loses**, " if ratio > 1 + TIE_SHARE else "ties, " if ratio >= 1 - TIE_SHARE else ""
    return f"{word}{ratio:.2f} of {rival.row}"


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


HEAD = ("", "step s", "least to most", "step - C", "waited s", "hidden s", "predicted s", "as predicted", "sent MB",
        "bytes / goodput s", "over the best rival", "steps", "load", "drift")


def cells_of(results: list[Result], each: Result) -> tuple[str, ...]:
    if not each.steps:
        return (each.row, f"refused: {each.refusal}", *[""] * (len(HEAD) - 2))
    total = [step["total_seconds"] for step in each.steps]
    sent, rate = each.median("sent_bytes"), RATES[each.cell.rate]
    return (each.row, _number(each.step_seconds), f"{min(total):.2f} to {max(total):.2f}",
            _number(each.step_seconds - each.cell.compute_seconds), _number(each.median("exposed_seconds")),
            _number(each.median("hidden_seconds")), _number(each.median("predicted_exposed_seconds")),
            {None: "", True: "yes", False: "**no**"}[each.is_as_predicted], _number(sent and sent / 1e6, 1),
            _number(None if sent is None or rate is None else 8 * sent / (rate * GOODPUT_SHARE)), verdict(results, each),
            str(len(total)), ", ".join(f"{turn.load:.1f}" for turn in each.turns),
            "" if each.drift is None else f"{100 * each.drift:.0f} %" + (" **!**" if each.drift > MOST_DRIFT else ""))


def table(results: list[Result]) -> str:
    lines = []
    for cell in dict.fromkeys(each.cell for each in results):
        versions = sorted({turn.torch for each in results if each.cell == cell for turn in each.turns if turn.torch})
        lines += [f"\n**{cell.name}**" + (f", DDP of PyTorch {', '.join(versions)} over gloo" if versions else "") + "\n",
                  "| " + " | ".join(HEAD) + " |", "|---|" + "---:|" * (len(HEAD) - 1)]
        lines += ["| " + " | ".join(cells_of(results, each)) + " |" for each in results if each.cell == cell]
    return "\n".join(lines) + "\n"


# A row of a cell takes so much less than without overlap, at the M/C of the cell.
SHORTER = (("backward, pairwise", 0.28), ("everything, backward", 0.28), ("everything, owners, step", 0.36))
COST_SHARE = 0.05
AHEAD_SHARE = 0.25
# What the computation waits for layers chosen ahead. Of four workers at 1 Gb/s, as AHEAD_SHARE.
WAITING_LITTLE, WAITED_SECONDS = ("R = 0.95 ahead, step", "R = 0.95 ahead, backward"), 0.03
ONE_WORKER_SHARE = 0.01  # that hooks and the engine may add where nothing is sent
# What sends all that DDP sends.
BESIDE_DDP = ("everything, backward", "everything, step", "everything, ring, backward",
              *(row.name for row in ROWS.values() if "owners" in row.options and row.loses == EXACT))
DDPS = {"DDP, buckets as ours": "DDP with the same buckets", "DDP as it comes": "DDP as it comes"}  # the first that a cell has


def _asked(cell: Cell, results: list[Result]) -> Iterator[tuple[str, str, bool]]:
    """Of a cell: what is asked, what was found, and whether it holds."""
    seconds = {each.row: each.step_seconds for each in results}
    if cell.dense_seconds and abs(cell.dense_seconds / cell.compute_seconds - 1) < 0.02 and NO_OVERLAP in seconds:
        for name, share in SHORTER:
            if name in seconds:
                less = 1 - seconds[name] / seconds[NO_OVERLAP]
                yield f"{name}: at least {100 * share:.0f} % below no overlap", f"{100 * less:.0f} % below", less >= share
    singles = {name: seconds[f"backward, {name}"] for name in ALGORITHMS if f"backward, {name}" in seconds}
    if singles and "backward, by_cost" in seconds:
        best = min(singles, key=singles.get)
        ratio = seconds["backward, by_cost"] / singles[best]
        yield f"by_cost within {100 * COST_SHARE:.0f} % of the best single algorithm", f"{ratio:.2f} of {best}", ratio <= 1 + COST_SHARE
    is_of_dropping = (cell.workers, cell.rate) == (4, "1 Gb/s")
    landed, ahead = "R = 0.95 at_end, no overlap", "R = 0.95 ahead, step"
    if is_of_dropping and {landed, ahead} <= seconds.keys():
        less = 1 - seconds[ahead] / seconds[landed]
        yield f"{ahead}: at least {100 * AHEAD_SHARE:.0f} % below {landed}", f"{100 * less:.0f} % below", less >= AHEAD_SHARE
    waited = {each.row: each.median("exposed_seconds") for each in results}
    for name in WAITING_LITTLE if is_of_dropping else ():
        if waited.get(name) is not None:
            yield f"{name}: waits at most {1e3 * WAITED_SECONDS:.0f} ms", f"{1e3 * waited[name]:.1f} ms", waited[name] <= WAITED_SECONDS
    if cell.workers == 1 and {"everything, backward", NO_OVERLAP} <= seconds.keys():
        more = seconds["everything, backward"] / seconds[NO_OVERLAP] - 1
        yield f"everything, backward: at most {100 * ONE_WORKER_SHARE:.0f} % above no overlap", f"{100 * more:+.1f} %", more <= ONE_WORKER_SHARE
    ddp = next((name for name in DDPS if name in seconds), None)
    for dense in (name for name in BESIDE_DDP if ddp and name in seconds):
        ratio = seconds[dense] / seconds[ddp]
        yield f"{dense} not slower than {DDPS[ddp]}", f"{ratio:.2f} of it", ratio <= 1 + TIE_SHARE
    shares = [each.link_share for each in results if each.link_share is not None]
    if shares:
        farthest = max(shares, key=lambda each: abs(each - 1))
        yield (f"bytes counted are those of the interface, within {100 * LINK_SHARE:.0f} %",
               f"{len(shares)} rows, {100 * (farthest - 1):+.1f} % at most", abs(farthest - 1) <= LINK_SHARE)
    judged = [each.is_as_predicted for each in results if each.is_as_predicted is not None]
    if judged:
        yield (f"waited as predicted, within {100 * MODEL_SHARE:.0f} % or {1e3 * MODEL_SECONDS:.0f} ms", f"{sum(judged)} of {len(judged)} rows",
               all(judged))


def criteria(results: list[Result]) -> list[tuple[str, str, str, str]]:
    """Cell, what is asked, what was found, and whether it holds."""
    return [(cell.name, asked, found, "yes" if holds else "**no**") for cell in dict.fromkeys(each.cell for each in results)
            for asked, found, holds in _asked(cell, [each for each in results if each.cell == cell and each.steps])]


def tables(results: list[Result]) -> str:
    text = table(results)
    asked = criteria(results)
    if asked:
        text += "\n**What was asked for**\n\n| cell | asked | found | holds |\n|---|---|---|---|\n"
        text += "".join("| " + " | ".join(line) + " |\n" for line in asked)
    return text
