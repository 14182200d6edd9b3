#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The studies of benchmarks/network, small: studies_test.py PROGRAM. The network's figures are made up, by
rules that the calibration has to find again."""

import json
import pathlib
import subprocess
import sys
import tempfile

from here import NETWORK, python_with_matplotlib, require

COMMUNICATION = 0.002, 1.1  # seconds, and per second of bytes over goodput
# Slow enough that the bytes of a tiny network count.
WORKER = 0.02, 2e-7
SERVER = 0.07, 1e-7
ELEMENTS = 34_394  # of tiny_network.cpp
GOODPUT = 1e9 / 8 * 1448 / 1514


def made_up(row: str, topology: str, rate: str, clients: int, share: float, compute_seconds: float) -> dict:
    way_bytes = 102_228_128 * share * clients
    model = 2 * way_bytes / GOODPUT
    worker = compute_seconds + WORKER[0] + WORKER[1] * 2 * way_bytes / clients
    server = SERVER[0] + SERVER[1] * way_bytes
    node = 0.1 if "nodes" in row else 0.0
    communication = COMMUNICATION[0] + COMMUNICATION[1] * model
    return {"row": row, "topology": topology, "rate": rate, "steps": 9, "worker_seconds": worker,
            "server_seconds": server, "communication_seconds": communication + node, "node_seconds": node,
            "total_seconds": worker + server + communication + node, "bytes_up": way_bytes, "bytes_down": way_bytes,
            "sent_up": share, "sent_down": share, "commit": "", "model_seconds": model if rate != "unlimited" else None,
            "counted_up": 1, "counted_down": 1, "said_up": 1, "said_down": 1}


def write_network(directory: pathlib.Path) -> None:
    directory.mkdir()
    results = []
    for row, share in (("everything", 1.0), ("R = 0.95", 0.06)):
        results += [made_up(f"flat, {row}", "pair, flat", "unlimited", 1, share, 0.388),
                    made_up(f"flat, {row}", "first, flat", "1 Gb/s", 4, share, 0.388),
                    made_up(f"nodes, {row}", "first, by nodes", "1 Gb/s", 2, share, 0.388),
                    made_up(f"allreduce, {row.replace('R', 'agreed, R')}", "first, allreduce", "1 Gb/s", 1, share, 0.388)]
    # Packets over UDP cost another time, and say nothing about MPI's.
    results.append(made_up("flat, R = 0.95, udp, p = 0.1", "first, flat", "1 Gb/s", 4, 0.06, 0.388) | {"communication_seconds": 9.0})
    (directory / "results.json").write_text(json.dumps({"runs": [], "results": results}))


def near(value: float, expected: float) -> bool:
    return abs(value - expected) <= 1e-6 * abs(expected)


def calibration_finds_the_rules(network: pathlib.Path) -> None:
    import calibration
    costs = calibration.costs(calibration.read(network))
    for line, (at_zero, slope) in ((costs.worker, WORKER), (costs.server, SERVER),
                                   (costs.communication["server"], COMMUNICATION),
                                   (costs.communication["allreduce"], COMMUNICATION)):
        require(near(line.at_zero, at_zero) and near(line.slope, slope) and line.worst < 1e-6, f"{line}")
    for points in ([(1.0, 2.0)], [(1.0, 2.0), (1.0, 3.0)]):
        try:
            calibration.fit(points)
        except ValueError:
            continue
        require(False, f"a line through {points}")


def program(script: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([python_with_matplotlib(), "-B", str(NETWORK / script), "--program", sys.argv[1], *arguments],
                          capture_output=True, text=True)


def run(script: str, *arguments: str) -> str:
    done = program(script, *arguments)
    require(done.returncode == 0, done.stderr)
    return done.stdout


def goals_are_reached_for_good() -> None:
    import convergence_report
    from settings import CONVERGENCE
    losses = [1.0] * 30 + [4.0] * 30 + [2.0] * 60
    run = convergence_report.Run(losses, 1, 1, [0.5] * len(losses), {60: 0.1, 120: 0.2})
    outcome = convergence_report.Outcome(CONVERGENCE["everything"], [run, run], 0)
    # The last mean of 25 steps above 2 is of one step at 4.
    require(outcome.steps_to_loss(2.0) == 60 + 25, f"{outcome.steps_to_loss(2.0)}")
    require(outcome.steps_to_loss(1.9) is None, "a loss that rose again counts as reached")
    require((outcome.steps_to_top1(0.2), outcome.steps_to_top1(0.3)) == (120, None), "the wrong evaluation")


def an_all_reduce_counts_what_leaves(at: pathlib.Path) -> None:
    """Of 8 % of the elements one of four workers sends 6, and keeps its own slice; a step has no costs of a server."""
    import convergence_report
    from settings import CONVERGENCE
    line = {"step": 1, "loss": 1.0, "sent_up": 0.06, "sent_down": 0.06, "bytes_up": 60, "bytes_down": 60}
    (at / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (line, {**line, "step": 2},
                                                                                     {"evaluation_after_step": 2, "top1": 0.3})))
    found = {}
    for name in ("agreed, R = 0.95, no momentum, ahead", "agreed, R = 0.95, no momentum"):
        outcome = convergence_report.outcomes_of({name: [at]}, 2, 4, lambda moved: moved / 40)[name]
        cells = convergence_report.row_of(outcome, outcome)
        found[name] = (f"{outcome.runs[0].sent_up:.3f}", outcome.step_seconds(), cells[7], cells[9])
    require(list(found.values()) == [("0.080", None, "", ""), ("0.060", 3.0, "3.00", "3")], f"{found}")


def links_carry_what_crosses_machines() -> None:
    from settings import ROWS, TOPOLOGIES
    first, second = TOPOLOGIES["first"], TOPOLOGIES["second"]
    require(first.link_bytes(ROWS["flat, everything"], 4, 8) == (4, 8), "the server shares no machine")
    require(second.link_bytes(ROWS["flat, everything"], 8, 16) == (6, 12), "two of eight share the server's machine")
    require(second.link_bytes(ROWS["nodes, everything"], 4, 8) == (3, 6), "one of four does")
    # Four workers with a model of 4: 3 go out of and into each, twice; 2 of the 3 others are on another machine.
    require(first.link_bytes(ROWS["allreduce, everything"], 12, 12) == (8, 8), "two workers of 2 x 2 x 1 each")


def convergence_is_studied(at: pathlib.Path) -> None:
    study = ["--settings", "everything", "agreed, R = 0.95", "--steps", "3", "--evaluate-every", "2", "--batch", "2",
             "--warm-up", "1", "--network", str(at / "network"), "--output", str(at / "study")]
    run("convergence.py", *study, "--seeds", "1")
    first = (at / "study/seed-1/everything/without/metrics.jsonl").stat().st_mtime_ns
    said = run("convergence.py", *study, "--seeds", "1", "2")
    require("seed 1," not in said and "seed 2, everything" in said, f"a run was repeated: {said}")
    require((at / "study/seed-1/everything/without/metrics.jsonl").stat().st_mtime_ns == first, "a run was repeated")
    settings = json.loads((at / "study/results.json").read_text())["settings"]
    dense, dropping = settings["everything"], settings["agreed, R = 0.95"]
    require(len(dense["loss"]) == len(dropping["top1"]) == 2, f"not of both seeds: {settings}")
    require(abs(dense["sent_up"] - 1) < 2e-3 and dropping["sent_up"] < 0.5, f"nothing was dropped: {settings}")
    # By the made-up rules, of two workers.
    expected = (0.388 + WORKER[0] + SERVER[0] + COMMUNICATION[0]
                + 2 * 2 * ELEMENTS * 4 * (WORKER[1] / 2 + SERVER[1] / 2 + COMMUNICATION[1] / GOODPUT))
    require(abs(dense["step_seconds"] / expected - 1) < 0.01, f"{dense['step_seconds']} s, not {expected}")
    for name in ("loss_by_step", "loss_by_time", "accuracy_by_step", "accuracy_by_time"):
        require((at / f"study/{name}.svg").stat().st_size > 1000, f"no picture {name}")
    other = program("convergence.py", *study, "--seeds", "1", "--batch", "3")
    require(other.returncode == 1 and "give it another --output" in other.stderr, other.stderr)
    require((at / "study/seed-1/everything/without/metrics.jsonl").stat().st_mtime_ns == first, "a run was deleted")
    # A run that ended early is said, and not counted.
    lines = at / "study/seed-2/agreed--R---0.95/with/metrics.jsonl"
    lines.write_text("".join(lines.read_text().splitlines(keepends=True)[:2]))
    require("| agreed, R = 0.95 | 1 of 2 |" in run("convergence.py", *study, "--seeds", "1", "2", "--report-only"),
            "a run cut short counts as whole")


def lost_packets_are_studied(at: pathlib.Path) -> None:
    rows = ["R = 0.95, p = 0", "R = 0.95, p = 0.2", "R = 0, p = 0.2 on-probe, gone"]
    study = ["--rows", *rows, "--steps", "2", "--batch", "2", "--warm-up", "1", "--output", str(at / "bounded")]
    said = run("bounded.py", *study, "--seeds", "1")
    require(all(f"seed 1, {row}" in said for row in rows), said)
    first = run("bounded.py", *study, "--seeds", "1", "--report-only")
    require("seed 1" not in run("bounded.py", *study, "--seeds", "1"), "a run was repeated")
    found = json.loads((at / "bounded/results.json").read_text())["rows"]
    lost = {row: found[row]["seeds"]["1"]["lost_up"] for row in rows}
    require(lost[rows[0]] == 0 and 0 < lost[rows[1]] <= 0.2 and 0 < lost[rows[2]] <= 0.2, f"{lost}")
    require("--on-loss zero" in " ".join(found[rows[2]]["options"]), f"{found[rows[2]]}")
    require(f"| {rows[1]} | 1 | " in first, first)
    other = program("bounded.py", *study, "--seeds", "1", "--batch", "3")
    require(other.returncode == 1 and "give it another --output" in other.stderr, other.stderr)
    # One that was cut short, in the middle of a line, does not count.
    lines = at / "bounded/seed-1/R---0.95--p---0.2/with/metrics.jsonl"
    lines.write_text("".join(lines.read_text().splitlines(keepends=True)[:1]) + '{"step": 2, "lo')
    require(f"| {rows[1]} |" not in run("bounded.py", *study, "--seeds", "1", "--report-only"), "half a run counts")


def scale_is_modelled(at: pathlib.Path) -> None:
    scale = ["--network", str(at / "network"), "--output", str(at / "scale"), "--union-workers", "2", "3", "--steps", "4"]
    require("server, agreed selection" in run("scale.py", *scale), "no table")
    require("Training" not in run("scale.py", *scale), "a training was repeated")
    result = json.loads((at / "scale/results.json").read_text())
    require(-0.5 <= result["model"]["exponent"] <= 1.5, f"{result['model']}")
    seconds = result["step_seconds"]
    for rate in ("1", "400"):
        for scheme, by_rate in seconds.items():
            times = list(by_rate[rate].values())
            require(times == sorted(times), f"{scheme} at {rate} gets quicker with more workers: {times}")
    at_64 = {scheme: by_rate["1"]["64"] for scheme, by_rate in seconds.items()}
    for scheme in ("local", "agreed"):
        require(at_64[f"server, {scheme} selection"] < 0.5 * at_64["server, everything"], f"dropping does not help: {at_64}")
    (at / "network" / "other").mkdir()
    (at / "network" / "other" / "results.json").write_text('{"results": [{"row": "flat, everything"}]}')
    other = program("scale.py", "--network", str(at / "network" / "other"), "--output", str(at / "scale"))
    require(other.returncode == 1 and "is not what this version writes" in other.stderr, other.stderr)
    missing = program("scale.py", "--network", str(at / "nowhere"), "--output", str(at / "scale"))
    require(missing.returncode == 1 and "nowhere has no results.json" in missing.stderr, missing.stderr)


def unions_follow_their_exponent() -> None:
    import scale
    for exponent in (0.0, 0.4, 1.0):
        made = [scale.Union(workers, 0.05, 1 - 0.95 ** (workers ** exponent)) for workers in (2, 4, 8)]
        require(abs(scale.independence(made) - exponent) < 1e-9, f"{scale.independence(made)}, not {exponent}")


def main() -> None:
    python = python_with_matplotlib()
    if python != sys.executable:
        sys.exit(subprocess.run([python, "-B", __file__, *sys.argv[1:]], check=False).returncode)
    for script in ("experiment.py", "convergence.py", "bounded.py", "scale.py"):
        require("--output" in run(script, "--help"), "no help")
    with tempfile.TemporaryDirectory() as directory:
        at = pathlib.Path(directory)
        write_network(at / "network")
        calibration_finds_the_rules(at / "network")
        unions_follow_their_exponent()
        goals_are_reached_for_good()
        an_all_reduce_counts_what_leaves(at)
        links_carry_what_crosses_machines()
        convergence_is_studied(at)
        lost_packets_are_studied(at)
        scale_is_modelled(at)


main()
