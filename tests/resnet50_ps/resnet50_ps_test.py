# SPDX-License-Identifier: MIT
"""Runs resnet50_ps on a few images and compares what it prints, or ends it in the middle.

resnet50_ps_test.py PROGRAM MPIRUN... -- TEST, where TEST is one of the functions below.
"""

import csv
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "resnet50_ps"
SKIPPED = 77
LONGEST = 240  # seconds of a run on a busy machine

# Every run has these but where it has others: a step takes a fraction of a second.
SMALL = {"--batch": "2", "--threads": "1", "--warm-up": "0"}


class Runs:
    def __init__(self, program, mpirun, directory):
        self.program, self.mpirun, self.directory = program, mpirun, Path(directory)
        self.data = self.directory / "cifar"
        self.data.mkdir()
        write_cifar10(self.data)

    def command(self, workers, *options):
        return [*self.mpirun, "-n", str(workers + 1), self.program, *self.with_usual(*options)]

    def with_usual(self, *options):
        usual = {**SMALL, "--data": f"cifar10:{self.data}"}
        added = [word for name, value in usual.items() if name not in options for word in (name, value)]
        return [*added, *map(str, options)]

    def run(self, workers, *options):
        return subprocess.run(self.command(workers, *options), capture_output=True, text=True, timeout=LONGEST)

    def checksums(self, workers, *options):
        """Of the parameters at the end of each run. The program has compared the replicas."""
        done = self.run(workers, *options)
        assert done.returncode == 0, done.stdout + done.stderr
        found = re.findall(r"(\d+) replicas equal, checksum ([0-9a-f]{16})", done.stdout)
        assert found and all(int(count) == workers for count, _ in found), done.stdout
        return [checksum for _, checksum in found]

    def refused(self, workers, sentence, *options, status=2):
        done = self.run(workers, *options)
        assert done.returncode == status, (done.returncode, done.stderr)
        assert sentence in done.stderr, f"{sentence!r} is not in {done.stderr!r}"

    def start(self, workers, *options):
        return start(self.command(workers, "--runs", "0.95", *options))


