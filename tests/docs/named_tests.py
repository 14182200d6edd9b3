# SPDX-License-Identifier: MIT
"""Every test that docs/testing.md names is one that runs: named_tests.py CTEST BUILD."""

import fnmatch
import json
import pathlib
import re
import subprocess
import sys

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
# How many tests it names at least, so that a page of another form is noticed.
PAGE, LEAST = "testing.md", 10
# Of Catch2 with its description, and of ctest with dots; a star stands for anything.
NAME = re.compile(r"`([a-z0-9]+(?: frames)?: [^`]+|[a-z0-9_]+(?:\.[a-z0-9_*]+)+|fast_math)`")
# Left out where the machine lacks what they need; ctest's configuration says so.
OPTIONAL = {"fast_math.clang", "lint.clang_tidy", "lint.cppcheck", "lint.clang_format", "fuzz.checkpoint"}


def main() -> None:
    ctest, build = sys.argv[1:]
    listed = subprocess.run([ctest, "--test-dir", build, "--show-only=json-v1"], check=True, capture_output=True, text=True)
    known = [test["name"] for test in json.loads(listed.stdout)["tests"]]
    named = [" ".join(name.split()) for name in NAME.findall((DOCS / PAGE).read_text())]
    named = [name for name in named if not name.endswith((".hpp", ".cpp", ".md", ".txt", ".py", ".csv"))]
    if len(named) < LEAST:
        sys.exit(f"only {len(named)} tests found in {PAGE}: is its form another?")
    # A test of several types has the type behind its name.
    missing = [name for name in named if name not in OPTIONAL
               and not any(fnmatch.fnmatchcase(each, name) or each.startswith(name + " - ") for each in known)]
    if missing:
        sys.exit(f"{PAGE} names tests that do not exist:\n" + "\n".join(f"  {name}" for name in missing))


main()
