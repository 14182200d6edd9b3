# SPDX-License-Identifier: MIT
"""What is run: rates, topologies, rows of the table, settings of the study, and what the paper measured."""

import dataclasses
import pathlib

RATES = {"100 Mb/s": 1e8, "200 Mb/s": 2e8, "1 Gb/s": 1e9, "10 Gb/s": 1e10, "unlimited": None}
# Of the experiment with a parameter server.
PAPER_RATES = [name for name in RATES if name != "200 Mb/s"]


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    options: tuple[str, ...]
    way: str  # nodes: the workers of a machine sum first; flat: each sends its own; allreduce: there is no server
    sends_everything: bool = False

    @property
    def run_name(self) -> str:
        """Of the directory that the harness writes."""
        return "with" if "with" in self.options else "without"

    @property
    def is_udp(self) -> bool:
        """Frames go as packets, with bounds on what may be missing; else over MPI."""
        return "udp" in self.options


def _rows() -> list[Row]:
    agreed = ("--runs", "with", "--selection", "agreed")
    local = ("--runs", "with", "--selection", "local")
    rows = []
    for way in ("nodes", "flat"):
        rows.append(Row(f"{way}, everything", ("--runs", "without"), way, sends_everything=True))
        for ratio in ("0.9", "0.95", "0.99"):
            rows.append(Row(f"{way}, R = {ratio}", (*local, "--drop-ratio", ratio), way))
        rows.append(Row(f"{way}, budget 5.3 %", (*local, "--budget", "0.053"), way))
        rows.append(Row(f"{way}, agreed, R = 0.95", agreed, way))
        for percent, budget in (("5.3", "0.053"), ("3", "0.03")):
            rows.append(Row(f"{way}, agreed, budget {percent} %", (*agreed, "--budget", budget), way))
        for bound in ("0", "0.1"):
            rows.append(Row(f"{way}, R = 0.95, udp, p = {bound}",
                            (*local, "--drop-ratio", "0.95", "--transport", "udp", "--loss-bound", bound), way))
    rows.append(Row("allreduce, everything", (*agreed, "--drop-ratio", "0"), "allreduce", sends_everything=True))
    rows.append(Row("allreduce, agreed, R = 0.95", agreed, "allreduce"))
    rows.append(Row("allreduce, agreed, budget 5.3 %", (*agreed, "--budget", "0.053"), "allreduce"))
    return rows


ROWS = {row.name: row for row in _rows()}
QUICK_ROWS = [f"{way}, {what}" for way in ("nodes", "flat")
              for what in ("everything", "R = 0.95", "agreed, budget 5.3 %", "agreed, budget 3 %")]


@dataclasses.dataclass(frozen=True)
class Topology:
    name: str
    machines: list[int]  # of each rank; rank 0 is the server
    workers_per_machine: int
    compute_seconds: float  # the paper's, without dropping
    server_seconds: float

    def name_of(self, row: Row) -> str:
        return self.name + {"nodes": ", by nodes", "flat": ", flat", "allreduce": ", allreduce"}[row.way]

    def machines_of(self, row: Row) -> list[int]:
        """Of each rank; an allreduce has no server."""
        return self.machines[1:] if row.way == "allreduce" else self.machines

    def clients(self, row: Row) -> list[int]:
        """The machines of those who talk to the server."""
        return self.machines[1::self.workers_per_machine] if row.way == "nodes" else self.machines[1:]

    def options_of(self, row: Row) -> list[str]:
        if row.way == "nodes":
            return ["--topology", "hybrid", "--workers-per-node", str(self.workers_per_machine)]
        return ["--topology", "allreduce"] if row.way == "allreduce" else []

    def link_bytes(self, row: Row, up: float, down: float) -> tuple[float, float]:
        """What a step's frames put on the busiest link, towards it and away from it: the server's, or any machine's."""
        if row.way == "allreduce":
            # Each worker sends a slice to each other one, twice; those on the same machine share memory.
            workers, here = len(self.machines) - 1, self.workers_per_machine
            share = (up + down) * here * (workers - here) / (workers * (workers - 1))
            return share, share
        clients = self.clients(row)
        remote = sum(machine != self.machines[0] for machine in clients) / len(clients)
        return remote * up, remote * down

    def replay_options(self, recording: pathlib.Path) -> list[str]:
        # So small a rate that what is replayed does not make numbers grow.
        return ["--replay", str(recording), "--compute-seconds", str(self.compute_seconds),
                "--server-seconds", str(self.server_seconds), "--learning-rate", "1e-6"]


TOPOLOGIES = {
    "first": Topology("first", [0, 1, 1, 2, 2], 2, 0.388, 0.073),
    "second": Topology("second", [0, 0, 0, 1, 1, 2, 2, 3, 3], 2, 0.222, 0.048),
    # Not the paper's: one worker and the server, each with a core of its own where there are two.
    "pair": Topology("pair", [0, 1], 1, 0.388, 0.073),
}

