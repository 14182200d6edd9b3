# SPDX-License-Identifier: MIT
"""benchmarks/lab/plot on run directories made here: plot_test.py run_directory, or plot_test.py pictures."""
from __future__ import annotations

import base64
import contextlib
import importlib.util
import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "lab"
sys.path.insert(0, str(EXAMPLE / "plots"))
from run_directory import read_run  # noqa: E402

LAYERS = [("conv1.weight", 9408), ("bn1.weight", 64), ("never.weight", 1000000), ("fc.bias", 10)]
PLOTS = ("loss_by_step", "loss_by_time", "accuracy_by_step", "accuracy_by_time", "sent_fraction", "step_time",
         "layers_sent")


def config(name: str = "with") -> dict[str, Any]:
    layers = [{"name": layer, "elements": elements} for layer, elements in LAYERS]
    return {"name": name, "options": {"steps": 12}, "workers": 2, "model": {"elements": 1009482, "layers": layers}}


def step(number: int, **changes: Any) -> dict[str, Any]:
    """Layer 0 arrives always, 1 in odd steps, 2 never, 3 in the first step, which takes 4 s; the others take 1 s."""
    arrived = [0] + [1] * (number % 2) + [3] * (number == 1)
    return {"step": number, "loss": 3 / number, "accuracy": 0.05 * number,
            "sent_up": 0.5 / number, "sent_down": 0.9 / number,
            "worker_seconds": 3.5 if number == 1 else 0.5, "server_seconds": 0.125, "communication_seconds": 0.375,
            "total_seconds": 4.0 if number == 1 else 1.0, "learning_rate": 0.01, "threshold": None, "arrived": arrived,
            "staleness": 0.0, **changes}


def lines_of(steps: int = 12) -> list[str]:
    entries = [step(number) for number in range(1, steps + 1)]
    entries.insert(6, {"evaluation_after_step": 6, "top1": 0.31, "top5": 0.82, "elapsed_seconds": 9.0})
    entries.append({"evaluation_after_step": steps, "top1": 0.5, "top5": 0.9, "elapsed_seconds": 3.0 + steps})
    return [json.dumps(entry) for entry in entries]


class WithDirectory(unittest.TestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.root = Path(temporary.name)

    def write(self, name: str = "run", lines: list[str] | None = None, settings: Any = None, end: str = "\n") -> Path:
        path = self.root / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps(settings or config()))
        (path / "metrics.jsonl").write_text("\n".join(lines_of() if lines is None else lines) + end)
        return path


class ReaderTest(WithDirectory):
    def test_elapsed_time_is_the_running_sum(self) -> None:
        run = read_run(self.write())
        self.assertEqual(run.steps, list(range(1, 13)))
        self.assertEqual(run.elapsed, [4.0 + number for number in range(12)])

    def test_evaluations(self) -> None:
        run = read_run(self.write())
        self.assertEqual([point["step"] for point in run.evaluations], [6, 12])
        self.assertEqual(run.evaluations[0], {"step": 6, "top1": 0.31, "top5": 0.82, "elapsed_seconds": 9.0})

    def test_layers_one_column_a_step(self) -> None:
        width, shares = read_run(self.write()).sent_share(12)
        self.assertEqual(width, 1)
        self.assertEqual(shares, [[1.0] * 12, [1.0, 0.0] * 6, [0.0] * 12, [1.0] + [0.0] * 11])

    def test_layers_of_several_steps_a_column(self) -> None:
        width, shares = read_run(self.write()).sent_share(3)  # 4 + 4 + 4
        self.assertEqual((width, shares), (4, [[1.0] * 3, [0.5] * 3, [0.0] * 3, [0.25, 0.0, 0.0]]))
        width, shares = read_run(self.root / "run").sent_share(11)  # columns of 2
        self.assertEqual((width, shares[3]), (2, [0.5] + [0.0] * 5))
        width, shares = read_run(self.write("short", lines_of(7))).sent_share(2)  # 4 + 3: the last column is smaller
        self.assertEqual((width, shares[0], shares[1]), (4, [1.0, 1.0], [0.5, 2 / 3]))

    def test_null_is_nan_where_it_may_be(self) -> None:
        run = read_run(self.write(lines=[json.dumps(step(1, loss=None))]))
        self.assertTrue(math.isnan(run.columns["loss"][0]) and math.isnan(run.columns["threshold"][0]))

    def test_cut_off_last_line_is_ignored_with_a_warning(self) -> None:
        warning = io.StringIO()
        with contextlib.redirect_stderr(warning):
            run = read_run(self.write(lines=[*lines_of(), json.dumps(step(13))[:40]], end=""))
        self.assertEqual(len(run.steps), 12)
        self.assertRegex(warning.getvalue(), r"metrics\.jsonl line 15, the last one, is cut off and was ignored")


