# SPDX-License-Identifier: MIT
"""Starts the ranks of a program of torch.distributed over gloo, each where it is told, and waits for all of them."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable

PORT = 29577


def run(ranks: int, address: str, interface: str, command_of: Callable[[int], list[str]], seconds: float) -> None:
    """Rank r by command_of(r), as rank 0's address and interface say. RuntimeError with what the first that fails has written; nothing
    that was started outlives the call."""
    with contextlib.ExitStack() as stack:
        errors = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        processes: list[subprocess.Popen] = []
        try:
            for rank in range(ranks):
                environment = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR=address, MASTER_PORT=str(PORT),
                                   GLOO_SOCKET_IFNAME=interface, OMP_NUM_THREADS="1")
                processes.append(subprocess.Popen(command_of(rank), env=environment, stdout=errors[rank], stderr=subprocess.STDOUT,
                                                  start_new_session=True))
            _wait(processes, errors, time.monotonic() + seconds)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait(processes: list[subprocess.Popen], errors: list, deadline: float) -> None:
    while True:
        states = [process.poll() for process in processes]
        for rank, status in enumerate(states):
            if status:
                errors[rank].seek(0)
                raise RuntimeError(f"rank {rank} ended with status {status}: {errors[rank].read().strip()[-2000:]}")
        if all(status == 0 for status in states):
            return
        if time.monotonic() > deadline:
            raise RuntimeError("the ranks take longer than they may")
        time.sleep(0.02)