@dataclasses.dataclass(frozen=True)
class Published:
    """A row of the paper's Table 1, in seconds a step."""

    name: str
    worker_seconds: float
    server_seconds: float
    communication_seconds: float
    total_seconds: float


# 3.457 s is two models each way at 1 Gb/s: one machine's workers sent as one. Its second network had 56 Gb/s, more than
# can be emulated here.
PAPER = {
    ("1 Gb/s", "first, by nodes"): (Published("the paper, everything", 0.388, 0.073, 3.457, 3.918),
                                    Published("the paper, dropping", 0.408, 0.085, 0.182, 0.675)),
    ("unlimited", "second, by nodes"): (Published("the paper at 56 Gb/s, everything", 0.222, 0.048, 1.951, 2.222),
                                        Published("the paper at 56 Gb/s, dropping", 0.230, 0.060, 0.375, 0.665)),
}


@dataclasses.dataclass(frozen=True)
class Training:
    """A setting of the convergence study."""

    name: str
    family: str  # those drawn in one panel, beside the run that sends everything
    options: tuple[str, ...]
    baseline: str = "everything"

    @property
    def sends_everything(self) -> bool:
        return self.name.startswith("everything")

    @property
    def servers(self) -> int:
        return 0 if "allreduce" in self.options else 1

    @property
    def file_name(self) -> str:
        return "".join(each if each.isalnum() or each == "." else "-" for each in self.name)


def _trainings() -> list[Training]:
    # The best rates that were tried, on a seed of its own, of the runs that send everything, and of correction with layers chosen
    # ahead: docs/benchmarks/convergence.md.
    momentum = ("--learning-rate", "0.05", "--momentum", "0.9")
    corrected = ("--learning-rate", "0.01", "--residual-momentum", "0.9")
    plain = ("--learning-rate", "0.3")

    agreed = ("--selection", "agreed")

    def dropping(*options: str, base: tuple[str, ...] = momentum) -> tuple[str, ...]:
        local = () if "--selection" in options else ("--selection", "local")
        return ("--runs", "with", *base, *local, *options)

    ratios = ("0.9", "0.95", "0.99")
    without_momentum = "everything, no momentum"
    ways = (("correction", corrected, "everything"), ("no momentum", plain, without_momentum))
    return [
        Training("everything", "", ("--runs", "without", *momentum)),
        *(Training(f"R = {ratio}", "local", dropping("--drop-ratio", ratio)) for ratio in ratios),
        *(Training(f"agreed, R = {ratio}", "agreed", dropping("--drop-ratio", ratio, *agreed)) for ratio in ratios),
        Training("budget 5.3 %", "budget", dropping("--budget", "0.053")),
        Training("agreed, budget 5.3 %", "budget", dropping("--budget", "0.053", *agreed)),
        Training("agreed, budget 3 %", "budget", dropping("--budget", "0.03", *agreed)),
        Training("agreed, budget 3 %, correction", "momentum correction",
                 dropping("--budget", "0.03", *agreed, base=corrected)),
        Training("R = 0.95, correction", "momentum correction", dropping("--drop-ratio", "0.95", base=corrected)),
        Training("agreed, R = 0.95, correction", "momentum correction",
                 dropping("--drop-ratio", "0.95", *agreed, base=corrected)),
        *(Training(f"R = 0.95, {words}, as_ready", "when layers are chosen",
                   dropping("--drop-ratio", "0.95", "--decide", "as_ready", base=base), baseline)
          for words, base, baseline in ways),
        *(Training(f"agreed, R = 0.95, {words}, ahead", "when layers are chosen",
                   dropping("--drop-ratio", "0.95", *agreed, "--topology", "allreduce", "--decide", "ahead", base=base), baseline)
          for words, base, baseline in ways),
        Training("agreed, R = 0.95, parts", "parts and warm-up of R",
                 dropping("--drop-ratio", "0.95", "--part-elements", "65536", *agreed)),
        Training("agreed, R = 0.99, warm-up", "parts and warm-up of R",
                 dropping("--drop-ratio", "0.99", "--drop-warm-up", "100", *agreed)),
        *(Training(f"R = {ratio}, refresh 100", "refresh every 100 steps",
                   dropping("--drop-ratio", ratio, "--refresh", "100")) for ratio in ratios),
        Training(without_momentum, "no momentum", ("--runs", "without", *plain), without_momentum),
        Training("R = 0.95, no momentum", "no momentum", dropping("--drop-ratio", "0.95", base=plain), without_momentum),
        Training("agreed, R = 0.95, no momentum", "no momentum",
                 dropping("--drop-ratio", "0.95", *agreed, base=plain), without_momentum),
    ]


CONVERGENCE = {training.name: training for training in _trainings()}
