# SPDX-License-Identifier: MIT
"""What a step costs, fitted to what the experiment measured: straight lines, by least squares."""

import dataclasses
import pathlib

import report
from report import Result
from settings import RATES, ROWS, TOPOLOGIES

SHIPPED = pathlib.Path(__file__).resolve().parents[1] / "results" / "network"


@dataclasses.dataclass(frozen=True)
class Line:
    """y = at_zero + slope * x"""

    at_zero: float
    slope: float
    worst: float  # the largest |measured / fitted - 1| of the points

    def at(self, x: float) -> float:
        return self.at_zero + self.slope * x


def fit(points: list[tuple[float, float]]) -> Line:
    """Weights each point by 1/y, since a step that drops layers is some ten times shorter than one that does not and
    should be met as well."""
    if len(points) < 2:
        raise ValueError(f"a line needs two points, and there are {len(points)}")
    weights = [1 / (y * y) for _, y in points]
    whole = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points)) / whole
    mean_y = sum(w * y for w, (_, y) in zip(weights, points)) / whole
    across = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points))
    if across == 0:
        raise ValueError("a line needs points at two places")
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points)) / across
    line = Line(mean_y - slope * mean_x, slope, 0.0)
    return dataclasses.replace(line, worst=max(abs(y / line.at(x) - 1) for x, y in points))


def step_seconds(results: list[Result], rate: str = "1 Gb/s", topology: str = "first, by nodes") -> Line:
    """A step, without the sums within a node, over the bytes of its frames, up and down."""
    points = [(each.bytes_up + each.bytes_down, each.total_seconds - each.node_seconds) for each in results
              if (each.rate, each.topology) == (rate, topology)]
    if len(points) < 2:
        raise RuntimeError(f"the network's results need two rows of {topology} at {rate}")
    return fit(points)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Of the emulated machines, whose messages and sums share two cores."""

    worker: Line  # seconds beside the computation, over the bytes of a worker's frames, up and down
    server: Line  # seconds over the bytes that come up, where the whole model is changed
    communication: dict[str, Line]  # with a server or without: seconds over bytes / goodput of the busiest link


def kind_of(result: Result) -> str:
    return "allreduce" if ROWS[result.row].way == "allreduce" else "server"


def _of(results: list[Result], topology: str) -> list[Result]:
    return [each for each in results if each.topology.startswith(topology + ",")]


def _network_seconds(results: list[Result]) -> dict[str, list[tuple[float, float]]]:
    """Bytes over goodput and what was measured, where it is the link that is measured: two cores do not fill quicker ones."""
    points: dict[str, list[tuple[float, float]]] = {"server": [], "allreduce": []}
    for each in results:
        if each.model_seconds is not None and RATES[each.rate] <= 1e9:
            points[kind_of(each)].append((each.model_seconds, each.communication_seconds - each.node_seconds))
    return points


def costs(results: list[Result]) -> Costs:
    """Fitted to the pair, whose worker has a core of its own, and to the first topology. The second one, of more ranks than
    two cores bear, is left for errors()."""
    alone, first = _of(results, "pair"), _of(results, "first")
    dense = [each for each in [*alone, *first] if ROWS[each.row].sends_everything and kind_of(each) == "server"]
    return Costs(
        worker=fit([(each.bytes_up + each.bytes_down, each.worker_seconds - TOPOLOGIES["pair"].compute_seconds)
                    for each in alone]),
        server=fit([(each.bytes_up, each.server_seconds) for each in dense]),
        communication={kind: fit(points) for kind, points in _network_seconds(first).items()})


def errors(results: list[Result], fitted: Costs) -> dict[str, list[float]]:
    """measured / fitted - 1 of the communication in the second topology, which was not fitted."""
    return {kind: [seconds / fitted.communication[kind].at(model) - 1 for model, seconds in points]
            for kind, points in _network_seconds(_of(results, "second")).items()}


def read(directory: pathlib.Path) -> list[Result]:
    """Those over MPI."""
    results = [each for each in report.read(directory) if not ROWS[each.row].is_udp]
    if not results:
        raise RuntimeError(f"{directory} has no results.json; ./benchmarks/network/run writes it")
    return results
