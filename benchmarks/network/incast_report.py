# SPDX-License-Identifier: MIT
"""What ./incast makes of the steps of a row: figures, the rule of what counts, results that are added to, the table."""

import dataclasses
import math
import pathlib
import random
import statistics

import report
from incast_rows import RATES, ROWS, TRANSPORTS

RESAMPLES = 1000
# A row counts if one paced sender delivers so much of the link's rate, and all ranks together spend less than so much of the cores.
PACED_SHARE_AT_LEAST = 0.95
CORES_SHARE_BELOW = 0.9
WAYS = ("seconds", "up_seconds", "down_seconds")
COUNTS = ("packets", "repeated", "duplicate", "late", "missing_chunks", "missing_droppable")


def percentile(values: list[float], share: float) -> float:
    """The least of them that so many are not above."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def p99(values: list[float]) -> float:
    return percentile(values, 0.99)


def bootstrap(values: list[float], statistic) -> tuple[float, float]:
    """The 95 % percentile interval of a statistic, of values drawn again with replacement. The same at every call."""
    drawing = random.Random(1)
    drawn = sorted(statistic(drawing.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return drawn[int(0.025 * RESAMPLES)], drawn[math.ceil(0.975 * RESAMPLES) - 1]


@dataclasses.dataclass
class Times:
    """Of the steps of a row, with 95 % intervals."""

    mean: float
    mean_interval: tuple[float, float]
    median: float
    median_interval: tuple[float, float]
    p99: float
    p99_interval: tuple[float, float]
    most: float

    @classmethod
    def of(cls, values: list[float]) -> "Times":
        found = {}
        for name, statistic in (("mean", statistics.fmean), ("median", statistics.median), ("p99", p99)):
            found |= {name: statistic(values), f"{name}_interval": bootstrap(values, statistic)}
        return cls(**found, most=max(values))

    @classmethod
    def read(cls, fields: dict) -> "Times":
        return cls(**{key: tuple(value) if key.endswith("interval") else value for key, value in fields.items()})


@dataclasses.dataclass
class Turn:
    """Some steps of one transport, one after the other."""

    steps: list[dict]  # lines of the program, without those at its beginning
    dropped_up: int  # packets, by the switch's queue towards the server, over all steps of the program
    dropped_down: int  # towards the workers
    lost: int  # by the network, where it loses some
    load: float  # of the machine, before


@dataclasses.dataclass
class Result:
    rate: str
    row: str
    transport: str
    steps: int
    seconds: Times  # of the communication of a step
    up_seconds: Times
    down_seconds: Times
    missing_up: float  # share of the elements, on the average over steps
    missing_down: float
    packets: float | None  # a step; None: they are the kernel's
    repeated: float | None
    duplicate: float | None
    late: float | None
    dropped_up: int
    dropped_down: int
    lost: int
    cpu_seconds_a_gb: float
    cores_share: float  # that all ranks spent, of all there are
    paced_share: float  # that one paced sender delivered of the link's rate
    load: list[float]
    commit: str
    missing_chunks: float | None = None  # of gradients, a step
    missing_droppable: float | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        return self.rate, self.row, self.transport

    @property
    def is_limited_by_cpu(self) -> bool:
        return self.paced_share < PACED_SHARE_AT_LEAST or self.cores_share >= CORES_SHARE_BELOW


def result_of(rate: str, row: str, transport: str, turns: list[Turn], paced_share: float, cores: int, commit: str) -> Result:
    steps = [step for turn in turns for step in turn.steps]

    def mean(key: str) -> float | None:
        return statistics.fmean(step[key] for step in steps) if all(key in step for step in steps) else None

    cpu_seconds = sum(step["cpu_seconds"] for step in steps)
    return Result(
        rate=rate, row=row, transport=transport, steps=len(steps),
        **{way: Times.of([step[way] for step in steps]) for way in WAYS},
        missing_up=mean("missing_up"), missing_down=mean("missing_down"), **{key: mean(key) for key in COUNTS},
        dropped_up=sum(turn.dropped_up for turn in turns), dropped_down=sum(turn.dropped_down for turn in turns),
        lost=sum(turn.lost for turn in turns),
        cpu_seconds_a_gb=cpu_seconds / (sum(step["bytes_up"] + step["bytes_down"] for step in steps) / 1e9),
        cores_share=cpu_seconds / (cores * sum(step["period_seconds"] for step in steps)),
        paced_share=paced_share, load=[turn.load for turn in turns], commit=commit)


def read(directory: pathlib.Path) -> list[Result]:
    """Those written there before, none if there are none."""
    def result_from(fields: dict) -> Result:
        result = Result(**{**fields, **{way: Times.read(fields[way]) for way in WAYS}})
        _place(result)
        return result

    return report.read(directory, result_from)


def _place(result: Result) -> tuple[int, int, int]:
    """In the order of the settings; ValueError for what is not among them."""
    return (list(RATES).index(result.rate), [row.name for row in ROWS].index(result.row), list(TRANSPORTS).index(result.transport))


def with_results(results: list[Result], more: list[Result]) -> list[Result]:
    """In the order of the settings; each takes the place of an older one of the same row and transport."""
    new = {each.key for each in more}
    return sorted([*(each for each in results if each.key not in new), *more], key=_place)


def groups_of(results: list[Result]) -> dict[tuple[str, str], list[Result]]:
    """By rate and row."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.rate, result.row), []).append(result)
    return groups