class RefusalTest(WithDirectory):
    def refuses(self, path: Path, sentence: str) -> None:
        result = subprocess.run([sys.executable, EXAMPLE / "plots" / "plot.py", path], capture_output=True, text=True)
        self.assertNotEqual(result.returncode, 0)
        self.assertEqual(result.stderr, f"plot: {sentence}\n")
        self.assertEqual(result.stdout, "")
        self.assertFalse((path / "plots").exists())

    def test_no_directory(self) -> None:
        self.refuses(self.root / "nowhere", f"{self.root}/nowhere does not exist")
        file = self.root / "file"
        file.touch()
        self.refuses(file, f"{file} is not a directory")

    def test_missing_files(self) -> None:
        path = self.write()
        (path / "metrics.jsonl").unlink()
        self.refuses(path, f"{path}/metrics.jsonl is missing, so {path} is no run directory")
        (path / "config.json").unlink()
        self.refuses(path, f"{path}/config.json is missing, so {path} is no run directory")

    def test_config(self) -> None:
        path = self.write(settings={"name": "with", "workers": 2})
        self.refuses(path, f"{path}/config.json has no 'model', so {path} is no run directory")
        (path / "config.json").write_text("[1, 2]")
        self.refuses(path, f"{path}/config.json does not describe a run")
        (path / "config.json").write_text('{\n"name": with}')
        self.refuses(path, f"{path}/config.json line 2 is not JSON")

    def test_no_steps(self) -> None:
        path = self.write(lines=[], end="")
        self.refuses(path, f"{path}/metrics.jsonl has no steps")

    def test_lines(self) -> None:
        good = lines_of()
        missing = {key: value for key, value in step(3).items() if key != "loss"}
        for number, (bad, complaint) in enumerate([
                (good[2][:30], "is not JSON"),
                ("[]", "is neither a step nor an evaluation"),
                ('{"epoch": 3}', "is neither a step nor an evaluation"),
                (json.dumps(missing), 'has no number "loss"'),
                (json.dumps(step(3, total_seconds=None)), 'has no number "total_seconds"'),
                (json.dumps(step(3, accuracy="high")), 'has no number "accuracy"'),
                (json.dumps(step(3, step=2.5)), 'has no whole number "step"'),
                (json.dumps(step(2)), "has step 2 after step 2"),
                (json.dumps(step(4)), "has step 4 after step 2"),
                (json.dumps(step(3, arrived=None)), 'has no list of layers "arrived"'),
                (json.dumps(step(3, arrived=[4])), 'has a layer in "arrived" that is not among the 4 of the model'),
                ('{"evaluation_after_step": 2, "top1": 0.5}', 'has no number "top5"')]):
            with self.subTest(bad):
                path = self.write(f"bad{number}", [*good[:2], bad, *good[3:]])
                self.refuses(path, f"{path}/metrics.jsonl line 3 {complaint}")


