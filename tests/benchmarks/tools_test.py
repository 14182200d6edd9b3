# SPDX-License-Identifier: MIT
"""What the tools of benchmarks/ make of measurements: tools_test.py [BUILD]; BUILD has real programs to run."""

import contextlib
import io
import json
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks/tools"))
sys.dont_write_bytecode = True

import digest  # noqa: E402
import ratios  # noqa: E402
import run  # noqa: E402
import suite  # noqa: E402

BUILD = pathlib.Path(sys.argv.pop(1)) if len(sys.argv) > 1 else None

# Stands for a program of benchmarks: each call takes the next of the times in its file.
FAKE = f"""#!{sys.executable}
import json, pathlib, re, sys
here = pathlib.Path(__file__)
options = dict(each.removeprefix("--benchmark_").split("=", 1) for each in sys.argv[1:])
times = json.loads(here.with_suffix(".times").read_text())
if times == "fails":
    sys.exit("it broke")
entries = []
for name, rounds in times.items():
    if not re.search(options.get("filter", ""), name):
        continue
    seconds = rounds.pop(0)
    entries += [{{"name": name, "run_name": name, "run_type": "iteration", "repetitions": 3, "iterations": 7,
                  "real_time": seconds * 1e3, "cpu_time": 0, "time_unit": "ms", "seen": 42.0}}
                for _ in range(int(options["repetitions"]))]
    entries.append({{"name": name + "_median", "run_name": name, "run_type": "aggregate", "real_time": 1, "time_unit": "ms"}})
here.with_suffix(".times").write_text(json.dumps(times))
pathlib.Path(options["out"]).write_text(json.dumps({{"context": {{"compiler": "fake", "date": "2026"}}, "benchmarks": entries}}))
"""


def benchmark(*seconds: float) -> suite.Benchmark:
    return suite.Benchmark([[each] for each in seconds], {})


