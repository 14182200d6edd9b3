# SPDX-License-Identifier: MIT
"""soak.py for some rounds: whatever is killed, nothing is lost, and what is broken on purpose is noticed."""

import pathlib
import re
import subprocess
import sys

import pytest


def soak(*arguments):
    program = pathlib.Path(__file__).parent / "soak.py"
    return subprocess.run([sys.executable, str(program), "--workers", "4", "--kill-every", "16", *arguments], capture_output=True, text=True)


def test_processes_may_be_killed_at_any_moment():
    done = soak("--rounds", "80")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^kills +[1-9]", done.stdout, re.MULTILINE) and re.search(r"^resumes +[1-9]", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("fault, said", [
    ("left-out", r"the server, round \d+: worker [0-3]: lost elements: [1-9]"),
    ("skip-save", r"worker 1, round \d+: .*No such file.*worker1"),
    ("one-reply", r"the server, round \d+: the replica of worker [0-3] differs")])
def test_what_is_broken_is_noticed(fault, said):
    done = soak("--rounds", "48", "--fault", fault)
    assert done.returncode == 1 and re.search(said, done.stderr), done.stderr
