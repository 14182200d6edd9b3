# SPDX-License-Identifier: MIT
"""What the experiment on overlap runs: rows, which are programs with their options, and cells, which are clusters with a pace."""

import dataclasses

from experiment import GOODPUT_SHARE
from settings import RATES

# Of benchmarks/models, as the training harness names them.
NETWORKS = {"resnet50": 4 * 25_557_032, "vgg16": 4 * 138_357_544}  # bytes
WITH_GRADIENTS = ("resnet50",)  # of which gradients are recorded; of the others the profile of a step alone
ALPHA_SECONDS = 3e-4  # of lamina::collectives::gigabit_costs

# What a row loses of a sum: rows are compared with rivals that lose no more.
EXACT, ROUNDED, COMPRESSED = range(3)


def all_reduce_seconds(workers: int, rate: str, size: float) -> float:
    """The bytes of an all-reduce of so many over the goodput of a link; 0 where nothing limits it."""
    bits = RATES[rate]
    return 0.0 if bits is None else 8 * 2 * (workers - 1) / workers * size / (bits * GOODPUT_SHARE)


@dataclasses.dataclass(frozen=True)
class Cell:
    workers: int
    rate: str
    compute_seconds: float
    network: str = "resnet50"

    @property
    def name(self) -> str:
        network = "" if self.network == "resnet50" else f"{self.network}, "
        return f"{network}P = {self.workers}, {self.rate}, C = {self.compute_seconds:.3g} s"

    @property
    def model_bytes(self) -> int:
        return NETWORKS[self.network]

    @property
    def dense_seconds(self) -> float:
        """M: of an all-reduce of everything."""
        return all_reduce_seconds(self.workers, self.rate, self.model_bytes)

    @property
    def bucket_bytes(self) -> int:
        """As plan_options::bucket_bytes says, by the rate of the link: for all rows that have buckets, so that they are compared
        with the same."""
        rate = RATES[self.rate] or 1e11
        wanted = 8 * self.workers * ALPHA_SECONDS * rate * GOODPUT_SHARE / 8
        return 1 << (int(min(max(wanted, 64 << 10), 25 << 20)).bit_length() - 1)


def cell_of_ratio(workers: int, rate: str, ratio: float, network: str = "resnet50") -> Cell:
    """The cell whose communication of everything takes `ratio` times its computation, to three digits."""
    dense = Cell(workers, rate, 0, network).dense_seconds
    if dense == 0:
        raise ValueError(f"M/C = {ratio:g} needs a limited rate and two workers at least, not {workers} at {rate}")
    return Cell(workers, rate, float(f"{dense / ratio:.3g}"), network)


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    options: tuple[str, ...]
    loses: int = EXACT
    sent_share: float = 1.0  # of the bytes of an all-reduce of everything, about
    is_alone: bool = False  # one worker, who has nobody to wait for
    is_ddp: bool = False  # of ddp.py; else of the training harness

    @property
    def is_rival(self) -> bool:
        return self.is_ddp or "mpi_allreduce" in self.options and not self.is_alone

    @property
    def is_overlapped(self) -> bool:
        return "--overlap" in self.options

    @property
    def waits_in_the_next_step(self) -> bool:
        """For what it has sent: its last step does not wait, and is as much shorter."""
        return "step" in self.options

    @property
    def sends_everything(self) -> bool:
        """Whether each step sends all gradients to other workers, and the harness says how many bytes that is."""
        others = ("with", "mpi_allreduce", "--fc-exchange")  # a part of them, by MPI, or inputs and errors in their place
        return not (self.is_ddp or self.is_alone or any(word in self.options for word in others))

    @property
    def has_server(self) -> bool:
        return "ps" in self.options

    def lacks_gradients(self, network: str) -> bool:
        """Whether it goes by numbers that are not recorded: which layers are dropped, or what a matrix of a low rank makes of them."""
        return network not in WITH_GRADIENTS and ("with" in self.options or "powersgd" in self.options)

    def machines(self, workers: int) -> int:
        return 1 if self.is_alone else workers + (1 if self.has_server else 0)

    @property
    def directory(self) -> str:
        """Of the harness's output."""
        return "plain" if "mpi_allreduce" in self.options else "with" if "with" in self.options else "without"

    def options_in(self, cell: Cell) -> list[str]:
        """Those that go by the cell come on top."""
        more = []
        if self.is_overlapped and "--bucket-bytes" not in self.options:
            more = ["--bucket-bytes", str(cell.bucket_bytes)]
        return [*(str(cell.bucket_bytes / 2 ** 20) if word == "OURS" else word for word in self.options), *more]

    def step_seconds(self, cell: Cell) -> float:
        """About: to plan a session by."""
        communication = 0.0 if self.is_alone else cell.dense_seconds * self.sent_share
        beside = max(cell.compute_seconds, communication) if self.is_overlapped or self.is_ddp else cell.compute_seconds + communication
        return beside + 0.15