def start(command, **options):
    """Starts a run that does not end by itself, and returns when it has done a step."""
    started = subprocess.Popen([*command, "--steps", "100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
    for line in started.stdout:
        if re.match(r" +2/", line):
            return started
    raise AssertionError("the run ended before its second step: " + started.stderr.read())


def write_cifar10(directory, train=40, test=20):
    numbers = random.Random(1)
    for name, count in ("data_batch_1.bin", train), ("test_batch.bin", test):
        records = [bytes([i % 10]) + numbers.randbytes(3072) for i in range(count)]
        (directory / name).write_bytes(b"".join(records))


def ranks_of(program):
    """The process of each rank that runs this program."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.path.realpath(process / "exe") != os.path.realpath(program):
                continue
            rank = re.search(rb"(?:OMPI_COMM_WORLD_RANK|PMI_RANK)=(\d+)", (process / "environ").read_bytes())
        except OSError:
            continue
        if rank:
            found[int(rank[1])] = int(process.name)
    return found


def metrics(directory):
    with open(directory / "metrics.csv") as file:
        return [row for row in csv.DictReader(file) if row["loss"]]


# --- numbers


def dense(runs):
    """R = 0 is dense SGD, bitwise: a server's mean and MPI_Allreduce's sum of two are the same. R = 0.95 sends what it promises."""
    output = runs.directory / "out"
    options = ["--steps", 4, "--momentum", 0.9, "--output", output]
    allreduce, all_sent, dropped = runs.checksums(2, "--runs", "allreduce,0,0.95", *options)
    assert allreduce == all_sent != dropped
    losses = [[row["loss"] for row in metrics(output / name)] for name in ("allreduce", "R-0", "R-0.95")]
    assert losses[0] == losses[1] and losses[0][0] == losses[2][0]
    for row in metrics(output / "R-0.95"):
        assert 0.05 <= float(row["up_bytes"]) / 94.11e6 < 0.0535, row
    assert 0.05 <= float(metrics(output / "R-0.95")[2]["down_bytes"]) / 94.11e6 < 0.0535


def asynchronous(runs):
    """Of one worker it is the synchronous server; of three, replicas are equal at the end, with and without a bound."""
    options = ["--runs", "0.9", "--steps", 4]
    assert runs.checksums(1, "--async", *options) == runs.checksums(1, "--local", *options)
    runs.checksums(3, "--async", *options)
    runs.checksums(3, "--async", "--staleness", 0, *options)


def nodes(runs):
    """Two workers in a node are two workers, and four in two nodes learn as four."""
    options = ["--runs", "0", "--steps", 2]  # from the third on rounding grows, to a share that differs between processors
    assert runs.checksums(2, "--workers-per-node", 2, *options) == runs.checksums(2, *options)
    runs.checksums(4, "--workers-per-node", 2, "--output", runs.directory / "nodes", *options)
    runs.checksums(4, "--output", runs.directory / "flat", *options)
    of_nodes, of_flat = (metrics(runs.directory / name / "R-0") for name in ("nodes", "flat"))
    for mine, theirs in zip(of_nodes, of_flat, strict=True):
        assert abs(float(mine["loss"]) - float(theirs["loss"])) < 1e-5 * float(theirs["loss"]), (mine, theirs)
    assert float(of_nodes[1]["up_bytes"]) == float(of_flat[1]["up_bytes"])
    runs.checksums(3, "--workers-per-node", 2, "--runs", "0.95", "--async", "--steps", 2)


def resume(runs):
    """A run that is gone on with is the run that was not interrupted; what is no checkpoint of it is refused."""
    options = ["--runs", "0.9", "--momentum", 0.9, "--checkpoint-every", 2]
    whole = runs.checksums(2, *options, "--steps", 4, "--output", runs.directory / "whole")
    output = runs.directory / "parts"
    runs.checksums(2, *options, "--steps", 3, "--output", output)  # the third step is done again
    resumed = ["--steps", 4, "--output", output, "--resume"]
    assert runs.checksums(2, *options, *resumed) == whole
    losses = {row["step"]: row["loss"] for row in metrics(output / "R-0.9")}
    assert losses == {row["step"]: row["loss"] for row in metrics(runs.directory / "whole" / "R-0.9")}

    runs.refused(2, "batch 2, seed 1, 2 workers; this run has", *options, *resumed, "--seed", 5, status=1)
    runs.refused(2, "has files: give another --output", *options, "--output", output)
    checkpoint = output / "R-0.9" / "checkpoint.pt"
    os.truncate(checkpoint, checkpoint.stat().st_size // 2)
    runs.refused(2, f"{checkpoint}: ", *options, *resumed, status=1)


# --- faults


def killed(runs):
    """A worker that dies takes the run with it, at once."""
    started = runs.start(2)
    os.kill(ranks_of(runs.program)[2], signal.SIGKILL)
    killed_at = time.monotonic()
    assert started.wait(60) != 0
    assert time.monotonic() - killed_at < 30
    assert not ranks_of(runs.program)


def stopped(runs):
    """A worker that hangs is named, in each mode, within the timeout and some seconds."""
    for mode in [], ["--async"], ["--workers-per-node", 2]:
        started = runs.start(3, "--timeout", 5, *mode)
        os.kill(ranks_of(runs.program)[2], signal.SIGSTOP)
        _, error = started.communicate(timeout=90)
        assert started.returncode != 0
        assert "worker 2 has said nothing within --timeout, 5 s" in error, (mode, error)
        assert not ranks_of(runs.program)


def full_disk(runs):
    """A checkpoint that does not fit leaves none, and the run says so."""
    output = runs.directory / "small"
    output.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m", "none", output], capture_output=True).returncode:
        print("may not mount a small disk here")
        sys.exit(SKIPPED)
    try:
        options = ["--runs", "0.95", "--steps", 2, "--checkpoint-every", 1, "--output", output]
        runs.refused(1, "checkpoint.pt: No space left on device", *options, status=1)
        assert not list(output.glob("*/checkpoint*"))
    finally:
        subprocess.run(["umount", output], check=True)


def ended(runs):
    """SIGTERM to `run` ends all that it has started; without --output it makes a directory and says which."""
    tree = runs.directory / "tree"
    (tree / "tools").mkdir(parents=True)
    (tree / "bin").mkdir()
    for stub in tree / "tools" / "install_packages", tree / "bin" / "cmake":
        stub.write_text("#!/bin/sh\n")
        stub.chmod(0o755)
    shutil.copytree(EXAMPLE, tree / "examples" / "resnet50_ps")
    program = tree / "build" / "release" / "examples" / "resnet50_ps" / "resnet50_ps"
    program.parent.mkdir(parents=True)
    shutil.copy2(runs.program, program)
    environment = {**os.environ, "PATH": f"{tree / 'bin'}:{os.environ['PATH']}"}
    run = [tree / "examples" / "resnet50_ps" / "run", *runs.with_usual("--runs", "0.95")]

    started = start(run, env=environment)
    assert len(ranks_of(program)) == 3
    started.send_signal(signal.SIGTERM)
    assert started.wait(30) == 143
    assert not ranks_of(program)

    done = subprocess.run([*run, "--steps", "2", "--workers", "1"], capture_output=True, text=True, env=environment, timeout=LONGEST)
    assert done.returncode == 0, done.stderr
    output = Path(re.search(r"^metrics: (.*)$", done.stdout, re.MULTILINE)[1])
    assert len(metrics(output / "R-0.95")) == 2
    help_texts = [subprocess.run(command, capture_output=True, text=True, check=True).stdout
                  for command in ([*run, "--help"], runs.command(1, "--help"))]
    assert help_texts[0] == help_texts[1]


# --- refusals


def refusals(runs):
    runs.refused(1, "'1.5' is neither a drop ratio from 0 to 1 nor allreduce", "--runs", "0,1.5")
    runs.refused(1, "--batch: Value 1 not in range", "--batch", 1)
    runs.refused(1, "--no-such-option", "--no-such-option")
    runs.refused(1, "choose others with --runs", "--checkpoint-every", 1, "--output", runs.directory / "out")
    runs.refused(1, "there is no directory", "--data", "cifar10:/no/such/place")
    runs.refused(1, "40 training images are too few", "--batch", 64)
    damaged = runs.data / "data_batch_1.bin"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    runs.refused(1, f"{damaged} is damaged")
    folder = runs.directory / "images"
    for part in "train", "val":
        (folder / part / "cats").mkdir(parents=True)
        for i in range(2):
            (folder / part / "cats" / f"{i}.jpg").write_bytes(b"no JPEG at all")
    runs.refused(1, "cannot decode", "--data", f"imagefolder:{folder}")


def options(_):
    """help.txt has the program's options and no other, on one screen."""
    text = (EXAMPLE / "help.txt").read_text().splitlines()[1:-1]
    assert len(text) <= 40 and max(map(len, text)) <= 100
    described = re.findall(r"^  (--[a-z-]+)", "\n".join(text), re.MULTILINE)
    added = re.findall(r'add_(?:option|flag)\("(--[a-z-]+)"', (EXAMPLE / "options.hpp").read_text())
    assert sorted(described) == sorted(added) and len(added) <= 25, set(described) ^ set(added)


def plot(runs):
    """Draws the runs of a directory, of a step that is there twice the last line; without matplotlib it says so."""
    header = "step,loss,up_bytes,down_bytes,compute_seconds,server_seconds,seconds,test_loss,test_accuracy\n"
    for name in "R-0", "R-0.95":
        (runs.directory / name).mkdir()
        steps = "".join(f"{s},{2 / s},5e6,5e6,1,1,3,,\n" for s in (1, 2, 3, 3, 4))
        (runs.directory / name / "metrics.csv").write_text(header + steps + "4,,,,,,,1.5,0.625\n")
    stub = runs.directory / "without"
    stub.mkdir()
    (stub / "matplotlib.py").write_text("raise ImportError\n")
    # What run draws with. Without network only where it has what it needs.
    python = subprocess.run([EXAMPLE.parents[1] / "tools" / "python_for_plots"], capture_output=True, text=True).stdout.strip()
    command = [python or sys.executable, EXAMPLE / "plot.py", runs.directory]
    without = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(stub)})
    assert "matplotlib is not installed" in without.stderr
    if not python:
        print("matplotlib cannot be installed")
        sys.exit(SKIPPED)
    subprocess.run(command, check=True)
    assert (runs.directory / "runs.svg").read_text().count("<path") > 10


def main():
    program, *mpirun, _, name = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory:
        # Ranks of this test alone are looked for by their program.
        own = Path(directory) / "resnet50_ps"
        shutil.copy2(program, own)
        globals()[name](Runs(str(own), mpirun, directory))


if __name__ == "__main__":
    main()
