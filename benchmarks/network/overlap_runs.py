# SPDX-License-Identifier: MIT
"""Runs one row of the experiment on overlap, once, over a cluster that is there."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import torch_ranks
from cluster import Cluster
from experiment import MODEL_CLASSES
from overlap_rows import WITH_GRADIENTS, Cell, Row
from settings import RATES

RECORDED_STEPS = 2  # of those that are recorded: each rank keeps them in memory
LONGEST_RUN_SECONDS = 3600
# PowerSGD sends everything in the first two, and the first step of the harness records the order of gradients.
WARM_UP_STEPS = 3
SLOW_STEP_SECONDS = 3.0
SLOW_STEPS = 3

HERE = pathlib.Path(__file__).resolve().parent


def record(program: str, directory: pathlib.Path, network: str, steps: int) -> None:
    """Gradients of two workers of a real run and the profile of a step; of the gradients some are enough here. Of a network all of
    whose rows send everything the profile of one step is enough."""
    if (directory / "profile.txt").exists():
        return
    print("Recording gradients and the profile of a step ...", flush=True)
    if network in WITH_GRADIENTS:
        what = ["--workers", "2", "--steps", str(steps), "--warm-up", "20", "--batch", "8"]
    else:
        what = ["--network", network, "--image-size", "224", "--workers", "1", "--steps", "2", "--batch", "4", "--record-steps", "0"]
    subprocess.run([program, "--transport", "inprocess", "--runs", "without", *what, "--classes", str(MODEL_CLASSES), "--no-evaluation",
                    "--record", str(directory)], check=True, stdout=subprocess.DEVNULL)
    for path in directory.glob("worker-*.f32"):
        if int(path.stem.rsplit("-", 1)[1]) >= RECORDED_STEPS:
            path.unlink()


def steps_of(row: Row, cell: Cell, steps: int) -> int:
    """Measured in a run: a few of a row whose steps take long."""
    return min(steps, SLOW_STEPS) if row.step_seconds(cell) > SLOW_STEP_SECONDS else steps


def steps_beside(row: Row) -> int:
    """Of a run, that do not count."""
    return WARM_UP_STEPS + row.waits_in_the_next_step


def run_seconds(row: Row, cell: Cell, steps: int) -> float:
    """About: to plan a session by."""
    return 5 + (steps_beside(row) + steps_of(row, cell, steps)) * row.step_seconds(cell)


def mpirun(cluster: Cluster, machines: list[int], program: list[str], seconds: float = LONGEST_RUN_SECONDS) -> str:
    """What the program says. Where there are fewer cores than ranks a call of MPI that blocks would spin in the way of the others."""
    yielding = ["--mca", "mpi_yield_when_idle", "1"] if len(machines) > os.cpu_count() else []
    return cluster.mpirun(machines, [*yielding, *program], seconds).stdout


def run_harness(program: str, row: Row, cell: Cell, cluster: Cluster, steps: int, recording: pathlib.Path,
                more: list[str]) -> list[dict]:
    """The steps that count."""
    machines = list(range(row.machines(cell.workers)))
    options = ["--network", cell.network, *row.options_in(cell), "--steps", str(steps_beside(row) + steps), "--threads", "1",
               "--replay", str(recording), "--by-layer", "--compute-seconds", str(cell.compute_seconds), "--learning-rate", "1e-6",
               "--classes", str(MODEL_CLASSES), *more]
    with tempfile.TemporaryDirectory() as directory:
        mpirun(cluster, machines, [program, *options, "--output", directory])
        lines = (pathlib.Path(directory) / row.directory / "metrics.jsonl").read_text().splitlines()
    found = [line for line in map(json.loads, lines) if "step" in line][WARM_UP_STEPS:WARM_UP_STEPS + steps]
    kept = ("total_seconds", "exposed_seconds", "hidden_seconds", "predicted_exposed_seconds")
    # A worker sends so much, and as much comes to it at the same time; with a server, what its link carries the fuller way.
    def sent(each: dict) -> float:
        return cell.workers * max(each["sent_up"], each["sent_down"]) if row.has_server else each["sent_up"] + each["sent_down"]

    return [{**{key: each[key] for key in kept if key in each}, "sent_bytes": sent(each) * cell.model_bytes} for each in found]


def share_of_counted(sent: int, steps: list[dict], row: Row) -> float | None:
    """What an interface sent in a run of these steps, over what they and those beside them have counted; None where they count nothing."""
    counted = sum(step["sent_bytes"] for step in steps) * (1 + steps_beside(row) / len(steps))
    return sent / counted if counted > 0 else None


def run_ddp(python: str, row: Row, cell: Cell, cluster: Cluster, steps: int, recording: pathlib.Path) -> tuple[list[dict], str]:
    """The steps that count, and the version of PyTorch."""
    with tempfile.TemporaryDirectory() as directory:
        output = pathlib.Path(directory) / "steps.json"
        program = [python, str(HERE / "ddp.py"), "--model", cell.network, *row.options_in(cell), "--replay", str(recording),
                   "--compute-seconds", str(cell.compute_seconds), "--warm-up", str(WARM_UP_STEPS), "--steps", str(steps),
                   "--interface", "eth0", "--output", str(output)]
        torch_ranks.run(cell.workers, cluster.address(0), "eth0", lambda rank: cluster.command_on(rank, *program),
                        LONGEST_RUN_SECONDS)
        found = json.loads(output.read_text())
    return found["steps"], found["torch"]


def has_torch(python: str) -> bool:
    check = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
    try:
        return subprocess.run([python, "-c", check], check=False, capture_output=True).returncode == 0
    except OSError:
        return False


def python_with_torch(wanted: str | None) -> str | None:
    """The one that is wanted, else the first of this one and the system's; None where it has none."""
    return next((python for python in ([wanted] if wanted else [sys.executable, "/usr/bin/python3"]) if has_torch(python)), None)


def calibrate(alone: str, cell: Cell, cluster: Cluster) -> dict:
    """The constants of the network as lab::calibrate() measures them now: alpha, beta_one_way, beta_both_ways, gamma."""
    return json.loads(mpirun(cluster, list(range(cell.workers)), [alone, "calibrate"], 120).splitlines()[-1])


def drift(before: dict, after: dict) -> float:
    """How far the seconds a byte of the two differ."""
    return max(abs(after[key] / before[key] - 1) for key in ("beta_one_way", "beta_both_ways"))
