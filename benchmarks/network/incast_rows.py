# SPDX-License-Identifier: MIT
"""What ./incast runs: rows, which say what meets what, and transports, which take turns in each."""

import dataclasses

RATES = {"200 Mb/s": 2e8, "1 Gb/s": 1e9}
# ResNet-50's bytes in equal layers, so that all frames of a row are of one size.
LAYER_ELEMENTS = 15_625
LAYER_MB = LAYER_ELEMENTS * 4 / 1e6
LAYERS = 1_636
MODEL_MB = LAYERS * LAYER_MB


@dataclasses.dataclass(frozen=True)
class Row:
    rate: str
    fan_in: int = 4
    megabytes: float = 1.0  # of each worker's frame
    queue_kib: int | None = 64  # of the switch's ports; None: 50 ms
    loss: float = 0.0  # of all packets alike
    path_shares: tuple[float, ...] = (1.0,)  # of the rate, of each path
    steps: int | None = None  # at most

    @property
    def name(self) -> str:
        queue = "50 ms" if self.queue_kib is None else f"{self.queue_kib} KiB"
        loss = f", loss {100 * self.loss:g} %" if self.loss else ""
        paths = "" if len(self.path_shares) == 1 else ", 2 paths" if self.path_shares == (1.0, 1.0) else ", 2 paths of 3:1"
        return f"{self.fan_in} to 1, {self.megabytes:g} MB, queue {queue}{loss}{paths}"

    @property
    def rates(self) -> list[float]:
        return [RATES[self.rate] * share for share in self.path_shares]

    @property
    def queue_bytes(self) -> int:
        return int(RATES[self.rate] / 8 * 0.05) if self.queue_kib is None else 1024 * self.queue_kib

    @property
    def share(self) -> float:
        """Of the layout, in each frame."""
        return self.megabytes / MODEL_MB


def _rows_at(rate: str) -> list[Row]:
    base = Row(rate)
    varied = [
        *({"fan_in": fan_in} for fan_in in (1, 8)),
        *({"queue_kib": queue} for queue in (16, 256, None)),
        *({"loss": loss} for loss in (0.001, 0.01, 0.02, 0.05)),
        {"megabytes": 0.25},
        {"megabytes": 5.0, "steps": 300},
        *({"path_shares": shares} for shares in ((1.0, 1.0), (1.0, 1 / 3))),
    ]
    if rate == "1 Gb/s":
        varied.append({"megabytes": MODEL_MB, "steps": 20})
    return [base, *(dataclasses.replace(base, **each) for each in varied),
            dataclasses.replace(base, fan_in=8, megabytes=0.25), dataclasses.replace(base, megabytes=0.25, loss=0.02)]


ROWS = [row for rate in RATES for row in _rows_at(rate)]
# At 200 Mb/s frames of 1 MB would take a quarter of an hour.
QUICK_ROWS = [Row("200 Mb/s", megabytes=0.25), Row("200 Mb/s", megabytes=0.25, fan_in=8),
              Row("200 Mb/s", megabytes=0.25, loss=0.02)]


@dataclasses.dataclass(frozen=True)
class Transport:
    name: str
    options: tuple[str, ...] = ()  # of the program
    congestion: str | None = "cubic"
    rto_min: str | None = None
    tags: bool = False  # the switch has a queue for each class
    queue_times: float = 1.0  # the row's queue
    is_control: bool = False  # of a row or two: what happens without a part of the whole

    @property
    def is_bounded(self) -> bool:
        return "udp" in self.options

    def options_in(self, row: Row) -> list[str]:
        """Of the program."""
        if not self.is_bounded:
            return list(self.options)
        interfaces = ",".join(f"10.77.{path}.0/24" for path in range(len(row.path_shares)))
        return [*self.options, "--link-rate", f"{sum(row.rates):.0f}", "--interface", interfaces]

    def runs_in(self, row: Row) -> bool:
        usual = (row.megabytes, row.queue_kib, row.loss, row.path_shares) == (1.0, 64, 0.0, (1.0,))
        if self.is_control and not (usual and row.fan_in > 1):
            return False
        return self.is_bounded or len(row.path_shares) == 1


def _bounded(name: str, *options: str, **more) -> Transport:
    return Transport(f"udp, {name}", ("--transport", "udp", *options), **{"tags": True, **more})


MPI = ("--transport", "mpi")
TRANSPORTS = {transport.name: transport for transport in (
    Transport("MPI, cubic", MPI),
    Transport("MPI, cubic, rto_min 5 ms", MPI, rto_min="5ms"),
    Transport("MPI, bbr", MPI, congestion="bbr"),
    # Classes have queues of their own: together those of the data have so much.
    Transport("MPI, cubic, 2.5 times the queue", MPI, queue_times=2.5),
    _bounded("p = 0"),
    *(_bounded(f"p = {bound}", "--loss-bound", bound) for bound in ("0.05", "0.1", "0.2")),
    _bounded("p = 0.1, on-probe", "--loss-bound", "0.1", "--stop", "on-probe"),
    _bounded("p = 0.1, no tags", "--loss-bound", "0.1", "--loss-tags", "off", tags=False),
    _bounded("p = 0.1, no rate control", "--loss-bound", "0.1", "--rate-control", "off", is_control=True),
)}
QUICK_TRANSPORTS = ["MPI, cubic", "MPI, cubic, rto_min 5 ms", "udp, p = 0", "udp, p = 0.1"]
