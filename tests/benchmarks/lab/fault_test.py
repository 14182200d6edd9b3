#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What becomes of a run whose ranks die, stop, or fall silent: fault_test.py PROGRAM MPIRUN..."""

import os
import pathlib
import resource
import signal
import tempfile
import time
from functools import partial

from runs import (DEADLINE_SECONDS, MPIRUN, PROGRAM, TRAINING, at_once, checkpoints, command, ranks_of, require, run, start,
                  steps_done, wait_for, with_fault)


UDP = ["--transport", "udp", "--link-rate", "10000000000"]
BOUNDED = [*UDP, "--loss-bound", "0.1", "--loss-bound-down", "0.1", "--inject-loss", "0.1"]
AS_READY = ["--selection", "local", "--decide", "as_ready", "--bucket-bytes", "0", "--overlap"]
OVERLAP = ["--topology", "allreduce", "--selection", "agreed", "--decide", "ahead", "--overlap"]


def after_steps(output: pathlib.Path, steps: int, *more: str, ranks: int = 3):
    mpirun = start(command(output, *more, steps=1000, ranks=ranks))
    wait_for(lambda: steps_done(output) >= steps, mpirun, f"step {steps}")
    return mpirun


def dies(output: pathlib.Path, rank: int, after_seconds: float, *more: str) -> None:
    """At any moment of a step: the run ends within 10 s, with an error."""
    mpirun = after_steps(output, 2, *more)
    time.sleep(after_seconds)
    os.kill(ranks_of(mpirun)[rank], signal.SIGKILL)
    killed_at = time.monotonic()
    mpirun.communicate(timeout=DEADLINE_SECONDS)
    require(mpirun.returncode != 0, f"rank {rank} was killed and the run ended with status 0")
    require(time.monotonic() - killed_at < 10, f"rank {rank} was killed and the run went on for more than 10 s")


def falls_silent(output: pathlib.Path, rank: int, said: str, *more: str, ranks: int = 3) -> None:
    mpirun = after_steps(output, 2, "--timeout", "3", *more, ranks=ranks)
    processes = ranks_of(mpirun)
    os.kill(processes[rank], signal.SIGSTOP)
    stopped_at = time.monotonic()
    try:
        # mpirun itself waits for the stopped rank to obey, so what counts is what the others say.
        line = mpirun.stderr.readline()
        require(time.monotonic() - stopped_at < 10, "nobody noticed a silent rank within 10 s")
        require(said in line, f"expected {said!r}, got {line!r}")
    finally:
        for process in processes:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                pass
        mpirun.communicate(timeout=DEADLINE_SECONDS)
    require(mpirun.returncode != 0, "a run with a silent rank ended with status 0")


def pauses(output: pathlib.Path, undisturbed: pathlib.Path, seconds: float, *more: str) -> None:
    """A worker that stops for a while and goes on changes nothing but the time."""
    paused = losses_of_paused(output, seconds, *more)
    require(run(command(undisturbed, *more)).returncode == 0, "the undisturbed run failed")
    require(paused == losses_in(undisturbed), "a pause changed what was computed")