HEAD = ("", "mean", "median", "p99", "most", "p99 / median", "up mean", "up p99", "down mean", "down p99", "missing up", "droppable", "packets",
        "repeated", "late", "dropped up", "dropped down", "lost", "CPU s a GB", "of the cores", "paced", "load")


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"


def _with_interval(seconds: float, interval: tuple[float, float]) -> str:
    return f"{_ms(seconds)} ({_ms(interval[0])} to {_ms(interval[1])})"


def cells_of(result: Result) -> tuple[str, ...]:
    whole, up, down = result.seconds, result.up_seconds, result.down_seconds
    counts = ["" if getattr(result, key) is None else f"{getattr(result, key):.0f}" for key in ("packets", "repeated", "late")]
    droppable = f"{100 * result.missing_droppable / result.missing_chunks:.0f} %" if result.missing_chunks else ""
    name = result.transport + (" *(limited by CPU)*" if result.is_limited_by_cpu else "")
    return (name, _with_interval(whole.mean, whole.mean_interval), _ms(whole.median),
            _with_interval(whole.p99, whole.p99_interval), _ms(whole.most), f"{whole.p99 / whole.median:.2f}", _ms(up.mean),
            _with_interval(up.p99, up.p99_interval), _ms(down.mean), _ms(down.p99), f"{100 * result.missing_up:.2f} %", droppable, *counts,
            str(result.dropped_up), str(result.dropped_down), str(result.lost), f"{result.cpu_seconds_a_gb:.2f}",
            f"{100 * result.cores_share:.0f} %", f"{100 * result.paced_share:.1f} %", f"{max(result.load):.1f}")


def line_of(result: Result) -> str:
    whole = result.seconds
    note = ", limited by CPU" if result.is_limited_by_cpu else ""
    return (f"  {result.transport}: mean {_ms(whole.mean)} ms, median {_ms(whole.median)}, p99 {_ms(whole.p99)}, up p99 "
            f"{_ms(result.up_seconds.p99)}, of the cores {100 * result.cores_share:.0f} %{note}")


def table(results: list[Result]) -> str:
    lines = []
    for (rate, row), group in groups_of(results).items():
        lines += ["", f"### {rate}, {row}", "", "Milliseconds of the communication of a step.", "",
                  "| " + " | ".join(HEAD) + " |", "|---|" + "---:|" * (len(HEAD) - 1)]
        lines += ["| " + " | ".join(cells_of(result)) + " |" for result in group]
    return "\n".join(lines).strip() + "\n"


def write(directory: pathlib.Path, results: list[Result], environment: dict) -> None:
    """After each row, so that what an interruption cuts short is not lost."""
    report.write(directory, results, environment, table)
