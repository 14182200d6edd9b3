# SPDX-License-Identifier: MIT
"""Collectives alone: seconds of an all-reduce over an emulated cluster by each algorithm of lamina::collectives, by MPI and by gloo."""

import argparse
import json
import os
import pathlib
import tempfile
import time

import torch_ranks
from cluster import Cluster
from emulation import EMULATION, cluster_of, require_same_emulation
from experiment import commit
from overlap_rows import all_reduce_seconds
from overlap_runs import HERE, LONGEST_RUN_SECONDS, mpirun, python_with_torch
from settings import RATES

KIB, MIB = 1 << 10, 1 << 20
SIZES = [4 * KIB, 64 * KIB, MIB, 8 * MIB]
LONG_SIZES = [4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 102_228_128]
# Numbers of Open MPI's coll_tuned_allreduce_algorithm.
TUNED = {"MPI_Allreduce, recursive doubling": 3, "MPI_Allreduce, ring": 4, "MPI_Allreduce, Rabenseifner": 6}
RIVALS = ("MPI_Allreduce", *TUNED, "MPI_Iallreduce", "gloo")
TIE_SHARE = 0.02
MARK = " **!**"


def _lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def _over_mpi(program: str, cluster: Cluster, options: list[str], mca: list[str]) -> list[dict]:
    return _lines(mpirun(cluster, list(range(cluster.machines)), [*mca, program, *options]))


def _over_gloo(python: str, cluster: Cluster, options: list[str]) -> list[dict]:
    with tempfile.TemporaryDirectory() as directory:
        output = pathlib.Path(directory) / "lines.json"
        program = [python, str(HERE / "gloo_alone.py"), *options, "--output", str(output)]
        torch_ranks.run(cluster.machines, cluster.address(0), "eth0", lambda rank: cluster.command_on(rank, *program),
                        LONGEST_RUN_SECONDS)
        return _lines(output.read_text())


def measure(program: str, python: str | None, ranks: int, rate: str, sizes: list[int], seconds: float) -> list[dict]:
    options = ["--sizes", *map(str, sizes), "--seconds", str(seconds)]
    with cluster_of(ranks, rate) as cluster:
        found = _over_mpi(program, cluster, options, [])
        for name, number in TUNED.items():
            tuned = ["--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allreduce_algorithm", str(number)]
            found += [{**line, "way": name} for line in _over_mpi(program, cluster, [*options, "--ways", "MPI_Allreduce"], tuned)]
        if python is not None:
            found += _over_gloo(python, cluster, options)
    of_all = {"ranks": ranks, "rate": rate, "load": os.getloadavg()[0], "commit": commit(), **EMULATION,
              "packet_steering": cluster.keeps_order}
    return [{**of_all, **line, "within_burst": is_within_burst(ranks, rate, line)} for line in found]


def is_within_burst(ranks: int, rate: str, line: dict) -> bool:
    """Whether it took less than its bytes over the goodput, as a link lets none pass but those of its full bucket: the seconds are then not
    of the rate."""
    sent = line["bytes"] / (2 if "bfloat16" in line["way"] else 1)
    return line["seconds"] < all_reduce_seconds(ranks, rate, sent)


def size_name(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size % KIB else f"{size // MIB} MiB" if size % MIB == 0 else f"{size // KIB} KiB"


def _milliseconds(seconds: float) -> str:
    """Three digits, and all of those before the point."""
    return f"{1e3 * seconds:.3g}" if seconds < 0.9995 else f"{1e3 * seconds:,.0f}"


def table(results: list[dict]) -> str:
    """A table for each cluster: a row a way, milliseconds by size; where even the best of ours is slower than the best rival it says so, and
    which seconds are those of a burst."""
    text = ""
    for ranks, rate in dict.fromkeys((each["ranks"], each["rate"]) for each in results):
        here = [each for each in results if (each["ranks"], each["rate"]) == (ranks, rate)]
        sizes = sorted({each["bytes"] for each in here})
        seconds = {(each["way"], each["bytes"]): each["seconds"] for each in here}
        cells = {(each["way"], each["bytes"]): _milliseconds(each["seconds"]) + (MARK if each["within_burst"] else "") for each in here}
        text += f"\n**{ranks} ranks, {rate}**, ms\n\n| | " + " | ".join(map(size_name, sizes)) + " |\n|---|" + "---:|" * len(sizes) + "\n"
        names = list(dict.fromkeys(each["way"] for each in here))
        for name in names:
            text += f"| {name} | " + " | ".join(cells.get((name, size), "") for size in sizes) + " |\n"
        text += "| the best of ours over the best rival | " + " | ".join(_judged(seconds, names, size) for size in sizes) + " |\n"
        if any(each["within_burst"] for each in here):
            text += f"\n{MARK.strip()}: less than the bytes over the goodput; a burst passes a link at once\n"
    return text


def _judged(seconds: dict, names: list[str], size: int) -> str:
    ours = [seconds[name, size] for name in names if name not in RIVALS and "bfloat16" not in name and (name, size) in seconds]
    rivals = [seconds[name, size] for name in names if name in RIVALS and (name, size) in seconds]
    if not ours or not rivals:
        return ""
    ratio = min(ours) / min(rivals)
    return f"{'**loses**, ' if ratio > 1 + TIE_SHARE else ''}{ratio:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="./benchmarks/network/overlap --alone", description=__doc__)
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rates", nargs="+", choices=RATES, default=["1 Gb/s"])
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="bytes of float")
    parser.add_argument("--long", action="store_true", help="2, 3, 4, 5 and 8 ranks, 4 KiB to 102 MB")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each size, all ways together")
    parser.add_argument("--budget-minutes", type=float, help="begin no cluster later than so many minutes from now")
    parser.add_argument("--torch-python", help="a python3 whose gloo is measured; the system's without it")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/overlap"))
    parser.add_argument("--program", help=argparse.SUPPRESS)
    parser.add_argument("--alone-program", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    workers, sizes = ([2, 3, 4, 5, 8], LONG_SIZES) if given.long else (given.workers, given.sizes)
    program = given.alone_program or str(pathlib.Path(given.program).with_name("collectives_alone"))
    python = python_with_torch(given.torch_python)
    file, begin = given.output / "alone.json", time.monotonic()
    results = json.loads(file.read_text()) if file.exists() else []
    require_same_emulation(given.output, results)
    for rate in given.rates:
        for ranks in workers:
            if given.budget_minutes and time.monotonic() - begin > 60 * given.budget_minutes:
                print("The minutes are over.")
                break
            new = measure(program, python, ranks, rate, sizes, given.seconds)
            results = [each for each in results if (each["ranks"], each["rate"]) != (ranks, rate)] + new
            file.write_text(json.dumps(results, indent=1) + "\n")
            (given.output / "alone.md").write_text(table(results))
            print(table(new), flush=True)