class Directory(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.path = pathlib.Path(directory.name)

    def build(self, name: str, programs: dict) -> pathlib.Path:
        """A build directory whose programs take these times, round by round."""
        build = self.path / name
        (build / "benchmarks").mkdir(parents=True)
        (build / "CMakeCache.txt").touch()
        for program, times in programs.items():
            path = build / "benchmarks" / f"benchmark_{program}"
            path.write_text(FAKE)
            path.chmod(0o755)
            path.with_suffix(".times").write_text(json.dumps(times))
        return build


class Suite(Directory):
    def test_later_rounds_run_what_is_asked_for_again_and_repetitions_are_kept(self):
        build = self.build("a", {"one": {"x/1/real_time": [1.0, 3.0], "x/10/iterations:1/repeats:1": [1.0]}, "one_avx2": {"x/1": [3.0, 4.0]},
                                 "two": {"x/1": [5.0]}})
        with mock.patch.object(suite, "cpu_flags", return_value=suite.VARIANTS["_avx2"]):
            contexts, results = suite.measure(build, quick=False, rounds=2, limited={"one": {"x/1"}})
        medians = {name: {key: each.medians() for key, each in measured.items()} for name, measured in results.items()}
        self.assertEqual(medians, {"one": {"x/1": [1.0, 3.0], "x/10": [1.0]}, "one_avx2": {"x/1": [3.0, 4.0]},
                                   "two": {"x/1": [5.0]}})
        x = results["one"]["x/1"]
        self.assertEqual((x.rounds, x.seconds(), x.counters), ([[1.0] * 3, [3.0] * 3], 2.0, {"seen": 42.0}))
        self.assertEqual(contexts["one"]["compiler"], "fake")

    def test_what_no_limit_names_is_measured_once(self):
        build = self.build("a", {name: {"x": [1.0] * 2, "y": [1.0] * 2} for name in ("one", "one_avx2", "one_avx2_o2", "two", "two_avx2")})
        with mock.patch.object(suite, "cpu_flags", return_value=suite.VARIANTS["_avx2"]):
            for quick, of_variants in ((True, ["x"]), (False, ["x", "y"])):
                _, results = suite.measure(build, quick=quick, rounds=1, limited={"one": {"x"}})
                self.assertEqual({name: list(measured) for name, measured in results.items()},
                                 {"one": ["x", "y"], "one_avx2": of_variants, "one_avx2_o2": of_variants, "two_avx2": ["x", "y"]})

    def test_what_is_written_is_read_again(self):
        results = {"one": {"x": suite.Benchmark([[1.0, 2.0]], {"sent_percent": 5.0})}}
        suite.write(self.path / "new/results.json", {"cpu": "a"}, results, {"compile_cost": {"g++": {}}})
        self.assertEqual(suite.read(self.path / "new/results.json"), ({"cpu": "a"}, results, {"compile_cost": {"g++": {}}}))

    def test_a_program_that_fails_says_why(self):
        build = self.build("a", {"one": "fails"})
        with self.assertRaisesRegex(RuntimeError, "benchmark_one ended with 1: it broke"):
            suite.measure(build, quick=True, rounds=1, limited={})


class Ratios(Directory):
    DEFINED = [ratios.Definition("half", "p", "a", "b", {"": 0.5}), ratios.Definition("fast", "q", "a", "2us", {"": 1.0})]

    def test_the_median_of_the_rounds_and_their_spread(self):
        results = {"p": {"a": benchmark(1, 3, 2), "b": benchmark(4, 4, 5)}, "q": {"a": benchmark(3e-6, 1e-6, 1e-6)}}
        half, fast = ratios.of(self.DEFINED, results)
        self.assertEqual(half, ratios.Ratio("half", 0.4, 0.25, 0.75, 0.5))
        self.assertEqual((round(fast.value, 9), round(fast.high, 9)), (0.5, 1.5))
        self.assertEqual(half.line(), "ratio half 0.400 limit 0.5 ok")
        self.assertEqual(ratios.Ratio("half", 0.51, 0.25, 0.75, 0.5).line(), "ratio half 0.510 limit 0.5 over")

    def test_each_way_to_build_has_its_own_and_an_instruction_set_may_have_a_limit_of_its_own(self):
        (self.path / "ratios.txt").write_text("half p a b 1.10,sse2:1.17\n")
        results = {"p" + suffix: {"a": benchmark(number), "b": benchmark(8)}
                   for suffix, number in (("", 1), ("_avx512", 2), ("_o2", 4), ("_avx512_o2", 8))}
        found = ratios.of(ratios.definitions(self.path / "ratios.txt"), results)
        self.assertEqual([(each.name, each.value, each.limit) for each in found],
                         [("half/sse2", 0.125, 1.17), ("half/avx512", 0.25, 1.1), ("half/sse2_o2", 0.5, 1.17), ("half/avx512_o2", 1.0, 1.1)])

    def test_a_benchmark_that_is_not_there_is_named(self):
        with self.assertRaisesRegex(ValueError, "half asks for b, which p"):
            ratios.of(self.DEFINED[:1], {"p": {"a": benchmark(1)}})

    def test_broken_is_what_is_over_in_every_round(self):
        accepted = [ratios.Ratio("known", 1.5, 1.4, 1.6, 1.0), ratios.Ratio("held", 0.9, 0.8, 0.95, 1.0)]
        for name, low, high, is_broken in (("new", 0.9, 1.5, False), ("new", 1.01, 1.5, True), ("held", 0.99, 1.2, False),
                                           ("held", 1.05, 1.2, True), ("known", 1.5, 1.9, False),
                                           ("known", 1.61, 1.9, True)):
            with self.subTest(name=name, low=low):
                found = ratios.broken([ratios.Ratio(name, (low + high) / 2, low, high, 1.0)], accepted)
                self.assertEqual(len(found), is_broken)
                self.assertTrue(all(name in sentence for sentence in found))

    def test_the_table_is_read_as_it_was_written(self):
        some = [ratios.Ratio("half/sse2", 0.4, 0.25, 0.75, 0.5), ratios.Ratio("fast", 3, 2.5, 4, 5)]
        path = self.path / "ratios.txt"
        self.assertEqual(ratios.read_table(path), [])
        path.write_text(ratios.table(some, ["a machine"]))
        self.assertEqual(ratios.read_table(path), some)

    def test_those_of_the_project_are_well_formed_and_its_table_has_them(self):
        defined = ratios.definitions(ROOT / "benchmarks/ratios.txt")
        self.assertEqual(len({each.name for each in defined}), len(defined))
        kept = {each.name.partition("/")[0] for each in ratios.read_table(run.TABLE)}
        # A whole run adds what including costs, whose limit is in compile_cost.py.
        self.assertEqual(kept, {each.name for each in defined} | {"include_over_std"})


@unittest.skipIf(BUILD is None, "no build with programs to run was given")
class Programs(Directory):
    def test_the_digest_of_a_program(self):
        out = io.StringIO()
        command = ["run", "--build", str(BUILD), "--output", str(self.path / "results.json"), "--quick", "--only", "threshold_search"]
        with mock.patch("sys.argv", command), contextlib.redirect_stdout(out):
            self.assertEqual(run.main(), 0)
        self.assertRegex(out.getvalue(), r"(?m)^ratio search_grows_to_100000 [0-9.]+ limit 15 (ok|over)$")
        environment, results, _ = suite.read(self.path / "results.json")
        self.assertRegex(environment["flags"]["threshold_search"], "-O")
        self.assertEqual(len(results["threshold_search"]["search/10"].rounds[0]), 3)

    def test_every_ratio_and_every_table_finds_its_benchmarks(self):
        # That they run; what they take is no test's business.
        results = {}
        for name, path in suite.programs(BUILD).items():
            _, measured = suite.run(path, True, 1, ["--benchmark_filter=-^quality", "--benchmark_min_time=0.0001"])
            results[name] = {benchmark: suite.Benchmark([times], counters) for benchmark, (times, counters) in measured.items()}
        defined = ratios.definitions(ROOT / "benchmarks/ratios.txt")
        self.assertEqual({each.name.partition("/")[0] for each in ratios.of(defined, results)},
                         {each.name for each in defined})
        for name in ("lamina/5", "top_k/5", "one_bit"):
            results["methods"][f"quality_drawn/{name}"] = suite.Benchmark([[1]], {"sent_percent": 5, "relative_error": 0.5, "steps": 8})
        self.assertEqual(len(digest.tables(results, {})), 1 + len(digest.QUESTIONS))


class Kept(unittest.TestCase):
    RESULTS = ROOT / "benchmarks/results"

    def test_the_tables_are_those_of_the_numbers(self):
        environment, results, more = suite.read(self.RESULTS / "results.json")
        kept = (self.RESULTS / "table.md").read_text()
        text = digest.text(environment, results, more)
        self.assertIn("\n".join(digest.about(environment)), text)
        for title, table in digest.tables(results, more).items():
            self.assertIn(f"\n\n## {title}\n\n{table}\n", text)
            self.assertIn(f"\n\n## {title}\n\n{table}\n", kept)


if __name__ == "__main__":
    unittest.main()
