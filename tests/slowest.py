# SPDX-License-Identifier: MIT
"""Prints where the time of ./tests/run went: slowest.py BUILD BEGIN_OF_BUILDING END_OF_BUILDING END, in seconds of the clock."""

import pathlib
import re
import sys
import xml.etree.ElementTree

BUILD, (BEGAN, BUILT, ENDED) = pathlib.Path(sys.argv[1]), map(int, sys.argv[2:])


def of_building() -> "dict[str, float]":
    """By target, of what this build has made: a line of the log is an output, with the time of its file."""
    commands = {}
    for line in (BUILD / ".ninja_log").read_text().splitlines()[1:]:
        begin, end, made_at, output, command = line.split("\t")
        if int(made_at) >= BEGAN * 10**9:
            commands[command, begin] = (output, (int(end) - int(begin)) / 1000)
    seconds: "dict[str, float]" = {}
    for output, took in commands.values():
        target = re.search(r"(\w+)\.dir/", output)
        name = target[1] if target else pathlib.Path(output).name
        seconds[name] = seconds.get(name, 0) + took
    return seconds


def of_testing() -> "dict[str, float]":
    cases = xml.etree.ElementTree.parse(BUILD / "tests.xml").iter("testcase")
    return {case.get("name", ""): float(case.get("time", 0)) for case in cases}


for what, whole, parts in (("Building", BUILT - BEGAN, of_building()), ("Testing", ENDED - BUILT, of_testing())):
    print(f"{what}: {whole // 60} min {whole % 60} s")
    for name, seconds in sorted(parts.items(), key=lambda each: -each[1])[:10]:
        print(f"{seconds:8.1f} s  {name}")
