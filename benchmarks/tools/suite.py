# SPDX-License-Identifier: MIT
"""Runs the programs of benchmarks, and keeps what they measured."""

import dataclasses
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import tempfile
from collections.abc import Container

# What the name of a program may end in, for how it was built, and what the machine must have to run it: an instruction set,
# and -O2 in place of -O3.
_AVX2, _AVX512 = {"avx2", "fma", "bmi2"}, {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
VARIANTS = {"_avx2": _AVX2, "_avx512": _AVX512, "_o2": set(), "_avx2_o2": _AVX2, "_avx512_o2": _AVX512}
SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclasses.dataclass
class Benchmark:
    """What one benchmark took: a list of seconds for each round, which is a process of its own, and its last counters."""

    rounds: list[list[float]]
    counters: dict[str, float]

    def medians(self) -> list[float]:
        return [statistics.median(times) for times in self.rounds]

    def seconds(self) -> float:
        return statistics.median(self.medians())


Results = dict[str, dict[str, Benchmark]]  # by program, then by benchmark


def cpu_flags() -> set[str]:
    found = re.search(r"^flags\s*:(.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return set(found.group(1).split()) if found else set()


def programs(build: pathlib.Path, only: list[str] | None = None) -> dict[str, pathlib.Path]:
    """The programs of a build that this machine can run, by name. Raises ValueError for a name in `only` that is none."""
    flags = cpu_flags()
    found = {}
    for path in sorted((build / "benchmarks").glob("benchmark_*")):
        name = path.name.removeprefix("benchmark_")
        if os.access(path, os.X_OK) and VARIANTS.get(variant(name), set()) <= flags:
            found[name] = path
    if not found:
        raise ValueError(f"there are no benchmarks in {build}/benchmarks")
    for name in only or []:
        if name not in found:
            raise ValueError(f"there is no program of benchmarks '{name}' to run here; there are {', '.join(found)}")
    return {name: path for name, path in found.items() if not only or name in only}


def run(program: pathlib.Path, quick: bool, repetitions: int, arguments: list[str] = (),
        gradients: pathlib.Path | None = None) -> tuple[dict, dict]:
    """One process: its context, and {benchmark: (seconds of each repetition, counters)}."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("LAMINA_BENCHMARK_")}
    if quick:
        environment["LAMINA_BENCHMARK_QUICK"] = "1"
    if gradients is not None:
        environment["LAMINA_BENCHMARK_GRADIENTS"] = str(gradients)
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [str(program), f"--benchmark_out={out.name}", "--benchmark_out_format=json",
                   f"--benchmark_repetitions={repetitions}", f"--benchmark_min_time={0.02 if quick else 0.1}", *arguments]
        done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        text = pathlib.Path(out.name).read_text()
    if done.returncode != 0:
        raise RuntimeError(f"{program.name} ended with {done.returncode}: {done.stderr.strip()}")
    if not text.strip():  # nothing matched a filter
        return {}, {}
    report = json.loads(text)
    measured: dict[str, tuple[list[float], dict]] = {}
    for each in report["benchmarks"]:
        if each.get("run_type") != "iteration":
            continue
        if each.get("error_occurred"):
            raise RuntimeError(f"{program.name}, {each['name']}: {each.get('error_message')}")
        name = re.sub(r"/(iterations|repeats):\d+|/(real|manual)_time", "", each["run_name"])
        times, _ = measured.setdefault(name, ([], counters_of(each)))
        times.append(each["real_time"] * SECONDS[each["time_unit"]])
    return report["context"], measured


def counters_of(entry: dict) -> dict[str, float]:
    known = {"family_index", "per_family_instance_index", "repetitions", "repetition_index", "threads", "iterations",
             "real_time", "cpu_time"}
    return {key: value for key, value in entry.items() if isinstance(value, (int, float)) and key not in known}


def variant(program: str) -> str:
    """What the name of a program says of how it was built: nothing, or one of VARIANTS."""
    return max((suffix for suffix in VARIANTS if program.endswith(suffix)), key=len, default="")


def variant_title(suffix: str) -> str:
    """A variant in a table: sse2 where the name of the program says of no other instruction set."""
    return (suffix if suffix.startswith("_avx") else "_sse2" + suffix)[1:]


def base(program: str) -> str:
    """The name of a program without its variant."""
    return program.removesuffix(variant(program))


def widest(names: Container[str], program: str) -> str | None:
    """Of these names that of the program's variant with the widest registers, at -O3."""
    return next((name for name in (f"{program}_avx512", f"{program}_avx2", program) if name in names), None)


def measure(build: pathlib.Path, quick: bool, rounds: int, limited: dict[str, set[str]], only: list[str] | None = None,
            gradients: pathlib.Path | None = None, say=lambda text: None) -> tuple[dict, Results]:
    """All programs, one after the other: their contexts and results. `limited` are the benchmarks that have a limit, by program: they
    alone are run after the first round and, if it is to be quick, in variants. A program without one is run in its widest variant."""
    contexts: dict[str, dict] = {}
    results: Results = {}
    for number in range(rounds):
        found = programs(build, only)
        for name, path in found.items():
            of_limits = limited.get(base(name))
            if not of_limits and (number > 0 or widest(found, base(name)) != name):
                continue
            arguments = []
            if of_limits and (number > 0 or quick and variant(name)):
                arguments = [f"--benchmark_filter=^({'|'.join(map(re.escape, sorted(of_limits)))})(/real_time)?$"]
            say(f"{name}, round {number + 1} of {rounds}")
            context, measured = run(path, quick, 3, arguments, gradients)
            contexts.setdefault(name, context)
            for benchmark, (times, counters) in measured.items():
                kept = results.setdefault(name, {}).setdefault(benchmark, Benchmark([], {}))
                kept.rounds.append(times)
                kept.counters = counters
    return contexts, results


def environment(root: pathlib.Path, contexts: dict) -> dict:
    """The machine, the compiler, the flags and the commit."""
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    model = re.search(r"^model name\s*:\s*(.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    memory = re.search(r"^MemTotal:\s*(\d+)", _read("/proc/meminfo"), re.MULTILINE)
    first = next(iter(contexts.values()), {})
    return {
        "cpu": model.group(1) if model else platform.machine(),
        "cores": os.cpu_count(),
        "caches": ", ".join(f"{each['type'][0]}{each['level']} {each['size'] // 1024} KiB"
                            for each in first.get("caches", [])),
        "memory_gib": round(int(memory.group(1)) / 2**20, 1) if memory else None,
        "system": f"{platform.system()} {platform.release()}",
        "compiler": first.get("compiler", ""),
        "flags": {name: context.get("flags", "") for name, context in contexts.items()},
        "commit": git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else ""),
        "date": first.get("date", ""),
    }


def write(path: pathlib.Path, about: dict, results: Results, more: dict) -> None:
    programs_ = {name: {benchmark: dataclasses.asdict(each) for benchmark, each in benchmarks.items()}
                 for name, benchmarks in results.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": about, "programs": programs_, **more}, indent=1) + "\n")


def read(path: pathlib.Path) -> tuple[dict, Results, dict]:
    """What write() wrote: environment, results, and the rest."""
    content = json.loads(path.read_text())
    results = {name: {benchmark: Benchmark(**each) for benchmark, each in benchmarks.items()}
               for name, benchmarks in content.pop("programs").items()}
    return content.pop("environment"), results, content


def _read(path: str) -> str:
    try:
        return pathlib.Path(path).read_text()
    except OSError:
        return ""
