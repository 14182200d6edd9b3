# SPDX-License-Identifier: MIT
"""The ratios that have a limit, from what was measured, and whether one is broken by more than noise."""

import dataclasses
import pathlib
import re
import statistics

from suite import SECONDS, VARIANTS, Results, variant_title


@dataclasses.dataclass(frozen=True)
class Definition:
    name: str
    program: str
    numerator: str
    denominator: str
    limits: dict[str, float]  # by instruction set; of all others ""

    def limit(self, variant: str) -> float:
        return self.limits.get(variant.split("_")[0], self.limits[""])


@dataclasses.dataclass(frozen=True)
class Ratio:
    """The median over the rounds, and the smallest and the largest of them: what noise makes of it."""

    name: str
    value: float
    low: float
    high: float
    limit: float

    def line(self) -> str:
        return f"ratio {self.name} {self.value:.3f} limit {self.limit:g} {'ok' if self.value <= self.limit else 'over'}"


def definitions(path: pathlib.Path) -> list[Definition]:
    lines = [line.split() for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    for line in lines:
        if len(line) != 5:
            raise ValueError(f"{path}: not five columns: {' '.join(line)}")
    return [Definition(*line[:4], _limits(line[4])) for line in lines]


def _limits(column: str) -> dict[str, float]:
    parts = [part.rpartition(":") for part in column.split(",")]
    return {name: float(limit) for name, _, limit in parts}


def of(defined: list[Definition], results: Results) -> list[Ratio]:
    """The ratios whose benchmarks ran. Raises ValueError for a benchmark that its program does not have."""
    ratios = []
    for each in defined:
        for suffix in ("", *VARIANTS):
            measured = results.get(each.program + suffix)
            if measured is None:
                continue
            has_variants = any(each.program + other in results for other in VARIANTS)
            name = each.name + ("/" + variant_title(suffix) if has_variants else "")
            above = _medians(each, each.numerator, measured)
            below = [_seconds(each.denominator)] * len(above) if _constant(each) \
                else _medians(each, each.denominator, measured)
            rounds = [a / b for a, b in zip(above, below, strict=True)]
            limit = each.limit(variant_title(suffix))
            ratios.append(Ratio(name, statistics.median(rounds), min(rounds), max(rounds), limit))
    return ratios


def benchmarks_of(defined: list[Definition]) -> dict[str, set[str]]:
    """By program, those that the ratios need."""
    needed: dict[str, set[str]] = {}
    for each in defined:
        needed.setdefault(each.program, set()).update({each.numerator, each.denominator} - {_constant(each)})
    return needed


def _seconds(constant: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(\w+)", constant).groups()
    return int(number) * SECONDS[unit]


def _constant(of_ratio: Definition) -> str | None:
    return of_ratio.denominator if re.fullmatch(r"\d+(ns|us|ms|s)", of_ratio.denominator) else None


def _medians(of_ratio: Definition, benchmark: str, measured: dict) -> list[float]:
    if benchmark not in measured:
        raise ValueError(f"the ratio {of_ratio.name} asks for {benchmark}, which {of_ratio.program} does not have")
    return measured[benchmark].medians()


def broken(ratios: list[Ratio], accepted: list[Ratio]) -> list[str]:
    """A sentence for each ratio that is over its limit in every round, and, where the accepted table has it over the limit
    as well, beyond the largest that table has."""
    known = {each.name: each for each in accepted}
    found = []
    for each in ratios:
        if each.low <= each.limit:
            continue
        before = known.get(each.name)
        if before is not None and before.value > before.limit and each.low <= before.high:
            continue
        then = f", and {before.low:.3f} to {before.high:.3f} in the table" if before else ""
        found.append(f"{each.name} is {each.low:.3f} to {each.high:.3f} in all rounds: the limit is {each.limit:g}{then}")
    return found


def table(ratios: list[Ratio], about: list[str]) -> str:
    lines = [f"# {line}" for line in about]
    lines.append(f"# {'NAME':34} {'VALUE':>7} {'LOW':>7} {'HIGH':>7} {'LIMIT':>7}")
    lines += [f"{each.name:36} {each.value:7.3f} {each.low:7.3f} {each.high:7.3f} {each.limit:7g}" for each in ratios]
    return "\n".join(lines) + "\n"


def read_table(path: pathlib.Path) -> list[Ratio]:
    """What table() made; nothing if there is no such file."""
    if not path.exists():
        return []
    lines = [line.split() for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    return [Ratio(name, *map(float, numbers)) for name, *numbers in lines]
