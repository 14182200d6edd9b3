# SPDX-License-Identifier: MIT
"""What is run: rates, topologies, rows of the table, and what the paper measured."""

import dataclasses
import pathlib

RATES = {"100 Mb/s": 1e8, "1 Gb/s": 1e9, "10 Gb/s": 1e10, "unlimited": None}


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    options: tuple[str, ...]
    by_nodes: bool = False  # the workers of a machine sum first
    sends_everything: bool = False

    @property
    def run_name(self) -> str:
        """Of the directory that the harness writes."""
        return "without" if self.sends_everything else "with"


def _rows() -> list[Row]:
    rows = []
    for by_nodes, where in ((True, "nodes"), (False, "flat")):
        rows.append(Row(f"{where}, everything", ("--runs", "without"), by_nodes, sends_everything=True))
        for ratio in ("0.9", "0.95", "0.99"):
            rows.append(Row(f"{where}, R = {ratio}", ("--runs", "with", "--drop-ratio", ratio), by_nodes))
        rows.append(Row(f"{where}, budget 5.3 %", ("--runs", "with", "--budget", "0.053"), by_nodes))
        rows.append(Row(f"{where}, agreed, R = 0.95", ("--runs", "with", "--selection", "agreed"), by_nodes))
        rows.append(Row(f"{where}, agreed, budget 5.3 %",
                        ("--runs", "with", "--selection", "agreed", "--budget", "0.053"), by_nodes))
    return rows


ROWS = {row.name: row for row in _rows()}
QUICK_ROWS = [f"{where}, {what}" for where in ("nodes", "flat")
              for what in ("everything", "R = 0.95", "agreed, budget 5.3 %")]


@dataclasses.dataclass(frozen=True)
class Topology:
    name: str
    machines: list[int]  # of each rank; rank 0 is the server
    workers_per_machine: int
    compute_seconds: float  # the paper's, without dropping
    server_seconds: float

    def clients(self, by_nodes: bool) -> list[int]:
        """The machines of those who talk to the server."""
        return self.machines[1::self.workers_per_machine] if by_nodes else self.machines[1:]

    def replay_options(self, recording: pathlib.Path, row: Row) -> list[str]:
        # So small a rate that what is replayed does not make numbers grow.
        return ["--replay", str(recording), "--compute-seconds", str(self.compute_seconds),
                "--server-seconds", str(self.server_seconds), "--learning-rate", "1e-6"]


TOPOLOGIES = {
    "first": Topology("first", [0, 1, 1, 2, 2], 2, 0.388, 0.073),
    "second": Topology("second", [0, 0, 0, 1, 1, 2, 2, 3, 3], 2, 0.222, 0.048),
}

# Table 1: worker, server, communication and total, in seconds a step. 3.457 s is two models each way at 1 Gb/s: one
# machine's workers sent as one. Its second network had 56 Gb/s.
PAPER = {
    ("1 Gb/s", "first, by nodes", "everything"): (0.388, 0.073, 3.457, 3.918),
    ("1 Gb/s", "first, by nodes", "dropping"): (0.408, 0.085, 0.182, 0.675),
    ("56 Gb/s", "second, by nodes", "everything"): (0.222, 0.048, 1.951, 2.222),
    ("56 Gb/s", "second, by nodes", "dropping"): (0.230, 0.060, 0.375, 0.665),
}
