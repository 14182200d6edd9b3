# SPDX-License-Identifier: MIT
"""Which of two builds is quicker, beyond what noise can explain; benchmarks/compare_builds has the help."""

import argparse
import dataclasses
import pathlib
import statistics
import subprocess
import sys

import command
import digest
import suite

ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Difference:
    """Of one benchmark in both builds: how long B takes as a multiple of A, round by round."""

    name: str
    first_seconds: float
    rounds: tuple[float, ...]
    verdict: str

    @property
    def ratio(self) -> float:
        return statistics.median(self.rounds)


def difference(name: str, first: suite.Benchmark, second: suite.Benchmark) -> Difference:
    """B is slower if even its quickest round took longer than A's slowest, quicker the other way round, and otherwise the
    same: with seven rounds each, noise alone brings that about once in 1,700 benchmarks."""
    a, b = first.medians(), second.medians()
    verdict = "slower" if min(b) > max(a) else "quicker" if max(b) < min(a) else "same"
    return Difference(name, first.seconds(), tuple(y / x for x, y in zip(a, b, strict=True)), verdict)


def measure(builds: tuple[pathlib.Path, pathlib.Path], rounds: int, quick: bool, only: list[str] | None,
            pattern: str, say) -> list[Difference]:
    """Both builds take turns, process by process; who begins changes from round to round."""
    both = [suite.programs(build, only) for build in builds]
    names = [name for name in both[0] if name in both[1]]
    measured: tuple[dict, dict] = ({}, {})
    for number in range(rounds):
        for name in names:
            for side in ((0, 1) if number % 2 == 0 else (1, 0)):
                say(f"{name} of {'AB'[side]}, round {number + 1} of {rounds}")
                _, times = suite.run(both[side][name], quick, 3, [f"--benchmark_filter={pattern}"])
                for benchmark, (seconds, _) in times.items():
                    measured[side].setdefault(f"{name}: {benchmark}", suite.Benchmark([], {})).rounds.append(seconds)
    return [difference(name, measured[0][name], measured[1][name]) for name in measured[0] if name in measured[1]]


def build_of(what: str, say) -> pathlib.Path:
    """A build directory as it is; a commit, checked out next to the working tree and built there."""
    if (pathlib.Path(what) / "benchmarks").is_dir() and (pathlib.Path(what) / "CMakeCache.txt").exists():
        return pathlib.Path(what)

    def done(*arguments: str) -> str:
        return subprocess.run(arguments, check=True, capture_output=True, text=True).stdout.strip()

    try:
        commit = done("git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", f"{what}^{{commit}}")
    except subprocess.CalledProcessError:
        raise ValueError(f"'{what}' is neither a build directory nor a commit") from None
    tree = ROOT / "build/compare" / commit[:12]
    try:
        if not (tree / ".git").exists():
            done("git", "-C", str(ROOT), "worktree", "prune")
            done("git", "-C", str(ROOT), "worktree", "add", "--detach", str(tree), commit)
        say(f"building {what}")
        done("cmake", "-S", str(tree), "-B", str(tree / "build"), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
             "-DLAMINA_BUILD_TESTS=OFF", "-DLAMINA_BUILD_EXAMPLES=OFF", "-DLAMINA_BUILD_BENCHMARKS=ON")
        done("cmake", "--build", str(tree / "build"), "--parallel", "2")
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{what}: {' '.join(error.cmd[:3])} failed:\n{(error.stdout + error.stderr)[-2000:]}") from None
    return tree / "build"


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/compare_builds", description="Runs the benchmarks of two builds in turn, and "
                                     "says which are slower or quicker by more than the rounds differ. Ends with 1 if any "
                                     "is slower.")
    parser.add_argument("first", metavar="A", help="a commit, or a build directory")
    parser.add_argument("second", metavar="B", help="the same")
    parser.add_argument("--only", action="append", metavar="PROGRAM", help="this program alone; may be repeated")
    parser.add_argument("--filter", default="-^quality", metavar="REGEX", help="of its benchmarks those that match")
    parser.add_argument("--rounds", type=int, default=7, help="(7)")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    given = parser.parse_args()
    if given.rounds < 3:
        parser.error("--rounds: at least three, or nothing can be distinguished from noise")

    builds = (build_of(given.first, command.say), build_of(given.second, command.say))
    differences = measure(builds, given.rounds, given.quick, given.only, given.filter,
                          command.say)
    command.say("")
    if not differences:
        raise ValueError("no benchmark is in both builds")
    rows = [[each.name, digest.seconds(each.first_seconds), f"{each.ratio:.3f}", f"{min(each.rounds):.3f}",
             f"{max(each.rounds):.3f}", each.verdict] for each in differences]
    print(digest.grid([f"A: {given.first}, B: {given.second}", "A", "B / A", "lowest", "highest", "B is"], rows))
    return 1 if any(each.verdict == "slower" for each in differences) else 0


if __name__ == "__main__":
    command.run("compare_builds", main)
