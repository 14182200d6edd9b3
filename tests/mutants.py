#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Plants faults in the headers, one at a time, and lists those that no test of ./tests/run --quick and no fuzz target notices. All are
compiled into one build, each behind a condition on an environment variable, so that a fault costs a run of the tests and no compilation.
Those of the device are planted where its kernels run on threads of the CPU. Headers that need MPI, libtorch or nvcc are left out."""

import argparse
import concurrent.futures
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
BUILD = ROOT / "build/mutants"
SWITCH = """#pragma once
#include <cstdlib>
inline const int lamina_planted = [] {
  const char* number = std::getenv("LAMINA_PLANTED");
  return number == nullptr ? 0 : std::atoi(number);
}();
#define LAMINA_PLANTED(number) (!__builtin_is_constant_evaluated() && lamina_planted == (number))
"""
OPERAND = r"[\w.:]+(?:->\w+)*(?:\(\w*\)|\[\w+\])*(?:\.\w+(?:\(\w*\))?)*"
NEIGHBOUR = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}


def faults_of(line: str, before: str) -> "list[tuple[str, str]]":
    """What a line may be instead, with @ for the condition: a branch turned, a bound moved by one, a 1 left out, a statement left out."""
    made = []
    code = line.split("//")[0].rstrip()
    if (turned := re.match(r"(\s*(?:\} else )?if \()([^;{]*)(\)(?: \{| [\w(].*;)?)$", code)) and balanced(turned[2]) and "auto " not in turned[2]:
        made.append(("turned", f"{turned[1]}@ != static_cast<bool>({turned[2]}){turned[3]}"))
    for found in re.finditer(rf"(\(|; |&& |\|\| |return )({OPERAND}) (<|<=|>|>=|==|!=) ({OPERAND})(?=\)|;| &&| \|\|)", code):
        begin, left, sign, right = found.groups()
        changed = f"{begin}(@ ? {left} {NEIGHBOUR[sign]} {right} : {left} {sign} {right})"
        made.append((f"{left} {NEIGHBOUR[sign]} {right}", code[:found.start()] + changed + code[found.end():]))
    for found in re.finditer(r"(?<=[\w)\]]) ([+-]) 1(?=[);,\]])", code):
        made.append((f"{found[1]} 0", code[:found.start()] + f" {found[1]} (@ ? 0 : 1)" + code[found.end():]))
    is_statement = before.rstrip().endswith((";", "{", "}")) and code.endswith(";") and balanced(code)
    if is_statement and re.match(r"\s{4,}[\w.:\[\]>-]+(?:\(.*\)| (?:[-+|&^]?=) .*);$", code) and not re.match(r"\s*(return|throw|using|static_assert)\b", code):
        made.append(("left out", re.sub(r"^(\s*)", r"\1if (!@) ", code)))
    return made


def balanced(text: str) -> bool:
    return text.count("(") == text.count(")") and text.count("[") == text.count("]") and text.count("{") == text.count("}")


def planted(headers: "list[pathlib.Path]", count: int, seed: int) -> "list[dict]":
    """At most one a line, as many of each header as it has lines that can be wrong."""
    found = []
    for header in headers:
        lines = header.read_text().splitlines()
        for number, line in enumerate(lines[1:], 1):
            faults = [] if "constexpr" in line or "static_assert" in line else faults_of(line, lines[number - 1].split("//")[0])
            found += [{"header": str(header.relative_to(ROOT)), "line": number + 1, "code": line.strip(), "fault": name, "text": text}
                      for name, text in faults]
    random.Random(seed).shuffle(found)
    chosen = {(each["header"], each["line"]): each for each in reversed(found)}
    first = [each for each in found if chosen[each["header"], each["line"]] is each][:count]
    return sorted(first, key=lambda each: (each["header"], each["line"]))


def prepare(faults: "list[dict]") -> None:
    tree = BUILD / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    for name in subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    (tree / "planted.hpp").write_text(SWITCH)
    for number, each in enumerate(faults, 1):
        header = tree / each["header"]
        lines = header.read_text().splitlines(keepends=True)
        lines[each["line"] - 1] = each["text"].replace("@", f"LAMINA_PLANTED({number})") + "\n"
        header.write_text("".join(lines))


def build(options: "list[str]") -> None:
    subprocess.run(["cmake", "-S", BUILD / "tree", "-B", BUILD / "build", "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DLAMINA_BUILD_EXAMPLES=OFF",
                    "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG",  # it takes longer to run all of them than to compile
                    f"-DCMAKE_CXX_FLAGS=-w -include {BUILD / 'tree/planted.hpp'}", *options], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", BUILD / "build", "--parallel", "2", "--target", "lamina_quick", "fuzz_replay",
                    "lamina_thread_block_tests"], check=True)


def commands() -> "list[list[str]]":
    """A program of Catch2 once, whatever the number of its cases; the shortest first. SystemExit if one fails without a fault."""
    listed = json.loads(subprocess.run(["ctest", "--show-only=json-v1"], cwd=BUILD / "build", check=True, capture_output=True, text=True).stdout)
    found = {}
    for test in listed["tests"]:
        labels = [each["value"] for each in test.get("properties", []) if each["name"] == "LABELS"]
        command = test.get("command", [])
        is_of_device = bool(command) and command[0].endswith("lamina_thread_block_tests")
        if command and pathlib.Path(command[0]).is_file() and (
                is_of_device or labels and "quick" in labels[0] or test["name"].startswith("fuzz.")):
            command = command if test["name"].startswith("fuzz.") else [command[0], "--abort"]
            found[tuple(command)] = None
    seconds = {}
    for command in found:
        began = time.monotonic()
        if who := noticed_by(0, [list(command)]):
            sys.exit(f"{who} fails without a fault")
        seconds[command] = time.monotonic() - began
    return sorted(map(list, found), key=lambda command: seconds[tuple(command)])


def noticed_by(number: int, all_commands: "list[list[str]]") -> str:
    """The program that ends otherwise than well, or in no end; an empty text if none does."""
    for command in all_commands:
        try:
            done = subprocess.run(command, cwd=BUILD / "build", env={**os.environ, "LAMINA_PLANTED": str(number)}, timeout=300,
                                  stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            return f"{pathlib.Path(command[0]).name}, which does not end"
        if done.returncode:
            return " ".join([pathlib.Path(command[0]).name, *command[1:2]]).removesuffix(" --abort")
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", type=pathlib.Path, default=BUILD / "mutants.tsv", help="a row a fault: header, line, code, fault, who noticed it")
    parser.add_argument("--list", action="store_true", help="show the faults alone")
    parser.add_argument("options", nargs="*", help="for CMake, after --")
    given = parser.parse_args()
    headers = [each for each in sorted([*ROOT.glob("include/lamina/**/*.hpp"), *ROOT.glob("cuda/lamina/**/*.hpp")])
               if not re.search("mpi|torch|thrust", each.name)]
    faults = planted(headers, given.count, given.seed)
    if given.list:
        for each in faults:
            print(f"{each['header']}:{each['line']}: {each['fault']}: {each['code']}")
        return
    prepare(faults)
    build(given.options)
    programs = commands()
    noticed = 0
    with given.record.open("w") as record, concurrent.futures.ThreadPoolExecutor(2) as pool:
        for each, who in zip(faults, pool.map(lambda number: noticed_by(number, programs), range(1, len(faults) + 1))):
            row = "\t".join([each["header"], str(each["line"]), each["code"], each["fault"], who])
            print(row, file=record, flush=True)
            noticed += bool(who)
            if not who:
                print(row, flush=True)
    print(f"{noticed} of {len(faults)} faults were noticed")


main()
