# SPDX-License-Identifier: MIT
"""What the tests of benchmarks/lab share."""

import os
import pathlib
import shutil
import sys

LAB = pathlib.Path(__file__).resolve().parents[3] / "benchmarks" / "lab"
sys.path.insert(0, str(LAB))

import cluster  # noqa: E402


def require(condition: bool, what: str) -> None:
    if not condition:
        sys.exit(f"FAILED: {what}")


def skip(why: str) -> None:
    print(f"skipped: {why}")
    sys.exit(77)


def skip_without_clusters() -> None:
    if os.geteuid() != 0:
        skip("an emulated cluster needs root")
    for tool in ("ip", "tc", "ethtool", "unshare", "mpirun"):
        if shutil.which(tool) is None:
            skip(f"the program {tool} is missing")
    try:
        with cluster.Cluster(1, 1e9):
            pass
    except RuntimeError as error:
        skip(f"network namespaces or tc tbf are not to be had here: {error}")
