# SPDX-License-Identifier: MIT
"""Runs a test on several ranks over gloo, a process each. The processes are kept for the next test: importing torch takes
longer than most tests. Each test has a process group of its own; after one that failed the processes are new, too."""

import atexit
import datetime
import os
import pathlib
import tempfile
import traceback
from multiprocessing import get_context
from multiprocessing.connection import wait

import pytest
import torch
import torch.distributed as dist

SECONDS = 60  # a test that hangs has failed

_kept = {}


def run(world, test, *arguments):
    """Calls test(*arguments), a function of a module, on each of `world` ranks. RuntimeError, with the rank and its traceback,
    for the first that fails; the others are then stopped."""
    if world not in _kept:
        _kept[world] = _Ranks(world)
    try:
        _kept[world].call(test, arguments)
    except BaseException:
        _kept.pop(world).stop()
        raise


def gathered(value):
    """On all ranks the list of what each has."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


_adds_bfloat16 = []


def needs_bfloat16():
    """Skips a test where gloo does not know bfloat16."""
    if not _adds_bfloat16:
        try:
            run(2, _add_bfloat16)
            _adds_bfloat16.append(True)
        except RuntimeError as error:
            if "scalar type" not in str(error):
                raise
            _adds_bfloat16.append(False)
    if not _adds_bfloat16[0]:
        pytest.skip(f"gloo of PyTorch {torch.__version__} does not send bfloat16")


def _add_bfloat16():
    dist.all_reduce(torch.ones(3, dtype=torch.bfloat16))


class _Ranks:
    def __init__(self, world):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        context = get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(world):
            here, there = context.Pipe()
            self.pipes.append(here)
            self.processes.append(context.Process(target=_serve, args=(rank, world, there), daemon=True))
            self.processes[-1].start()
            there.close()

    def call(self, test, arguments):
        with tempfile.TemporaryDirectory() as directory:
            store = str(pathlib.Path(directory) / "store")
            for pipe in self.pipes:
                pipe.send((store, test, arguments))
            waiting = dict(enumerate(self.pipes))
            while waiting:
                ready = wait(waiting.values(), SECONDS)
                if not ready:
                    raise RuntimeError(f"ranks {sorted(waiting)} did not end within {SECONDS} s")
                for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                    try:
                        failure = waiting.pop(rank).recv()
                    except EOFError:
                        raise RuntimeError(f"rank {rank} died") from None
                    if failure:
                        raise RuntimeError(f"on rank {rank}:\n{failure}")

    def stop(self):
        for process in self.processes:
            process.kill()
            process.join()


def _serve(rank, world, pipe):
    torch.set_num_threads(1)
    while True:
        try:
            store, test, arguments = pipe.recv()
        except EOFError:
            return
        failure = None
        try:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world,
                                    timeout=datetime.timedelta(seconds=SECONDS / 2))
            test(*arguments)
            dist.barrier()
            dist.destroy_process_group()
        except BaseException:
            failure = traceback.format_exc()
        pipe.send(failure)


@atexit.register
def _stop_all():
    for each in _kept.values():
        each.stop()
