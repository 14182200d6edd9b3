# SPDX-License-Identifier: MIT
"""The links of the studies whose ranks speak over MPI or gloo: the experiment with a server, and that on overlap. The seconds of two
runs stand beside each other only where these are the same."""

import pathlib

from cluster import Cluster
from links import QUEUE_MS
from settings import RATES

CONGESTION, OFFLOAD = "cubic", True
# What results keep of it.
EMULATION = {"congestion_control": CONGESTION, "segments": "offloaded" if OFFLOAD else "packets"}


def cluster_of(machines: int, rate: str) -> Cluster:
    bits = RATES[rate]
    # What a full bucket lets through at once must be little of a step: of slow links short bursts, with queues as long as others'.
    queue = None if bits is None or bits >= 1e9 else int(bits / 8 * QUEUE_MS / 1000)
    return Cluster(machines, bits, queue_bytes=queue, congestion=CONGESTION, offload=OFFLOAD)


def require_same_emulation(directory: pathlib.Path, runs: list[dict]) -> None:
    """Throws RuntimeError where some of the directory's had another: their seconds do not stand beside those of this one."""
    def said(of: dict) -> str:
        return ", ".join(f"{key} {of.get(key, 'not said')}" for key in EMULATION)

    others = sorted({said(each) for each in runs} - {said(EMULATION)})
    if others:
        raise RuntimeError(f"{directory} has runs with {'; '.join(others)}. This one has {said(EMULATION)}: give another --output")