def losses_of_paused(output: pathlib.Path, seconds: float, *more: str) -> list[str]:
    mpirun = start(command(output, *more))
    wait_for(lambda: steps_done(output) >= 2, mpirun, "step 2")
    worker = ranks_of(mpirun)[1]
    os.kill(worker, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(worker, signal.SIGCONT)
    _, errors = mpirun.communicate(timeout=DEADLINE_SECONDS)
    require(mpirun.returncode == 0, errors)
    return losses_in(output)


def losses_in(output: pathlib.Path) -> list[str]:
    lines = (output / "with" / "metrics.jsonl").read_text().splitlines()
    losses = [line.split('"accuracy"')[0] for line in lines if line.startswith('{"step"')]
    require(len(losses) == 5, f"there are {len(losses)} of 5 steps")
    return losses


def fails_as_planned(output: pathlib.Path, place: str, action: str, *more: str) -> None:
    """Worker 1 dies, or throws, in that place of step 3: the run ends, with an error and without an orphan."""
    begun_at = time.monotonic()
    failed = run(command(output, *more, steps=1000), env=with_fault(1, place, 3, action))
    require(failed.returncode != 0, f"worker 1 failed in {place} and the run ended with status 0")
    require(f"planned fault in {place}" in failed.stderr, failed.stderr)
    require(action != "throw" or f"worker 1: thrown in {place}" in failed.stderr, failed.stderr)
    require(steps_done(output) in (1, 2), f"it was to be in step 3, and {steps_done(output)} steps were done")
    require(time.monotonic() - begun_at < 30, "the others waited for one that had failed")


def pauses_in_overlap(at: pathlib.Path) -> None:
    """Both exchanges, of which a worker stops for 2 s, compute what a run without overlap does."""
    ahead = OVERLAP[:-1]
    require(run(command(at / "undisturbed", *ahead)).returncode == 0, "the undisturbed run failed")
    expected = losses_in(at / "undisturbed")
    for name, more in (("sums", ("step",)), ("owners", ("step", "--exchange", "owners"))):
        require(losses_of_paused(at / name, 2, *OVERLAP, *more) == expected, f"a pause changed what {name} computed")


def diverges(output: pathlib.Path, *more: str) -> None:
    """A gradient that is not finite, while sums are on their way, ends all ranks with the sentence of today."""
    begun_at = time.monotonic()
    arguments = command(output, *more, steps=20)
    arguments[arguments.index("--learning-rate") + 1] = "1e30"
    failed = run(arguments)
    require(failed.returncode != 0 and "training has diverged, try a lower --learning-rate" in failed.stderr, failed.stderr)
    require(time.monotonic() - begun_at < 60, "the others waited for one that had failed")


def goes_on_without(output: pathlib.Path, number: signal.Signals, *more: str) -> None:
    """--degraded: the others finish without a worker that died, or fell silent for a while, and say so."""
    done = output.with_suffix(".done")
    mpirun = start(degraded(output, "--timeout", "4", "--done-file", str(done), *more))
    wait_for(lambda: steps_done(output) >= 2, mpirun, "step 2")
    worker = ranks_of(mpirun)[2]
    os.kill(worker, number)
    if number == signal.SIGSTOP:
        wait_for(lambda: steps_done(output) >= 4, mpirun, "step 4")
        os.kill(worker, signal.SIGCONT)
    _, errors = mpirun.communicate(timeout=DEADLINE_SECONDS)
    require(mpirun.returncode == 0 and done.exists(), errors)
    require("worker 1; the run goes on without it" in errors, f"the loss was passed over in silence: {errors!r}")
    require(steps_done(output) == 7, "the run did not go on")


def fails_degraded(output: pathlib.Path) -> None:
    """What is no loss ends a degraded run as any other: at once, and for the reason."""
    done = output.with_suffix(".done")
    begun_at = time.monotonic()
    failed = run(degraded(output, "--done-file", str(done), "--learning-rate", "1e30"))
    require(not done.exists(), "a degraded run that failed counts as done")
    require("the server: worker" in failed.stderr and "NaN or infinity" in failed.stderr, failed.stderr)
    require(time.monotonic() - begun_at < 60, "the others waited for one that had failed")


def degraded(output: pathlib.Path, *more: str) -> list[str]:
    options = [option for option in TRAINING if "--learning-rate" not in more or option not in ("--learning-rate", "0.001")]
    return [*MPIRUN, "--enable-recovery", "-n", "4", PROGRAM, *options, "--steps", "7", "--output", str(output),
            "--degraded", *more]


def disk_is_full(output: pathlib.Path) -> None:
    """No file may grow beyond a size, which gives the error that a full disk gives, by another name."""
    def checkpointing(steps: int, *more: str) -> list[str]:
        # Without mpirun, which would give its ranks the signal that comes with this error. With so many classes a checkpoint is
        # longer than what MPI writes for itself.
        return [PROGRAM, *TRAINING, "--classes", "100000", "--transport", "inprocess", "--steps", str(steps), "--output", str(output),
                "--checkpoint-every", "1", *more]

    def allow_no_checkpoint() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000_000, resource.RLIM_INFINITY))

    full = run(checkpointing(1), preexec_fn=allow_no_checkpoint, restore_signals=False)
    require(full.returncode != 0, "a run that could not write its checkpoint ended with status 0")
    said = f"cannot write {output / 'with'}"
    require(said in full.stderr and "File too large" in full.stderr, f"expected {said!r}, got {full.stderr!r}")
    require(not checkpoints(output) and not list((output / "with").glob("*.tmp*")), "half a checkpoint was left")

    require(run(checkpointing(1)).returncode == 0, "with room the run fails, too")
    before = [each.read_bytes() for each in checkpoints(output)]
    again = run(checkpointing(2, "--resume"), preexec_fn=allow_no_checkpoint, restore_signals=False)
    require(again.returncode != 0 and said in again.stderr, again.stderr)
    require([each.read_bytes() for each in checkpoints(output)] == before, "the checkpoints from before changed")


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        at = pathlib.Path(directory)
        at_once(  # the longest first
            partial(goes_on_without, at / "late", signal.SIGSTOP),
            partial(falls_silent, at / "silent_server", 0, "the server"),
            partial(goes_on_without, at / "dead", signal.SIGKILL),
            partial(goes_on_without, at / "late_over_udp", signal.SIGSTOP, *BOUNDED),
            partial(falls_silent, at / "silent_server_over_udp", 0, "the server", *UDP),
            partial(goes_on_without, at / "dead_over_udp", signal.SIGKILL, *BOUNDED),
            partial(pauses, at / "paused_over_udp", at / "undisturbed_over_udp", 3, *UDP, "--inject-loss", "0.1"),
            partial(falls_silent, at / "silent_worker_over_udp", 2, "worker 1", *BOUNDED),
            partial(pauses, at / "paused", at / "undisturbed", 2),
            partial(falls_silent, at / "silent_worker", 2, "worker 1"),  # sent to or waited for, as it happens
            partial(falls_silent, at / "silent_in_allreduce", 1, "worker 1", "--topology", "allreduce", "--selection", "agreed"),
            # Of three, one may name the one that waits for the silent one: their timeouts end together.
            partial(falls_silent, at / "silent_in_overlap", 1, "worker 1", *OVERLAP, "step", ranks=2),
            *(partial(falls_silent, at / f"silent_of_four_{exchange}", 1, "nothing heard for", *OVERLAP, "step", "--exchange", exchange, ranks=4)
              for exchange in ("sums", "owners")),
            partial(falls_silent, at / "silent_owner", 0, "worker 0", *OVERLAP, "backward", "--exchange", "owners", ranks=2),
            partial(falls_silent, at / "silent_in_parts", 2, "worker 1", *AS_READY, "step"),
            partial(falls_silent, at / "silent_server_of_parts", 0, "the server", *AS_READY, "backward"),
            partial(pauses, at / "paused_in_parts", at / "undisturbed_in_parts", 2, *AS_READY, "step"),
            partial(dies, at / "dies_in_parts", 1, 0.1, *AS_READY, "backward"),
            partial(diverges, at / "diverges_in_parts", *AS_READY, "step"),
            partial(pauses_in_overlap, at / "paused_in_overlap"),
            *(partial(fails_as_planned, at / f"{action}_{place}_{len(exchange)}", place, action, *OVERLAP, "backward", *exchange)
              for exchange in ((), ("--exchange", "owners"))
              for place, action in (("forward", "kill"), ("backward", "kill"), ("drain", "kill"), ("backward", "throw"))),
            partial(diverges, at / "diverges_in_overlap", *OVERLAP, "backward"),
            partial(diverges, at / "diverging_owners", *OVERLAP, "step", "--exchange", "owners"),
            partial(dies, at / "server", 0, 0),
            partial(dies, at / "server_over_udp", 0, 0.1, *UDP),
            partial(dies, at / "worker_over_udp", 1, 0.22, *BOUNDED),
            partial(dies, at / "early", 1, 0.05),
            partial(dies, at / "later", 2, 0.15),
            partial(fails_degraded, at / "diverging"))
        disk_is_full(at / "full")  # alone: what sets the limit must not run beside threads


main()