LAMINA = ("--topology", "allreduce", "--selection", "agreed")
DENSE = (*LAMINA, "--runs", "without")
DROPPING = (*LAMINA, "--runs", "with", "--drop-ratio", "0.95")
AHEAD = (*DROPPING, "--decide", "ahead")
PARTS = (*LAMINA, "--runs", "with", "--drop-ratio", "0.99", "--part-elements", "65536", "--decide", "ahead")
SERVER = ("--topology", "ps", "--selection", "local", "--runs", "with", "--drop-ratio", "0.95")
AS_READY = (*SERVER, "--decide", "as_ready")
PLAIN = ("--topology", "mpi_allreduce", "--runs", "without")
BACKWARD, STEP = ("--overlap", "backward"), ("--overlap", "step")
BFLOAT16 = ("--sum-payload", "bfloat16")
OWNERS = (*STEP, "--exchange", "owners")
LAYER_BY_LAYER = ("--bucket-bytes", "0")

ALONE = "the computation alone"
NO_OVERLAP = "everything, no overlap"

_FIRST = (
    Row(ALONE, PLAIN, is_alone=True),
    Row("plain MPI_Allreduce", PLAIN),
    Row("DDP as it comes", (), is_ddp=True),
    Row("DDP, buckets as ours", ("--bucket-mb", "OURS"), is_ddp=True),
    Row("DDP, gradients as views", ("--bucket-view",), is_ddp=True),
    Row("DDP, bf16_compress_hook", ("--hook", "bf16"), ROUNDED, 0.5, is_ddp=True),
    Row("DDP, fp16_compress_hook", ("--hook", "fp16"), ROUNDED, 0.5, is_ddp=True),
    Row("DDP, PowerSGD rank 2", ("--hook", "powersgd"), COMPRESSED, 0.02, is_ddp=True),
    Row(NO_OVERLAP, DENSE),
    Row("R = 0.95 at_end, no overlap", DROPPING, COMPRESSED, 0.06),
    Row("everything, backward", (*DENSE, *BACKWARD)),
    Row("everything, step", (*DENSE, *STEP)),
    Row("everything, owners, step", (*DENSE, *OWNERS)),
    Row("everything, ring, backward", (*DENSE, *BACKWARD, "--collectives", "ring")),
    Row("everything, ring, owners, step", (*DENSE, *OWNERS, "--collectives", "ring")),
    Row("everything, bf16, backward", (*DENSE, *BACKWARD, *BFLOAT16), ROUNDED, 0.5),
    Row("everything, bf16, step", (*DENSE, *STEP, *BFLOAT16), ROUNDED, 0.5),
    Row("everything, bf16, owners, step", (*DENSE, *OWNERS, *BFLOAT16), ROUNDED, 0.75),
    Row("R = 0.95 ahead, no overlap", AHEAD, COMPRESSED, 0.06),
    Row("R = 0.95 ahead, backward", (*AHEAD, *BACKWARD), COMPRESSED, 0.06),
    Row("R = 0.95 ahead, step", (*AHEAD, *STEP), COMPRESSED, 0.06),
    Row("R = 0.95 ahead, bf16, step", (*AHEAD, *STEP, *BFLOAT16), COMPRESSED, 0.03),
    Row("R = 0.99 in parts, ahead, step", (*PARTS, *STEP), COMPRESSED, 0.015),
)

