# SPDX-License-Identifier: MIT
"""Real runs of the parameter server under mpirun, for the tests that kill and stop them."""

import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

PROGRAM, MPIRUN = sys.argv[1], sys.argv[2:]


def write_images(directory: str) -> None:
    """Noise in CIFAR-10's files, and so few that an evaluation takes no time."""
    noise = random.Random(1)
    for name, images in (("data_batch_1", 64), ("test_batch", 8)):
        records = [bytes([label % 10]) + noise.randbytes(3 * 32 * 32) for label in range(images)]
        (pathlib.Path(directory) / f"{name}.bin").write_bytes(b"".join(records))


IMAGES = tempfile.TemporaryDirectory()
write_images(IMAGES.name)
TRAINING = ["--data", f"cifar10:{IMAGES.name}", "--runs", "with", "--batch", "4", "--image-size", "16", "--momentum", "0.9",
            "--learning-rate", "0.001", "--threads", "1", "--interval", "1"]
DEADLINE_SECONDS = 120
# Of a step whose frames went as packets: what depends on which were lost, and when.
COUNTED = ("packets", "repeated", "duplicate", "late", "wire_bytes_up", "wire_bytes_down", "rounds", "rate")


def command(output: pathlib.Path, *more: str, steps: int = 5, ranks: int = 3) -> list[str]:
    """A server and two workers, unless more is said."""
    return [*MPIRUN, "-n", str(ranks), PROGRAM, *TRAINING, "--steps", str(steps), "--output", str(output), *more]


def run(arguments: list[str], **more) -> subprocess.CompletedProcess:
    return subprocess.run(arguments, capture_output=True, text=True, timeout=DEADLINE_SECONDS, **more)


def start(arguments: list[str]) -> subprocess.Popen:
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def with_fault(rank: int, place: str, step: int, action: str = "kill") -> dict[str, str]:
    """The environment of a run in which a rank fails as planned: planned_fault.hpp."""
    return {**os.environ, "LAMINA_TEST_FAULT": f"{rank} {place} {step} {action}"}


def require(condition: bool, what: str) -> None:
    if not condition:
        sys.exit(f"FAILED: {what}")


def at_once(*cases: Callable[[], None]) -> None:
    """Three at a time: most of a case is waiting, for ranks to start and for timeouts."""
    with ThreadPoolExecutor(3) as threads:
        for case in [threads.submit(each) for each in cases]:
            case.result()


def wait_for(condition, mpirun: subprocess.Popen, what: str) -> None:
    until = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if mpirun.poll() is not None:
            require(False, f"{what} did not come before the run ended with status {mpirun.returncode}: {mpirun.communicate()[1]}")
        require(time.monotonic() < until, f"{what} did not come in {DEADLINE_SECONDS} s")
        time.sleep(0.02)


def ranks_of(mpirun: subprocess.Popen) -> list[int]:
    """The process ids of the server and of the workers."""
    ranks = {}
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[1]
        except OSError:
            continue
        for variable in environment:
            if variable.startswith(b"OMPI_COMM_WORLD_RANK=") and int(parent) == mpirun.pid:
                ranks[int(variable.split(b"=")[1])] = int(entry.name)
    return [ranks[rank] for rank in sorted(ranks)]


def steps_done(output: pathlib.Path) -> int:
    metrics = output / "with" / "metrics.jsonl"
    return metrics.read_text().count('{"step"') if metrics.exists() else 0


def checkpoints(output: pathlib.Path) -> list[pathlib.Path]:
    return sorted((output / "with").glob("checkpoint-*.lamina"))
