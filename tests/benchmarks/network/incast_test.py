#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What benchmarks/network/incast.py makes of steps whose figures are made up, and its program without a network: incast_test.py PROGRAM"""

import argparse
import importlib.util
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile

from here import NETWORK, python_with_matplotlib, require

if importlib.util.find_spec("matplotlib") is None:
    os.execv(python_with_matplotlib(), [python_with_matplotlib(), *sys.argv])
sys.path.insert(0, str(NETWORK))

import incast  # noqa: E402
import incast_plots  # noqa: E402
import incast_report as report  # noqa: E402
from incast_rows import QUICK_ROWS, QUICK_TRANSPORTS, RATES, ROWS, TRANSPORTS, Row  # noqa: E402


def step(seconds: float, cpu_seconds: float = 0.01, **more: float) -> dict:
    return {"seconds": seconds, "up_seconds": 0.6 * seconds, "down_seconds": 0.3 * seconds, "period_seconds": 2 * seconds,
            "bytes_up": 3e6, "bytes_down": 2e6, "missing_up": 0.0, "missing_down": 0.0, "cpu_seconds": cpu_seconds, **more}


def turn(steps: list[dict], **more) -> report.Turn:
    return report.Turn(steps, **{"dropped_up": 3, "dropped_down": 1, "lost": 2, "load": 0.5, **more})


def made(row: Row, transport: str, seconds: list[float], paced: float = 1.0, cpu_seconds: float = 0.001) -> report.Result:
    return report.result_of(row.rate, row.name, transport, [turn([step(each, cpu_seconds) for each in seconds])], paced, 2, "c0ffee")


def percentiles_are_steps() -> None:
    values = [float(each) for each in range(1, 201)]
    random.Random(3).shuffle(values)
    require(report.p99(values) == 198.0, f"of 200 the 99th percentile is the 198th: {report.p99(values)}")
    require(report.p99([5.0]) == 5.0 and report.p99([1.0, 2.0]) == 2.0, "of few it is the largest")


def intervals_hold_what_they_should() -> None:
    # Of 200 samples of 100 numbers, drawn from a law whose mean and median are known: 95 % of the intervals should hold them.
    drawing = random.Random(5)
    for statistic, truth in ((statistics.fmean, 1.0), (statistics.median, 0.6931)):
        held = 0
        for _ in range(60):
            low, high = report.bootstrap([drawing.expovariate(1.0) for _ in range(100)], statistic)
            held += low <= truth <= high
        require(50 <= held <= 60, f"{held} of 60 intervals hold {truth}")
    values = [drawing.random() for _ in range(30)]
    require(report.bootstrap(values, statistics.fmean) == report.bootstrap(values, statistics.fmean), "intervals differ from call to call")
    low, high = report.bootstrap([7.0] * 20, report.p99)
    require(low == high == 7.0, "an interval of nothing but sevens")


def steps_become_a_result() -> None:
    turns = [turn([step(0.1), step(0.2)]), turn([step(0.3, missing_up=0.03)], load=1.5)]
    result = report.result_of("200 Mb/s", "row", "MPI, cubic", turns, 0.99, 2, "c0ffee")
    require(result.steps == 3 and abs(result.seconds.mean - 0.2) < 1e-12 and result.seconds.median == 0.2, f"{result}")
    require(result.seconds.most == result.seconds.p99 == 0.3 and abs(result.up_seconds.most - 0.18) < 1e-12, f"{result}")
    require((result.dropped_up, result.dropped_down, result.lost) == (6, 2, 4), f"not the sums over turns: {result}")
    require(result.load == [0.5, 1.5] and abs(result.missing_up - 0.01) < 1e-12, f"{result}")
    require(abs(result.cpu_seconds_a_gb - 0.03 / 0.015) < 1e-9, f"{result.cpu_seconds_a_gb} CPU seconds a GB")
    # 0.03 s of two cores in periods of 1.2 s together.
    require(abs(result.cores_share - 0.03 / 2.4) < 1e-12, f"{result.cores_share} of the cores")
    require(result.packets is None and result.repeated is None, "MPI's packets are the kernel's")
    counted = report.result_of("200 Mb/s", "row", "udp, p = 0", [turn([step(0.1, packets=10, repeated=1, duplicate=0, late=4),
                                                                       step(0.1, packets=20, repeated=2, duplicate=0, late=0)])], 1, 2, "")
    require((counted.packets, counted.repeated, counted.late) == (15, 1.5, 2), f"not the means of a step: {counted}")


