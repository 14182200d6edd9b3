# SPDX-License-Identifier: MIT
"""What page_numbers.py notices, on pages and results made up here, and on those of the repository."""

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

import page_numbers

ROOT = pathlib.Path(__file__).resolve().parents[2]
TABLE = """## At 1 Gb/s

| row | step s | waited s | sent |
|---|---:|---:|---:|
| everything | 2.057 | 0.719 | 100.00 % |
| dropped | 0.531 | 0.005 | 5.20 % |
| | -74.2 % | | |
"""
MEASURED = {"steps": 6, "medians": {"DDP": {"step": 0.98586, "bytes": 107321018.0}, "lamina": {"step": 0.37145, "share": 0.0523}}}


class Pages(unittest.TestCase):
    def setUp(self) -> None:
        self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        results = self.root / "benchmarks/results"
        results.mkdir(parents=True)
        (results / "table.md").write_text(TABLE)
        (results / "measured.json").write_text(json.dumps(MEASURED))
        (self.root / "docs/decisions").mkdir(parents=True)

    def problems(self, text: str) -> list[str]:
        return self.found(text).problems

    def found(self, text: str) -> page_numbers.Page:
        page = self.root / "docs" / "page.md"
        page.write_text(text)
        return page_numbers.check(self.root, page)

    def test_a_claim_wants_a_mark(self) -> None:
        for claim in ("It takes 1.2 s.", "It takes 84 to 98 % less.", "It is 3 times as quick.", "It takes 0.86 of that.",
                      "A frame has 12 kB.", "It wins 3.6 points.", "- **Quick:** 4 ms", "| a | s |\n|---|---|\n| b | 12 |"):
            self.assertIn("no mark says where it comes from", "".join(self.problems(claim)), claim)

    def test_a_unit_is_of_all_numbers_before_it(self) -> None:
        for claim, numbers in (("84 to 98 %", 2), ("3, 4 and 5 s", 3), ("7 ± 1 ms", 2), ("4 tests in 5 s", 1)):
            self.assertEqual(len(self.problems(claim)), numbers, claim)

    def test_what_claims_nothing_wants_none(self) -> None:
        for text in ("R = 0.95 with 161 layers and PyTorch 1.13.1", "# 3 s a step", "`5 ms`", "```\n5 ms\n```", "a link of 1 Gb/s",
                     "a queue of 64 KiB", "2 × 32 images", "[this](page.md#5-s)", "![5 s](a.svg)", "int8 and sm_90"):
            self.assertEqual(self.problems(text), [], text)

    def test_numbers_are_found_in_their_unit_or_its_base(self) -> None:
        self.assertEqual(self.problems("<!-- numbers: measured.json -->\n986 ms, 0.986 s, 5.2 %, 107.3 MB, and 0.0523 of it"), [])
        self.assertEqual(self.problems("<!-- numbers: table.md -->\n2.06 s, 74 % less, 5.2 %"), [])

    def test_every_changed_digit_is_noticed_here(self) -> None:
        text = "<!-- numbers: measured.json -->\n986 ms, 0.371 s, 5.23 %, 107.3 MB"
        found = self.found(text)
        self.assertEqual(found.counts["found"], 4)
        self.assertEqual(page_numbers.noticed(found.checks), (3 + 4 + 3 + 4,) * 2)
        self.assertIn("page.md:2: 0.381 s: in no record of measured.json", self.problems(text.replace("0.371", "0.381"))[0])

    def test_a_row_is_of_one_record(self) -> None:
        page = "<!-- rows: table.md -->\n| row | step | waited | sent |\n|---|---|---|---|\n| everything | 2.057 | {} | 100 % |"
        self.assertEqual(self.problems(page.format("0.719")), [])
        self.assertEqual(len(self.problems(page.format("0.005"))), 3)  # of another row
        both = "<!-- rows: table.md -->\n| row | step |\n|---|---|\n| dropped | 0.531 (−74.2 %) |"
        self.assertEqual(self.problems(both), [])

    def test_a_cell_is_of_one_record(self) -> None:
        page = "<!-- cells: table.md -->\n| row | all | dropped |\n|---|---|---|\n| step, waited | 2.06 / 0.719 | 0.531 / {} |"
        self.assertEqual(self.problems(page.format("0.005")), [])
        self.assertEqual(len(self.problems(page.format("0.719"))), 2)

    def test_a_copied_row_stands_there_letter_by_letter(self) -> None:
        page = "<!-- copied: table.md -->\n| row | step s | waited s | sent |\n|---|---:|---:|---:|\n{}\n"
        found = self.found(page.format("| everything | 2.057 | 0.719 | 100.00 % |"))
        self.assertEqual((found.problems, dict(found.counts)), ([], {"copied": 3}))
        self.assertEqual(page_numbers.noticed(found.checks), (4 + 4 + 5,) * 2)
        for changed in ("| all | 2.057 | 0.719 | 100.00 % |", "| everything | 0.719 | 2.057 | 100.00 % |", "| everything | 2.057 | 0.719 |",
                        "| everything | 2.06 | 0.719 | 100.00 % |", "| more, in words |  |  |  |", "| everything | 2.057 | 0.719 | 100.00 % ||"):
            self.assertIn("page.md:4: no such row is in table.md", self.problems(page.format(changed))[0], changed)
        named = page.replace("table.md", "table.md#dropped").format("| everything | 2.057 | 0.719 | 100.00 % |")
        self.assertIn("no such row is in table.md#dropped", self.problems(named)[0])
        for head in ("| row | step ms | waited s | sent |", "| row | waited s | step s | sent |"):
            other = page.replace("| row | step s | waited s | sent |", head).format("| everything | 2.057 | 0.719 | 100.00 % |")
            self.assertIn("no such row", self.problems(other)[0])
        settled = page.format("| everything | 9.057 | 0.719 | 100.00 % | <!-- settings: x -->")
        self.assertIn("no such row", self.problems(settled)[0])
        both = "<!-- numbers: measured.json -->\n" + page.format("| everything | 2.057 | 0.719 | 100.00 % |")
        self.assertIn("has no other mark of files", self.problems(both)[0])
        self.assertIn("only rows of a table can be copied", self.problems("<!-- copied: table.md -->\n0.719 s")[0])

    def test_words_choose_records(self) -> None:
        for words, problems in (("dropped", 0), ("everything", 1), ("At 1 Gb/s", 0)):
            self.assertEqual(len(self.problems(f"<!-- numbers: table.md#{words} -->\n0.531 s")), problems, words)
        self.assertEqual(self.problems("<!-- numbers: measured.json#lamina -->\n0.371 s"), [])
        self.assertEqual(len(self.problems("<!-- numbers: measured.json#DDP -->\n0.371 s")), 1)

    def test_files_and_words_that_are_not_there(self) -> None:
        self.assertIn("there is no benchmarks/results/gone.md", self.problems("<!-- numbers: gone.md -->\n1 s")[0])
        self.assertIn("'gone' is nowhere in", self.problems("<!-- numbers: table.md#gone -->\n1 s")[0])

    def test_arithmetic_is_computed(self) -> None:
        page = "<!-- numbers: measured.json -->\n<!-- arithmetic: {} -->\nIt takes {} of 0.986 s."
        self.assertEqual(self.problems(page.format("0.371 / 0.986", "0.38")), [])
        self.assertIn("0.39 of: in no record", self.problems(page.format("0.371 / 0.986", "0.39"))[0])
        self.assertIn("0.444 of '0.444 / 0.986' is neither", self.problems(page.format("0.444 / 0.986", "0.45"))[0])
        self.assertIn("no number follows from '1 - 0.986'", self.problems(page.format("0.371 / 0.986; 1 - 0.986", "0.38"))[0])
        for broken in ("0.371 /", "0.371 / 0.986;", "x", "open('f')", "1 / 0"):
            self.assertIn("is no arithmetic", self.problems(page.format(broken, "0.38"))[0], broken)

    def test_words_take_what_no_file_has_and_are_counted(self) -> None:
        for kind in ("computed", "cited", "settings"):
            found = self.found(f"<!-- {kind}: so -->\n5 s and 7 %\n\n<!-- numbers: table.md -->\n0.531 s")
            self.assertEqual((found.problems, dict(found.counts)), ([], {kind: 2, "found": 1}))
        self.assertEqual(len(self.problems("<!-- measured by: a command, not kept -->\n5 s")), 1)

    def test_how_far_a_mark_goes(self) -> None:
        section = "# A\n\n## B\n\n<!-- numbers: table.md -->\n\n0.531 s\n\n- 0.719 s\n\n### C\n\n2.057 s\n\n## D\n\n"
        self.assertEqual(self.problems(section), [])
        self.assertEqual(len(self.problems(section + "0.531 s")), 1)  # behind the section
        self.assertEqual(len(self.problems("<!-- numbers: table.md -->\n0.531 s\n\n0.531 s")), 1)  # behind the paragraph
        nearer = "# A\n\n<!-- numbers: table.md -->\n\n- 0.371 s <!-- numbers: measured.json -->\n- {}"
        self.assertEqual(self.problems(nearer.format("0.531 s")), [])
        self.assertEqual(len(self.problems(nearer.format("0.371 s"))), 1)  # of one item alone
        words = "# A\n\n<!-- settings: all -->\n\n9 s\n\n<!-- numbers: table.md -->\n9 s"
        self.assertEqual(len(self.problems(words)), 1)  # nearer files take the place of words

    def test_which_pages(self) -> None:
        for page in ("README.md", *(f"docs/{name}.md" for name in ("a", "decisions/0001", "wire-format/index"))):
            (self.root / page).parent.mkdir(exist_ok=True)
            (self.root / page).write_text("5 s")
        self.assertEqual([page.name for page in page_numbers.pages(self.root)], ["README.md", "a.md"])


