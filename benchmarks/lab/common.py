# SPDX-License-Identifier: MIT
"""What the studies of this directory share: links, records, how they end."""

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable

from cluster import Cluster
from links import PACKET_BYTES, QUEUE_MS

RATES = {"100 Mb/s": 1e8, "200 Mb/s": 2e8, "1 Gb/s": 1e9, "10 Gb/s": 1e10, "unlimited": None}
MODEL_CLASSES = 1000  # as in the papers: ResNet-50 has 25,557,032 parameters
GOODPUT_SHARE = (PACKET_BYTES - 14 - 20 - 32) / PACKET_BYTES  # without Ethernet, IP, and TCP with timestamps
LONGEST_RUN_SECONDS = 24 * 3600

# Of the studies whose ranks speak over MPI or gloo. Only seconds of one emulation can be compared.
EMULATION = {"congestion_control": "cubic", "segments": "offloaded"}


def cluster_of(machines: int, rate: str) -> Cluster:
    bits = RATES[rate]
    # What a full bucket lets through at once must be little of a step: of slow links short bursts, with queues as long as others'.
    queue = None if bits is None or bits >= 1e9 else int(bits / 8 * QUEUE_MS / 1000)
    return Cluster(machines, bits, queue_bytes=queue, congestion="cubic", offload=True)


def parser(name: str, description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=f"./benchmarks/lab/{name}", description=description)
    made.add_argument("--program", help=argparse.SUPPRESS)
    return made


def mpirun_here(ranks: int) -> list[str]:
    """Without an emulated network."""
    return ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--quiet", "-n", str(ranks)]


def record(program: str, directory: pathlib.Path, file: str, ranks: int, *options: str) -> None:
    """Gradients and the profile of a real run into the directory, where this file shows that they are not there already."""
    if (directory / file).exists():
        return
    print("Recording a training run ...", flush=True)
    subprocess.run([*mpirun_here(ranks), program, *options, "--classes", str(MODEL_CLASSES), "--no-evaluation", "--record", str(directory)],
                   check=True, stdout=subprocess.DEVNULL)


def lines_of(text: str) -> list[dict]:
    """Lines of JSON among those that a program has written."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def first_line(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.partition("\n")[0]


def environment(name: str, **more) -> dict:
    """What results were measured with, when, and by which command: without where the program lies and where the results go."""
    model = [line.split(":", 1)[1].strip() for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    shown, words = [], iter(sys.argv[1:])
    for word in words:
        if word in ("--program", "--output"):
            next(words, None)
        else:
            shown.append(f'"{word}"' if " " in word else word)
    return {"date": datetime.date.today().isoformat(),
            "commit": first_line("git", "-C", str(pathlib.Path(__file__).resolve().parent), "describe", "--always", "--dirty"),
            "processor": f"{len(model)} x {model[0] if model else platform.processor()}", "kernel": platform.release(),
            "mpi": first_line("mpirun", "--version"), **more, "command": " ".join([f"./benchmarks/lab/{name}", *shown])}


def read(directory: pathlib.Path, result_of: Callable[[dict], object]) -> list:
    """The results written there before, none if there are none."""
    file = directory / "results.json"
    return [result_of(each) for each in json.loads(file.read_text())["results"]] if file.exists() else []


def write(directory: pathlib.Path, results: list, made_by: dict, table: str) -> None:
    """After each row, so that what an interruption cuts short is not lost."""
    file = directory / "results.json"
    runs = json.loads(file.read_text())["runs"] if file.exists() else []
    if made_by not in runs:
        runs.append(made_by)
    new = directory / "results.json.new"
    new.write_text(json.dumps({"runs": runs, "results": [dataclasses.asdict(each) for each in results]}, indent=1) + "\n")
    new.replace(file)
    (directory / "table.md").write_text(table)


def with_results(results: list, more: Iterable) -> list:
    """A new result takes the place of an older one of the same key, or comes last."""
    by_key = {each.key: each for each in results}
    return list((by_key | {each.key: each for each in more}).values())


def finish(output: pathlib.Path, table: str) -> None:
    print(f"\n{table}\nWritten to {output}: results.json, table.md")


def markdown(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def main(name: str, study: Callable[[], None]) -> None:
    """Runs the study; what a user can mend is said in one line, and a termination tidies up as an error does."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        study()
    except (RuntimeError, OSError, ValueError, subprocess.SubprocessError) as error:
        sys.exit(f"benchmarks/lab/{name}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def yielding(ranks: int) -> list[str]:
    """Where there are fewer cores than ranks, a call of MPI that blocks would spin in the way of the others."""
    return ["--mca", "mpi_yield_when_idle", "1"] if ranks > (os.cpu_count() or 1) else []
