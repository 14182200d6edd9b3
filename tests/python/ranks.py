# SPDX-License-Identifier: MIT
"""Runs a test, or a program, on several ranks over gloo, a process each. Importing torch takes longer than most tests: one process
does that, and the others are forked from it. Those of tests are kept for the next test, which has a process group of its own;
after one that failed they are new, too."""

import atexit
import datetime
import functools
import gc
import os
import pathlib
import runpy
import socket
import sys
import tempfile
import traceback
from multiprocessing import get_context
from multiprocessing.connection import wait

import pytest
import torch
import torch.distributed as dist

SECONDS = 60  # a test that hangs has failed

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
_context = get_context("forkserver")
_context.set_forkserver_preload(["lamina.torch", "numpy"])
_kept = []


def on(world=None, sends_bfloat16=lambda **_: False):
    """Makes a function a test that calls it on each of `world` ranks; if None, of as many as its argument of that name says. Skipped where
    gloo does not know bfloat16 and `sends_bfloat16` is true of the arguments."""
    def made(of_rank):
        @functools.wraps(of_rank)
        def test(**arguments):
            if sends_bfloat16(**arguments):
                needs_bfloat16()
            run(world or arguments["world"], test, **arguments)
        return test
    return made


def run(world, test, /, *arguments, **named):
    """Calls test(*arguments, **named), a function of a module, on each of `world` ranks. RuntimeError, with the rank and its traceback,
    for the first that fails."""
    while len(_kept) < world:
        _kept.append(_Rank())
    try:
        _call(_kept[:world], test, arguments, named)
    except BaseException:
        stop()
        raise


def stop():
    while _kept:
        _kept.pop().process.kill()


def refused(*cases):
    """Each is an error, what it says, None for anything, and the call that raises it."""
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()


def gathered(value, group=None):
    """On all ranks of the group the list of what each has."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def agree(value):
    """Whether all ranks have the same, of tensors bitwise."""
    return len(set(gathered(b"".join(each.numpy().tobytes() for each in value) if isinstance(value, list) else value))) == 1


def needs_bfloat16():
    """Skips a test where gloo does not know bfloat16."""
    if not _knows_bfloat16():
        pytest.skip(f"gloo of PyTorch {torch.__version__} does not send bfloat16")


@functools.lru_cache(maxsize=None)
def _knows_bfloat16():
    try:
        run(2, _add_bfloat16)
    except RuntimeError as error:
        if "scalar type" not in str(error):
            raise
        return False
    return True


def _add_bfloat16():
    dist.all_reduce(torch.ones(3, dtype=torch.bfloat16))


class Program:
    """A program as its reader starts it, on so many ranks: what torchrun does, which of PyTorch 1.13 does not run with Python
    3.11."""

    def __init__(self, path, *arguments, world=2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._folder = tempfile.TemporaryDirectory()
        self._outputs = [pathlib.Path(self._folder.name) / str(rank) for rank in range(world)]
        self._processes = [_context.Process(target=_execute, daemon=True, args=(str(path), arguments, str(output), {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"})) for rank, output in enumerate(self._outputs)]
        for process in self._processes:
            process.start()

    def outputs(self):
        """What each rank has printed, once all have ended."""
        for process in self._processes:
            process.join(SECONDS)
            assert process.exitcode == 0
        return [output.read_text() for output in self._outputs]

    def kill(self):
        for process in self._processes:
            process.kill()
            process.join()


def _execute(path, arguments, output, environment):
    os.environ.update(environment)
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 1)
    torch.set_num_threads(1)  # what OMP_NUM_THREADS says to a torch that is imported after it
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")


class _Rank:
    def __init__(self):
        self.pipe, there = _context.Pipe()
        self.process = _context.Process(target=_serve, args=(there,), daemon=True)
        self.process.start()
        there.close()


def _call(ranks, test, arguments, named):
    with tempfile.TemporaryDirectory() as directory:
        for number, rank in enumerate(ranks):
            rank.pipe.send((f"{directory}/store", number, len(ranks), test, arguments, named))
        waiting = {rank.pipe: number for number, rank in enumerate(ranks)}
        while waiting:
            ready = wait(waiting, SECONDS)
            if not ready:
                raise RuntimeError(f"ranks {sorted(waiting.values())} did not end within {SECONDS} s")
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    failure = pipe.recv()
                except EOFError:
                    raise RuntimeError(f"rank {rank} died") from None
                if failure:
                    raise RuntimeError(f"on rank {rank}:\n{failure}")


def _serve(pipe):
    torch.set_num_threads(1)
    while True:
        try:
            store, rank, world, test, arguments, named = pipe.recv()
        except EOFError:
            return
        failure = None
        try:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world,
                                    timeout=datetime.timedelta(seconds=SECONDS / 2))
            getattr(test, "__wrapped__", test)(*arguments, **named)  # what on() was given
            gc.collect()  # DDP goes before its group: docs/pytorch/hook.md, Limits
            dist.barrier()
            dist.destroy_process_group()
        except BaseException:
            failure = traceback.format_exc()
        pipe.send(failure)


atexit.register(stop)