class Repository(unittest.TestCase):
    def test_a_changed_digit_of_a_page_fails(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            root = pathlib.Path(name)
            (root / "docs").mkdir()
            shutil.copytree(ROOT / "benchmarks/results", root / "benchmarks/results")
            shutil.copy(ROOT / "README.md", root)
            command = [sys.executable, "-B", str(pathlib.Path(__file__).with_name("page_numbers.py")), str(root)]
            whole = subprocess.run(command, capture_output=True, text=True)
            self.assertEqual((whole.returncode, whole.stderr), (0, ""))
            row = next(line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| DDP |"))
            seconds = row.split("|")[3].strip()
            changed = seconds[:-1] + str((int(seconds[-1]) + 1) % 10)
            (root / "README.md").write_text((root / "README.md").read_text().replace(row, row.replace(seconds, changed)))
            broken = subprocess.run(command, capture_output=True, text=True)
            self.assertEqual(broken.returncode, 1)
            self.assertIn(f"{changed} seconds", broken.stderr)

    def test_marks_are_strict_enough(self) -> None:
        checks = [asked for page in page_numbers.pages(ROOT) for asked in page_numbers.check(ROOT, page).checks]
        caught, tried = page_numbers.noticed(checks)
        self.assertGreater(tried, 1000)
        self.assertGreaterEqual(caught / tried, 0.9, "name fewer records in the marks: FILE#WORDS, cells or rows")


if __name__ == "__main__":
    unittest.main()