class PicturesTest(WithDirectory):
    """Runs in a Python that has matplotlib."""

    def plot(self, *arguments: Any, status: int = 0) -> subprocess.CompletedProcess[str]:
        result = subprocess.run([EXAMPLE / "plot", *arguments], capture_output=True, text=True, cwd=self.root)
        self.assertEqual(result.returncode, status, result.stderr)
        return result

    def read(self, directory: Path) -> dict[str, tuple[set[str], dict[str, ElementTree.Element]]]:
        """Of each picture its texts, and its elements by id."""
        names = (*PLOTS, "lost") if (directory / "lost.svg").exists() else PLOTS
        trees = {name: ElementTree.parse(directory / f"{name}.svg") for name in names}
        return {name: ({each.text or "" for each in tree.iter("{http://www.w3.org/2000/svg}text")},
                       {each.get("id", ""): each for each in tree.iter()}) for name, tree in trees.items()}

    def points(self, element: ElementTree.Element) -> list[tuple[float, float]]:
        path = element.find(".//{http://www.w3.org/2000/svg}path")
        return [(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", path.get("d", ""))]

    def test_one_run(self) -> None:
        path = self.write()
        written = self.plot(path).stdout.split()
        self.assertEqual(written, [f"{path}/plots/{name}.svg" for name in PLOTS])
        pictures = self.read(path / "plots")
        for name, labels, ids in (
                ("loss_by_step", {"Step", "Training loss", "with"}, {"loss: with"}),
                ("loss_by_time", {"Elapsed time (s)", "Training loss"}, {"loss: with"}),
                ("accuracy_by_step", {"Step", "Accuracy (%)", "test, top-1", "test, top-5"},
                 {"accuracy: with", "top1: with", "top5: with"}),
                ("accuracy_by_time", {"Elapsed time (s)", "Accuracy (%)"}, {"top1: with", "top5: with"}),
                ("sent_fraction", {"Step", "Sent up (% of the model)", "Sent down (% of the model)"},
                 {"sent_up: with", "sent_down: with"}),
                ("step_time", {"Step", "Time a step (s)", "worker", "communication", "server", "\u2191 4 s"},
                 {"worker_seconds", "communication_seconds", "server_seconds"}),
                ("layers_sent", {"Step", "Elements", *(layer for layer, _ in LAYERS)}, {"layers: with"})):
            with self.subTest(name):
                self.assertLessEqual(labels, pictures[name][0])
                self.assertLessEqual(ids, set(pictures[name][1]))

        by_step = self.points(pictures["loss_by_step"][1]["loss: with"])
        by_time = self.points(pictures["loss_by_time"][1]["loss: with"])
        self.assertEqual(len(by_step), 12)
        # As 3 / step: three quarters of the way from the first to the fourth is four ninths of that of the loss.
        self.assertAlmostEqual((by_step[1][1] - by_step[0][1]) / (by_step[2][1] - by_step[0][1]), 0.75, places=3)
        # From 0 the first step ends at 4 s, the next at 5 s.
        to_points = (by_time[-1][0] - by_time[0][0]) / 11
        axis = re.findall(r"M (\S+) ", pictures["loss_by_time"][1]["patch_2"][0].get("d", ""))[0]
        self.assertAlmostEqual((by_time[0][0] - float(axis)) / to_points, 4, places=3)
        self.assertEqual(len(self.points(pictures["accuracy_by_step"][1]["top1: with"])), 2)
        self.assertEqual(self.filled_cells(pictures["layers_sent"][1]["layers: with"]), [12, 6, 0, 1])
        self.assertEqual(self.from_the_top(path / "plots" / "layers_sent.svg"), [layer for layer, _ in LAYERS])

    def from_the_top(self, file: Path) -> list[str]:
        """The names of layers as they stand under each other."""
        texts = [each for each in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")
                 if each.text in dict(LAYERS)]
        place = re.compile(r"rotate\(\S+ \S+ (\S+?)\)|translate\(\S+ (\S+?)\)")
        places = [place.search(each.get("transform", "")) for each in texts]
        heights = [float(found[1] or found[2]) for found in places]
        return [each.text for _, each in sorted(zip(heights, texts), key=lambda pair: pair[0])]

    def filled_cells(self, image: ElementTree.Element) -> list[int]:
        from matplotlib.image import imread

        data = image.get("{http://www.w3.org/1999/xlink}href", "").split(",", 1)[1]
        pixels = imread(io.BytesIO(base64.b64decode(data)))
        rows = [sum(1 for pixel in row if pixel[0] < 0.9) for row in pixels]
        return rows[::-1] if "scale(1 -1)" in image.get("transform", "") else rows

    def test_several_runs(self) -> None:
        first, second, third = (self.write(name, lines_of(steps), config(title)) for name, steps, title in
                                (("a", 12, "with"), ("b", 400, "without"), ("c", 12, "with")))
        self.plot(first, second, third)
        pictures = self.read(self.root / "plots")
        names = ("with (a)", "without", "with (c)")
        for name, kinds in (("loss_by_step", ["loss"]), ("accuracy_by_time", ["accuracy", "top1", "top5"]),
                            ("sent_fraction", ["sent_up", "sent_down"]),
                            ("step_time", ["worker_seconds", "server_seconds"]), ("layers_sent", ["layers"])):
            with self.subTest(name):
                texts, ids = pictures[name]
                self.assertLessEqual(set(names), texts)
                self.assertLessEqual({f"{kind}: {run}" for kind in kinds for run in names}, set(ids))
        styles = {pictures["loss_by_step"][1][f"loss: {run}"][0].get("style") for run in names}
        self.assertEqual(len(styles), 3)
        self.assertLessEqual({"1.00 s", "0.50", "0.38"}, pictures["step_time"][0])  # medians
        self.assertIn("Elapsed time (min)", pictures["loss_by_time"][0])
        self.assertIn("Steps in which at least one worker sent the layer (%)", pictures["layers_sent"][0])
        # 400 steps in columns of 2: layer 1 arrives in one of two, so all its cells are filled.
        self.assertEqual(self.filled_cells(pictures["layers_sent"][1]["layers: without"]), [200, 200, 0, 1])

    def test_a_run_that_lost_some_beside_one_that_did_not(self) -> None:
        lines = [json.dumps(step(number, lost_up=0.1 * number, lost_down=0.05)) for number in range(1, 5)]
        self.plot(self.write("a", lines, config("lossy")), self.write("b"))
        texts, ids = self.read(self.root / "plots")["lost"]
        self.assertLessEqual({"Missing up (% of the sent)", "Missing down (% of the sent)", "lossy"}, texts)
        up = [y for _, y in self.points(ids["lost_up: lossy"])]
        self.assertAlmostEqual((up[3] - up[0]) / (up[1] - up[0]), 3, places=3)
        self.assertEqual(len({y for _, y in self.points(ids["lost_down: lossy"])}), 1)

    def test_png_of_a_run_that_was_just_begun(self) -> None:
        from matplotlib.image import imread

        path = self.write(lines=[json.dumps(step(1, loss=None, sent_down=0))])
        self.plot(path, "--format", "png", "--output", self.root / "out")
        for name in PLOTS:
            with self.subTest(name):
                pixels = imread(self.root / "out" / f"{name}.png")
                self.assertGreater((pixels[:, :, :3] < 0.5).all(axis=2).sum(), 500)  # ink
                self.assertGreater((pixels[:, :, :3] == 1).all(axis=2).sum(), 10000)  # paper

    def test_tensorboard(self) -> None:
        path = self.write()
        if importlib.util.find_spec("tensorboardX") is None:
            result = self.plot(path, "--tensorboard", status=1)
            self.assertIn("--tensorboard needs the Python package tensorboardX: install it with", result.stderr)
            return
        for _ in range(2):  # a second call replaces the first one's file
            self.assertEqual(self.plot(path, "--tensorboard").stdout.split()[-1], f"{path}/tensorboard")
        (file,) = (path / "tensorboard").iterdir()
        for tag in (b"train/loss", b"test/top1", b"sent/up", b"seconds/worker"):
            self.assertIn(tag, file.read_bytes())

    def test_output_that_cannot_be_written(self) -> None:
        path = self.write()
        (path / "plots").touch()
        self.assertEqual(self.plot(path, status=1).stderr, f"plot: {path}/plots cannot be written: File exists\n")


def use_python_with_matplotlib() -> None:
    """Goes on in the system's Python where this one lacks matplotlib; exits with 77, a skip for ctest, if both do."""
    if importlib.util.find_spec("matplotlib") is not None:
        return
    system = "/usr/bin/python3"
    check = "import importlib.util as u, sys; sys.exit(u.find_spec('matplotlib') is None)"
    if os.path.exists(system) and subprocess.run([system, "-c", check]).returncode == 0:
        os.execv(system, [system, *sys.argv])
    print("skipped: no matplotlib; tools/install_packages plots installs it")
    sys.exit(77)


if __name__ == "__main__":
    part = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    tests = {"run_directory": ["ReaderTest", "RefusalTest"], "pictures": ["PicturesTest"]}.get(part)
    if tests is None:
        sys.exit(__doc__)
    if part == "pictures":
        sys.argv.insert(1, part)
        use_python_with_matplotlib()
        sys.argv.pop(1)
    unittest.main(defaultTest=tests)