def what_the_processor_limits_is_told() -> None:
    row = QUICK_ROWS[0]
    for paced, cpu_seconds, limited in ((0.95, 0.001, False), (0.949, 0.001, True), (1.0, 0.359, False), (1.0, 0.361, True)):
        # A period of 0.2 s of two cores: 90 % are 0.36 s.
        result = made(row, "MPI, cubic", [0.1, 0.1], paced, cpu_seconds)
        require(result.is_limited_by_cpu == limited, f"paced {paced}, {cpu_seconds} s: {result.is_limited_by_cpu}")
        require(("limited by CPU" in report.table([result])) == limited, "the table does not say so")
    pairs = incast_plots._varied([made(ROWS[0], "MPI, cubic", [0.1]), made(ROWS[1], "MPI, cubic", [0.1], paced=0.5)], "fan_in")
    require(not pairs, "what the processor limits takes part in a comparison")


def results_are_added_to() -> None:
    base, other = QUICK_ROWS[0], QUICK_ROWS[1]
    with tempfile.TemporaryDirectory() as directory:
        at = pathlib.Path(directory)
        require(report.read(at) == [], "results of nowhere")
        first = report.with_results([], [made(other, "MPI, bbr", [0.4]), made(base, "MPI, cubic", [0.1])])
        report.write(at, first, {"date": "one"})
        read = report.read(at)
        require(read == first, f"not what was written: {read}")
        both = report.with_results(read, [made(base, "MPI, cubic", [0.2]), made(base, "udp, p = 0", [0.3])])
        report.write(at, both, {"date": "two"})
        report.write(at, both, {"date": "two"})
        keys = [(each.row, each.transport, each.seconds.most) for each in report.read(at)]
        require(sorted(keys) == sorted([(base.name, "MPI, cubic", 0.2), (base.name, "udp, p = 0", 0.3), (other.name, "MPI, bbr", 0.4)]),
                f"old results are gone, or stand twice: {keys}")
        require(keys == [(each.row, each.transport, each.seconds.most) for each in both], "another order than that of the settings")
        require(json.loads((at / "results.json").read_text())["runs"] == [{"date": "one"}, {"date": "two"}], "not the runs")
        text = (at / "table.md").read_text()
        require(f"### {base.rate}, {base.name}" in text and "| MPI, bbr | 400.0 (400.0 to 400.0) | 400.0 |" in text, text)
        for name in incast_plots.draw(at, both):
            require((at / name).stat().st_size > 1000, f"no picture {name}")
        for bad in ('{"results": [{"row": "x"}]}', "no JSON", json.dumps({"results": [
                {**json.loads((at / "results.json").read_text())["results"][0], "row": "a row of old"}]})):
            (at / "results.json").write_text(bad)
            try:
                report.read(at)
                require(False, f"was read: {bad[:60]}")
            except RuntimeError as error:
                require("is not what this version writes" in str(error), str(error))


