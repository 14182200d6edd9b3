# SPDX-License-Identifier: MIT
"""What a row of the experiment gives, and its table."""

import dataclasses
import json
import pathlib
from collections.abc import Callable

from settings import PAPER, RATES, ROWS, TOPOLOGIES


@dataclasses.dataclass
class Result:
    row: str
    topology: str
    rate: str
    steps: int
    worker_seconds: float
    server_seconds: float
    communication_seconds: float
    node_seconds: float  # the part of it that is within a node
    total_seconds: float
    bytes_up: float  # a step, of all frames
    bytes_down: float
    sent_up: float
    sent_down: float
    model_seconds: float | None  # bytes over goodput
    counted_up: int  # payload at the server's interface, over the whole run, without what TCP repeated
    counted_down: int
    said_up: int  # the same by the program, of the workers on other machines
    said_down: int
    commit: str  # of the sources

    @property
    def key(self) -> tuple[str, str, str]:
        return self.rate, self.topology, self.row


HEAD = ("", "worker s", "server s", "communication s", "in the node s", "model s", "total s", "up MB", "down MB", "sent up",
        "sent down", "counted up", "counted down")


def read(directory: pathlib.Path, result_of: Callable[[dict], object] = lambda fields: Result(**fields)) -> list:
    """Those written there before, none if there are none."""
    file = directory / "results.json"
    if not file.exists():
        return []
    try:
        return [result_of(each) for each in json.loads(file.read_text())["results"]]
    except (ValueError, KeyError, TypeError) as error:
        raise RuntimeError(f"{file} is not what this version writes ({error}): remove it, or give another --output") from error


def runs(directory: pathlib.Path) -> list[dict]:
    """The environments of those written there before."""
    file = directory / "results.json"
    return json.loads(file.read_text()).get("runs", []) if file.exists() else []


def with_result(results: list[Result], result: Result) -> list[Result]:
    """In the order of the settings; it takes the place of an older one of the same row."""

    def place(each: Result) -> tuple[int, int, int, int]:
        # A row's way is part of the topology's name, so ways stand together.
        names = list(ROWS)
        ways = list(dict.fromkeys(row.way for row in ROWS.values()))
        return (list(RATES).index(each.rate), list(TOPOLOGIES).index(each.topology.partition(",")[0]),
                ways.index(ROWS[each.row].way), names.index(each.row))

    return sorted([*(each for each in results if each.key != result.key), result], key=place)


def _share(counted: int, said: int) -> str:
    """How far the interface's payload is from what the program says."""
    return f"{100 * (counted / said - 1):+.1f} %" if said else ""


def cells_of(result: Result) -> tuple[str, ...]:
    model = "" if result.model_seconds is None else f"{result.model_seconds:.3f}"
    node = f"{result.node_seconds:.3f}" if "by nodes" in result.topology else ""
    return (result.row, f"{result.worker_seconds:.3f}", f"{result.server_seconds:.3f}",
            f"{result.communication_seconds:.3f}", node, model, f"{result.total_seconds:.3f}",
            f"{result.bytes_up / 1e6:.1f}", f"{result.bytes_down / 1e6:.1f}", f"{100 * result.sent_up:.2f} %",
            f"{100 * result.sent_down:.2f} %", _share(result.counted_up, result.said_up),
            _share(result.counted_down, result.said_down))


def line_of(result: Result) -> str:
    return "  " + ", ".join(f"{name} {value}" for name, value in zip(HEAD[1:], cells_of(result)[1:]) if value)


def _change(before: float, after: float) -> str:
    return f"{100 * (after / before - 1):+.1f} %"


def groups_of(results: list[Result]) -> dict[tuple[str, str], list[Result]]:
    """By rate and topology."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.rate, result.topology), []).append(result)
    return groups


def table(results: list[Result]) -> str:
    lines = []
    for (rate, topology), rows in groups_of(results).items():
        lines += ["", f"### {rate}, {topology}", "", "| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|"]
        dense = next((result for result in rows if ROWS[result.row].sends_everything), None)
        for result in rows:
            lines.append("| " + " | ".join(cells_of(result)) + " |")
            if dense is not None and result is not dense:
                changes = {name: _change(getattr(dense, name), getattr(result, name))
                           for name in ("worker_seconds", "server_seconds", "communication_seconds", "total_seconds")}
                lines.append(f"| | {changes['worker_seconds']} | {changes['server_seconds']} "
                             f"| {changes['communication_seconds']} | | | {changes['total_seconds']} |" + " |" * 6)
        for paper in PAPER.get((rate, topology), ()):
            lines.append(f"| {paper.name} | {paper.worker_seconds} | {paper.server_seconds} "
                         f"| {paper.communication_seconds} | | | {paper.total_seconds} |" + " |" * 6)
    return "\n".join(lines).strip() + "\n"


def write(directory: pathlib.Path, results: list, environment: dict, table_of: Callable[[list], str] = table) -> None:
    """After each row, so that what an interruption cuts short is not lost."""
    environments = runs(directory)
    if environment not in environments:
        environments.append(environment)
    text = json.dumps({"runs": environments, "results": [dataclasses.asdict(result) for result in results]}, indent=1)
    new = directory / "results.json.new"
    new.write_text(text + "\n")
    new.replace(directory / "results.json")
    (directory / "table.md").write_text(table_of(results))
