# SPDX-License-Identifier: MIT
"""Runs the benchmarks of a build and prints a digest; benchmarks/run builds first, and has the help."""

import argparse
import pathlib
import sys

import command
import compile_cost
import digest
import instructions
import ratios
import suite

ROOT = pathlib.Path(__file__).resolve().parents[2]
TABLE = ROOT / "benchmarks/results/ratios.txt"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/run", description="Builds and runs the benchmarks: a table for each "
                                     "question and a line for each ratio that has a limit. Writes results.json.")
    parser.add_argument("--quick", action="store_true", help="small sizes and few repetitions")
    parser.add_argument("--only", action="append", metavar="PROGRAM", help="of the programs this one alone; may be repeated")
    parser.add_argument("--gradients", type=pathlib.Path, metavar="DIR", help="gradients of a training run of ResNet-50, as "
                        "lab --record DIR keeps them: what receivers have of those, too")
    parser.add_argument("--rounds", type=int, help="processes of what the ratios need, one after the other (5; with --quick 1)")
    parser.add_argument("--check", action="store_true", help="fail if a ratio is over its limit by more than noise, and "
                        f"worse than in {TABLE.relative_to(ROOT)}; makes the rounds at least 3")
    parser.add_argument("--record", action="store_true", help=f"keep what was measured in {TABLE.parent.relative_to(ROOT)}/")
    parser.add_argument("--build", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=pathlib.Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rounds is None:
        given.rounds = 1 if given.quick else 5
    if given.check:
        given.rounds = max(given.rounds, 3)
    if given.rounds < 1:
        parser.error("--rounds: at least one")
    if given.gradients is not None:
        given.gradients = given.gradients.resolve()
        if not (given.gradients / "worker-0-0.f32").exists():
            parser.error(f"--gradients: no worker-0-0.f32 in {given.gradients}")
    if given.record and (given.quick or given.only):
        parser.error("--record: keeps a whole run, not one with --quick or --only")
    return given


def main() -> int:
    given = arguments()

    defined = ratios.definitions(ROOT / "benchmarks/ratios.txt")
    contexts, results = suite.measure(given.build, given.quick, given.rounds, ratios.benchmarks_of(defined), given.only,
                                      given.gradients, command.say)
    more = {}
    if not given.only:
        command.say("compile_cost")
        more["compile_cost"] = compile_cost.measure(ROOT / "include", 1 if given.quick else 9)
        if not given.quick:
            command.say("instructions")
            more["instructions"] = instructions.measure(ROOT / "include")
    command.say("")
    about = suite.environment(ROOT, contexts)
    output = TABLE.parent / "results.json" if given.record else given.output
    suite.write(output, about, results, more)

    tables = digest.text(about, results, more)
    print(tables, end="")
    found = ratios.of(defined, results)
    if "compile_cost" in more:
        found += compile_cost.surplus(more["compile_cost"])
    print("\nMedians of the rounds; times vary from machine to machine and from hour to hour, ratios less.")
    for each in found:
        print(each.line())
    print(f"\nAll of it: {output}")
    if given.record:
        (TABLE.parent / "table.md").write_text(tables)
        TABLE.write_text(ratios.table(found, ["benchmarks/run --record", *digest.about(about)]))
    if given.check:
        problems = ratios.broken(found, ratios.read_table(TABLE))
        for sentence in problems:
            print(f"broken: {sentence}", file=sys.stderr)
        return 1 if problems else 0
    return 0


if __name__ == "__main__":
    command.run("run", main)