ALGORITHMS = ("pairwise", "ring", "halving_doubling")

# By M/C, everything sent: what an algorithm, an order and a size of buckets give.
_BY_RATIO = (
    *(Row(f"backward, {name}", (*DENSE, *BACKWARD, "--collectives", name)) for name in ALGORITHMS),
    Row("backward, by_type", (*DENSE, *BACKWARD, "--collectives", "by_type")),
    Row("backward, by_cost", (*DENSE, *BACKWARD, "--collectives", "by_cost")),
    Row("backward, layer by layer", (*DENSE, *BACKWARD, *LAYER_BY_LAYER)),
    Row("backward, moved on by hooks", (*DENSE, *BACKWARD, "--progress-by", "hooks")),  # the control: no thread of the engine's
)

# A parameter server: whole frames, and steps in parts.
_BY_SERVER = (
    Row("R = 0.95 server, at_end", SERVER, COMPRESSED, 0.1),
    Row("R = 0.95 server, as_ready, backward", (*AS_READY, *BACKWARD), COMPRESSED, 0.1),
    Row("R = 0.95 server, as_ready, step", (*AS_READY, *STEP), COMPRESSED, 0.1),
)

ROWS = {row.name: row for row in (*_FIRST, *_BY_RATIO, *_BY_SERVER)}
FIRST_TABLE = [row.name for row in _FIRST]
QUICK_ROWS = [ALONE, "plain MPI_Allreduce", "DDP as it comes", "DDP, fp16_compress_hook", "DDP, PowerSGD rank 2", NO_OVERLAP,
              "everything, backward", "everything, bf16, backward", "R = 0.95 ahead, step"]
# Where a step takes long.
SHORT_TABLE = [ALONE, "DDP as it comes", "DDP, fp16_compress_hook", "DDP, PowerSGD rank 2", NO_OVERLAP, "everything, backward",
               "everything, owners, step", "everything, bf16, backward", "R = 0.95 at_end, no overlap", "R = 0.95 ahead, step",
               "R = 0.95 ahead, bf16, step", "R = 0.99 in parts, ahead, step"]
BY_RATIO = [ALONE, NO_OVERLAP, *(row.name for row in _BY_RATIO), "everything, owners, step"]
BY_SERVER = [row.name for row in _BY_SERVER]
# Of networks whose gradients are not recorded, beside DDP.
DENSE_TABLE = [ALONE, NO_OVERLAP, "DDP as it comes", "DDP, bf16_compress_hook", "DDP, fp16_compress_hook", "everything, backward",
               "everything, owners, step", "everything, bf16, backward"]
# By what --table says.
TABLES = {"first": FIRST_TABLE, "short": SHORT_TABLE, "quick": QUICK_ROWS, "ratio": BY_RATIO, "server": BY_SERVER, "dense": DENSE_TABLE}


def possible(names: list[str], help_text: str, network: str) -> tuple[list[str], dict[str, str]]:
    """Rows that can be run, and why the others are left out: the harness must have their options, and the network what they go by."""
    def mistake_in(row: Row) -> str | None:
        if row.lacks_gradients(network):
            return f"no gradients of {network} are recorded"
        has_all = row.is_ddp or all(word in help_text for word in row.options if word.startswith("--"))
        return None if has_all else "the harness has no such options"

    left_out = {name: why for name in names if (why := mistake_in(ROWS[name]))}
    return [name for name in names if name not in left_out], left_out