def rows_are_what_they_are_called() -> None:
    names = [(row.rate, row.name) for row in ROWS]
    require(len(set(names)) == len(names), "two rows of one name")
    require(all((row.rate, row.name) in names for row in QUICK_ROWS), "a quick row that no table has")
    require(all(name in TRANSPORTS for name in QUICK_TRANSPORTS), "a quick transport that there is not")
    base = Row("200 Mb/s")
    require(base.name == "4 to 1, 1 MB, queue 64 KiB" and base.queue_bytes == 65536, base.name)
    require(Row("1 Gb/s", queue_kib=None).queue_bytes == 6_250_000, "50 ms of 1 Gb/s")
    require(abs(base.share * 25_562_500 - 250_000) < 1e-6, f"1 MB are 250,000 elements, not {base.share * 25_562_500}")
    two = Row("1 Gb/s", path_shares=(1.0, 1 / 3))
    require(two.rates == [1e9, 1e9 / 3], f"{two.rates}")
    for name, transport in TRANSPORTS.items():
        require(transport.runs_in(base), f"{name} does not run in the base")
        require(transport.runs_in(two) == (transport.is_bounded and not transport.is_control), f"{name} and paths")
    control = TRANSPORTS["udp, p = 0.1, no rate control"]
    require([row.fan_in for row in ROWS if row.rate == "1 Gb/s" and control.runs_in(row)] == [4, 8], "the negative control")
    words = TRANSPORTS["udp, p = 0.1"].options_in(two)
    require(words[words.index("--interface") + 1] == "10.77.0.0/24,10.77.1.0/24", f"{words}")
    require(set(RATES) == {row.rate for row in ROWS}, "a rate without rows")


def the_program_is_asked(program: str, at: pathlib.Path) -> None:
    given = argparse.Namespace(program=program, layers=at / "layers.txt")
    incast.write_layers(given.layers)
    require(incast.refusal_of(given, QUICK_ROWS[0], TRANSPORTS["MPI, cubic"]) is None, "MPI is refused")
    unknown = incast.Transport("morse", ("--transport", "morse"))
    reason = incast.refusal_of(given, QUICK_ROWS[0], unknown)
    require(reason is not None and "--transport" in reason and "morse" in reason, f"not the program's reason: {reason}")
    said = subprocess.run([*incast.words_of(given, QUICK_ROWS[0], incast.Transport("simulated", ("--transport", "inprocess")), 3),
                           "--loss-bound", "0.1", "--inject-loss", "0.05"], capture_output=True, text=True, check=True).stdout
    lines = [json.loads(line) for line in said.splitlines()]
    require([line["step"] for line in lines] == [1, 2, 3], said)
    for line in lines:
        require(0 < line["missing_up"] <= 0.1 and line["missing_down"] == 0, f"{line}")
        require(0 < line["missing_droppable"] <= line["missing_chunks"], f"{line}")
        require(250_000 < line["bytes_up"] / 2 < 250_400, f"frames of {line['bytes_up'] / 2} bytes")
        require(line["packets"] >= 2 * 4 * 40 and line["repeated"] >= 0 and line["cpu_seconds"] > 0, f"{line}")
    result = report.result_of("200 Mb/s", QUICK_ROWS[0].name, "udp, p = 0.1", [turn(lines)], 1, 2, "")
    require(result.packets == statistics.fmean(line["packets"] for line in lines), f"{result}")
    for words, reason in ((["--loss-bound", "0.1"], "over MPI nothing can be lost"), (["--share", "0"], "--share"),
                          (["--layers", str(at / "none")], "--layers"), (["--share", "nan"], "--share")):
        done = subprocess.run([program, "--layers", str(given.layers), *words, "--check"], capture_output=True, text=True, check=False)
        require(done.returncode != 0 and reason in done.stderr, f"{words}: {done.returncode}, {done.stderr}")
    for text, reason in (("# nothing\n", "has no layers"), ("a 4xq\n", "this is no layer: a 4xq")):
        (at / "bad.txt").write_text(text)
        done = subprocess.run([program, "--layers", str(at / "bad.txt"), "--check"], capture_output=True, text=True, check=False)
        require(done.returncode != 0 and reason in done.stderr, done.stderr)


def main() -> None:
    percentiles_are_steps()
    intervals_hold_what_they_should()
    steps_become_a_result()
    what_the_processor_limits_is_told()
    results_are_added_to()
    rows_are_what_they_are_called()
    with tempfile.TemporaryDirectory() as directory:
        the_program_is_asked(sys.argv[1], pathlib.Path(directory))


main()
