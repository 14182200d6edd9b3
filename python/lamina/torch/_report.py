# SPDX-License-Identifier: MIT
import dataclasses
import logging
import math
import sys
from typing import Any, Dict

logger = logging.getLogger("lamina.torch")


@dataclasses.dataclass(frozen=True)
class StepReport:
    """One synchronised backward pass. The same on all ranks, but for `seconds` and `left_out_elements`."""

    step: int  #: counted from 1; a batch that is skipped does not count
    skipped: bool  #: a gradient was not finite, and nothing was delivered
    threshold: float  #: -1: everything was sent
    fragments: int
    sent_fragments: int
    elements: int
    sent_elements: int
    dense_bytes: int  #: of the gradients in their own types: what DDP alone would have given to its allreduce
    #: That this rank gave to allreduce: flags, values and kept elements. Of LocalUpdates, values and what goes to owners, its own
    #: shard counted: as much comes back in answers, as an allreduce has two ways, too.
    sent_bytes: int
    #: Of this rank so far: not finite under nonfinite="leave_out", sums that would overflow, and, counted on every rank, means
    #: beyond the range of float16 gradients, which are cut there.
    left_out_elements: int
    seconds: Dict[str, float]  #: of this rank: check, agree, add, pack, allreduce, unpack

    @property
    def ratio(self) -> float:
        """sent_bytes / dense_bytes; NaN for a model without elements."""
        return self.sent_bytes / self.dense_bytes if self.dense_bytes else math.nan


@dataclasses.dataclass(frozen=True)
class Totals:
    """Of all steps so far, those before a resume included."""

    steps: int = 0
    skipped: int = 0
    dense_bytes: int = 0
    sent_bytes: int = 0

    @property
    def ratio(self) -> float:
        """sent_bytes / dense_bytes; NaN before the first step."""
        return self.sent_bytes / self.dense_bytes if self.dense_bytes else math.nan

    def and_of(self, report: StepReport) -> "Totals":
        return Totals(self.steps + (not report.skipped), self.skipped + report.skipped,
                      self.dense_bytes + report.dense_bytes, self.sent_bytes + report.sent_bytes)


def log(report: StepReport, every: int, rank: int) -> None:
    """Rank 0's line, by the logger where one is set up for INFO, and otherwise to stderr: who gives log_every wants to see it."""
    if rank or not every or report.step % every or report.skipped:
        return
    line = (f"step {report.step}: {report.sent_fragments} of {report.fragments} fragments, {100 * report.ratio:.1f} % of the bytes, "
            f"threshold {report.threshold:.1e}")
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info(line)
    else:
        print(f"lamina: {line}", file=sys.stderr, flush=True)


def add_scalars(report: StepReport, writer: Any, global_step: int, prefix: str) -> None:
    """To whatever has TensorBoard's add_scalar(tag, value, step)."""
    writer.add_scalar(f"{prefix}/sent_bytes_ratio", report.ratio, global_step)
    writer.add_scalar(f"{prefix}/sent_fragments", report.sent_fragments, global_step)
    writer.add_scalar(f"{prefix}/threshold", report.threshold, global_step)
    writer.add_scalar(f"{prefix}/skipped", int(report.skipped), global_step)
    for name, seconds in report.seconds.items():
        writer.add_scalar(f"{prefix}/seconds/{name}", seconds, global_step)
