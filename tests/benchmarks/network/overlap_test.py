#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What benchmarks/network/overlap.py makes of runs whose figures are made up: medians, verdicts, criteria, cells, plans of a session,
traces, and the arithmetic of the paper."""

import contextlib
import importlib.util
import io
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable
from unittest import mock

from here import NETWORK, python_with_matplotlib, require

if importlib.util.find_spec("matplotlib") is None:  # which experiment.py draws with
    os.execv(python_with_matplotlib(), [python_with_matplotlib(), *sys.argv])
sys.path.insert(0, str(NETWORK))

import emulation  # noqa: E402
import overlap  # noqa: E402
import overlap_alone  # noqa: E402
import overlap_paper  # noqa: E402
import overlap_report  # noqa: E402
import overlap_rows  # noqa: E402
import overlap_runs  # noqa: E402
import overlap_timeline  # noqa: E402
import plots  # noqa: E402
from overlap_report import Result, Turn  # noqa: E402
from overlap_rows import ROWS, Cell  # noqa: E402

CELL = Cell(2, "1 Gb/s", 0.4)


def turn(totals: list[float], **more) -> Turn:
    of_turn = {key: more.pop(key) for key in ("drift", "torch", "refusal", "link_share") if key in more}
    return Turn([{"total_seconds": total, "sent_bytes": 102.2e6, **more} for total in totals], 1.5, "abc", **of_turn)


def result(row: str, seconds: float, cell: Cell = CELL, **more) -> Result:
    return Result(cell, row, [turn([seconds], **more)])


def cells_of_row(results: list[Result], row: str) -> list[str]:
    return next(line for line in overlap_report.table(results).splitlines() if line.startswith(f"| {row} |")).split(" | ")


def medians_and_model() -> None:
    seen = Result(CELL, "everything, backward", [turn([1.0, 9.0, 1.1], exposed_seconds=0.5, predicted_exposed_seconds=0.52, drift=0.01),
                                                 turn([1.2, 1.3], exposed_seconds=0.5, predicted_exposed_seconds=0.52, drift=0.07)])
    require(seen.step_seconds == 1.2 and seen.median("exposed_seconds") == 0.5, f"not the median of all runs: {seen}")
    require(seen.median("hidden_seconds") is None, "a figure that no step has")
    require(seen.drift == 0.07, "not the largest drift")
    require(seen.is_as_predicted is True, "0.50 of 0.52 is as predicted")
    for waited, predicted, holds in ((0.5, 0.6, False), (0.5, 0.58, True), (0.009, 0.0, True), (0.012, 0.0, False)):
        found = result("everything, backward", 1, exposed_seconds=waited, predicted_exposed_seconds=predicted).is_as_predicted
        require(found is holds, f"waited {waited} where {predicted} was predicted: {found}")
    require(result("everything, step", 1, exposed_seconds=0.1).is_as_predicted is None, "judged without a prediction")
    line = cells_of_row([seen], "everything, backward")
    require(line[1:5] == ["1.200", "1.00 to 9.00", "0.800", "0.500"], f"{line}")
    require(line[9] == "0.855", f"the whole model once, at 1448 of 1514 bytes of 1 Gb/s, is not {line[9]} s")
    require("7 % **!**" in line[-1], f"a drift beyond 5 % is not marked: {line}")


def rivals() -> None:
    results = [result("plain MPI_Allreduce", 2.0), result("DDP as it comes", 1.0, torch="9.9"), result("DDP, fp16_compress_hook", 0.6),
               result("DDP, PowerSGD rank 2", 0.5), result("everything, backward", 1.1), result("everything, bf16, backward", 0.59),
               result("R = 0.95 ahead, step", 0.4),
               Result(CELL, "DDP, bf16_compress_hook", [turn([], refusal="Invalid scalar type")])]
    verdicts = {each.row: overlap_report.verdict(results, each) for each in results}
    # Each against those that lose no more of a sum.
    require(verdicts["everything, backward"] == "**loses**, 1.10 of DDP as it comes", str(verdicts))
    require(verdicts["everything, bf16, backward"] == "ties, 0.98 of DDP, fp16_compress_hook", str(verdicts))
    require(verdicts["R = 0.95 ahead, step"] == "0.80 of DDP, PowerSGD rank 2", str(verdicts))
    require(verdicts["plain MPI_Allreduce"] == "" and verdicts["DDP as it comes"] == "", "a rival has rivals")
    text = overlap_report.table(results)
    require("refused: Invalid scalar type" in text and "DDP of PyTorch 9.9 over gloo" in text, text)
    require(overlap_report.best_rival([result("everything, step", 1, Cell(4, "1 Gb/s", 0.4)), results[1]],
                                      result("everything, step", 1, Cell(4, "1 Gb/s", 0.4))) is None, "a rival of another cell")


def criteria() -> None:
    cell = overlap_rows.cell_of_ratio(4, "1 Gb/s", 1)
    require(cell.compute_seconds == 1.28, f"C of M/C = 1: {cell}")
    require(overlap_rows.cell_of_ratio(4, "1 Gb/s", 0.5).compute_seconds == 2.57, "M/C = 1/2 has twice as long a computation")
    for workers, rate in ((1, "1 Gb/s"), (4, "unlimited")):
        try:
            overlap_rows.cell_of_ratio(workers, rate, 1)
        except ValueError as error:
            require(f"not {workers} at {rate}" in str(error), f"{error}")
        else:
            require(False, f"M/C where M is 0: {workers} workers, {rate}")
    dense = result("everything, no overlap", 2.0, cell)
    held = [dense, result("everything, owners, step", 1.2, cell),
            result("backward, pairwise", 1.40, cell), result("backward, ring", 1.30, cell), result("backward, by_cost", 1.35, cell)]
    verdicts = [line[-1] for line in overlap_report.criteria(held)]
    require(verdicts == ["yes"] * 3, f"{overlap_report.criteria(held)}")
    broken = [dense, result("everything, owners, step", 1.3, cell),
              result("backward, pairwise", 1.5, cell), result("backward, ring", 1.2, cell), result("backward, by_cost", 1.3, cell)]
    verdicts = [line[-1] for line in overlap_report.criteria(broken)]
    require(verdicts == ["**no**"] * 3, f"{overlap_report.criteria(broken)}")
    for workers, seconds, expected in ((4, 0.44, ["yes", "yes"]), (4, 0.46, ["**no**", "yes"]), (2, 0.46, ["yes"])):
        cell = Cell(workers, "1 Gb/s", 0.4)
        found = [result(*taken, cell) for taken in (("R = 0.95 at_end, no overlap", 0.6), ("everything, step", 1.0),
                                                    ("DDP, buckets as ours", 1.0), ("R = 0.95 ahead, step", seconds))]
        verdicts = [line[-1] for line in overlap_report.criteria(found)]
        require(verdicts == expected, f"{workers} workers, {seconds} s: {verdicts}")
    # At another M/C nothing is asked of the orders.
    slower = overlap_rows.cell_of_ratio(4, "1 Gb/s", 2)
    require(overlap_report.criteria([result(each.row, each.step_seconds, slower) for each in held[:2]]) == [], "asked at M/C = 2")


def criteria_of_cells() -> None:
    """What is asked of some cells alone, and of each by itself."""
    def asked(results: list[Result]) -> list[tuple[str, ...]]:
        return [(cell, holds) for cell, _, _, holds in overlap_report.criteria(results)]

    four, slow, one = Cell(4, "1 Gb/s", 0.388), Cell(4, "100 Mb/s", 0.388), Cell(1, "1 Gb/s", 0.388)
    for name in ("R = 0.95 ahead, step", "R = 0.95 ahead, backward"):
        for waited, holds in ((0.029, "yes"), (0.031, "**no**")):
            found = [result(name, 0.4, cell, exposed_seconds=waited) for cell in (four, slow, CELL)]
            require(asked(found) == [(four.name, holds)], f"{name} waits {waited} s: {overlap_report.criteria(found)}")
    require(asked([result("R = 0.95 ahead, step", 0.4, four)]) == [], "judged by what no step says")
    for seconds, holds in ((1.009, "yes"), (1.011, "**no**")):
        found = [result(*taken, cell) for cell in (one, CELL) for taken in (("everything, no overlap", 1), ("everything, backward", seconds))]
        require(asked(found) == [(one.name, holds)], f"{seconds}: {overlap_report.criteria(found)}")

    beside_ddp = ("everything, backward", "everything, step", "everything, ring, backward", "everything, owners, step",
                  "everything, ring, owners, step")
    others = ("everything, bf16, owners, step", "plain MPI_Allreduce")  # of other bits, and a rival
    for ddps, said in ((["DDP as it comes"], "DDP as it comes"), (["DDP as it comes", "DDP, buckets as ours"], "DDP with the same buckets")):
        for seconds, holds in ((1.01, "yes"), (1.03, "**no**")):
            # The last of them counts, and that of another cell does not.
            found = [result("DDP as it comes", 9, slow), *(result(name, 1 if name == ddps[-1] else 9, four) for name in ddps),
                     *(result(name, seconds, four) for name in (*beside_ddp, *others))]
            lines = [line[1:] for line in overlap_report.criteria(found)]
            require(lines == [(f"{name} not slower than {said}", f"{seconds:.2f} of it", holds) for name in beside_ddp], f"{lines}")

    for share, holds in ((1.029, "yes"), (0.969, "**no**")):
        found = [Result(four, name, [*result(name, 1, four).turns, turn([1.0], link_share=one)]) for name, one in
                 (("everything, step", 1.01), ("everything, backward", share))]
        lines = [line[2:] for line in overlap_report.criteria(found)]
        require(lines == [(f"2 rows, {100 * (share - 1):+.1f} % at most", holds)], f"{lines}")

    exact, wrong = ({"exposed_seconds": 0.5, "predicted_exposed_seconds": predicted} for predicted in (0.5, 0.9))
    found = [result("everything, backward", 1, four, **exact), result("everything, step", 1, four, **exact),
             result("everything, backward", 1, slow, **exact), result("everything, step", 1, slow, **wrong)]
    lines = overlap_report.criteria(found)
    require([(line[0], *line[2:]) for line in lines] == [(four.name, "2 of 2 rows", "yes"), (slow.name, "1 of 2 rows", "**no**")], f"{lines}")


def rows_and_cells() -> None:
    for each in ROWS.values():
        if each.is_ddp:
            continue
        runs = each.options[each.options.index("--runs") + 1]
        require(each.directory == ("plain" if "mpi_allreduce" in each.options else runs), f"another directory than the harness writes: {each}")
    # As plan.hpp says: 8 P alpha/beta, down to a power of two.
    for workers, rate, size in ((2, "1 Gb/s", 1 << 19), (4, "1 Gb/s", 1 << 20), (2, "100 Mb/s", 1 << 16), (4, "10 Gb/s", 1 << 23)):
        require(Cell(workers, rate, 1).bucket_bytes == size, f"buckets of {Cell(workers, rate, 1).bucket_bytes} at {workers}, {rate}")
    same = ROWS["DDP, buckets as ours"].options_in(CELL)
    require(same == ["--bucket-mb", "0.5"], f"other buckets than ours: {same}")
    require(ROWS["everything, step"].options_in(CELL)[-2:] == ["--bucket-bytes", str(1 << 19)], "no buckets")
    require(ROWS["backward, layer by layer"].options_in(CELL).count("--bucket-bytes") == 1, "two sizes of buckets")
    found, left_out = overlap_rows.possible(["everything, step", "everything, owners, step", "DDP as it comes"],
                                            "--overlap --topology --selection --runs", "resnet50")
    require(found == ["everything, step", "DDP as it comes"], f"{found}")
    require(left_out == {"everything, owners, step": "the harness has no such options"}, f"{left_out}")
    slow = Cell(4, "100 Mb/s", 0.4)
    require(overlap_runs.steps_of(ROWS["everything, step"], slow, 10) == overlap_runs.SLOW_STEPS, "many steps of 13 s")
    require(overlap_runs.steps_of(ROWS["R = 0.95 ahead, step"], slow, 10) == 10, "few steps that are quick")
    for name, counts in (("everything, step", True), ("everything, no overlap", True), ("R = 0.95 ahead, step", False), ("DDP as it comes", False),
                         ("plain MPI_Allreduce", False), (overlap_rows.ALONE, False)):
        require(ROWS[name].sends_everything == counts, f"{name} sends everything, and counts it: {not counts}")
    # Two steps that count, the three before them, and where a step waits in the next one, one behind them.
    two = [{"sent_bytes": 100}, {"sent_bytes": 100}]
    require(overlap_runs.share_of_counted(510, two, ROWS["everything, backward"]) == 1.02, "the steps before are left out")
    require(overlap_runs.share_of_counted(612, two, ROWS["everything, step"]) == 1.02, "the step behind is left out")
    require(overlap_runs.share_of_counted(510, [{"sent_bytes": 0}], ROWS["everything, step"]) is None, "a share of nothing")


def steps_that_count() -> None:
    """Not those before, nor the last of a row whose steps wait in the next one: it would be the shortest of all."""
    def wrote(cluster, machines, words: list[str], seconds: float = 0) -> str:
        directory = pathlib.Path(words[words.index("--output") + 1]) / "without"
        directory.mkdir(parents=True)
        steps = int(words[words.index("--steps") + 1])
        lines = [{"step": step, "total_seconds": float(step), "sent_up": 0.5, "sent_down": 0.5} for step in range(1, steps + 1)]
        (directory / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
        return ""

    for name, steps in (("everything, backward", 7), ("everything, step", 8)):
        with mock.patch.object(overlap_runs, "mpirun", side_effect=wrote) as run:
            found = overlap_runs.run_harness("program", ROWS[name], CELL, mock.MagicMock(), 4, pathlib.Path("recording"), [])
        words = run.call_args.args[2]
        require(words[words.index("--steps") + 1] == str(steps), f"{name}: {words}")
        require([each["total_seconds"] for each in found] == [4, 5, 6, 7], f"{name}: {found}")


def networks() -> None:
    """What goes by gradients that are not recorded is left out by name; the dense table, which sends everything, is run whole."""
    every_option = " ".join(word for each in ROWS.values() for word in each.options)
    require(overlap_rows.possible(list(ROWS), every_option, "resnet50") == (list(ROWS), {}), "a row of ResNet-50 is left out")
    found, left_out = overlap_rows.possible(list(ROWS), every_option, "vgg16")
    by_numbers = {name for name in ROWS if name.startswith("R = ") or "PowerSGD" in name}
    require(left_out == {name: "no gradients of vgg16 are recorded" for name in by_numbers}, f"{left_out}")
    require(set(found) == set(ROWS) - by_numbers, f"{found}")
    table = overlap_rows.TABLES["dense"]
    require(set(table) <= set(found) and len(set(table)) == 8, f"{table}")
    require({"DDP as it comes", "DDP, fp16_compress_hook"} <= set(table), f"no VGG-16 beside DDP: {table}")


def sessions() -> None:
    """What is there is not run again, and no row begins that would end too late."""
    with tempfile.TemporaryDirectory() as directory:
        output = pathlib.Path(directory)
        kept = [Result(CELL, "everything, step", [turn([1.0])]), Result(CELL, "DDP, bf16_compress_hook", [turn([], refusal="no")])]
        overlap_report.write(output, kept, {"date": "today", **emulation.EMULATION})
        sys.argv = ["overlap", "--workers", "2", "--rates", "1 Gb/s", "--rounds", "2", "--budget-minutes", "1", "--output", directory]
        session = overlap.Session(overlap.parse())
        require(session.results == kept, "results are not read as they were written")
        require([session.missing(CELL, name) for name in ("everything, step", "DDP, bf16_compress_hook", "DDP as it comes")] == [1, 0, 2],
                "another number of missing turns")
        session.keep(CELL, "everything, step", turn([3.0]))
        require(session.missing(CELL, "everything, step") == 0, "a turn was not counted")
        read = overlap_report.read(output)
        require([step["total_seconds"] for each in read for step in each.steps] == [1.0, 3.0], f"turns are not kept: {read}")
        require(session.has_time_for(ROWS["everything, step"], CELL), "a quick row does not fit into a minute")
        require(not session.has_time_for(ROWS["everything, step"], Cell(4, "100 Mb/s", 0.4)), "steps of 13 s fit into a minute")
        require(session.calibrates(CELL) and not session.calibrates(Cell(1, "1 Gb/s", 0.4)), "one worker measures a network")

        # Runs of other links are not mixed with those of these, be they one of those there or all.
        for other, said in (({"congestion_control": "bbr"}, "congestion_control bbr, segments offloaded"),
                            ({"segments": "packets"}, "congestion_control cubic, segments packets")):
            overlap_report.write(output, kept, {**emulation.EMULATION, **other})
            refused(lambda: overlap.Session(overlap.parse()), directory, said)
            (output / "results.json").unlink()
        overlap_report.write(output, kept, {"date": "yesterday"})
        refused(lambda: overlap.Session(overlap.parse()), directory, "congestion_control not said, segments not said")


def refused(begin: Callable[[], object], directory: str, said: str) -> None:
    expected = f"{directory} has runs with {said}. This one has congestion_control cubic, segments offloaded: give another --output"
    try:
        begin()
    except RuntimeError as error:
        require(str(error) == expected, f"{error}, not {expected}")
    else:
        require(False, f"it goes on where runs have {said}")


def timelines() -> None:
    def event(name: str, phase: str, at: float, step: int = 1) -> dict:
        return {"name": name, "ph": phase, "ts": at * 1e6, "args": {"step": step}}

    trace = json.dumps({"traceEvents": [
        event("computation 0", "B", 1.0), event("collective 0", "B", 1.5), event("collective 0", "E", 1.8), event("computation 0", "E", 2.0),
        event("waiting 0", "B", 2.0), event("collective 1", "B", 1.9), event("collective 1", "E", 2.4), event("waiting 0", "E", 2.4),
        event("computation 0", "B", 2.5), event("computation 0", "E", 3.0)]})
    steps = overlap_timeline.steps_of(trace)
    require(len(steps) == 1, f"the last step is not whole: {steps}")
    step = overlap_timeline.typical(steps)
    near = [round(number, 6) for span in (step.computation, *step.waiting, *step.collectives) for number in (span.begin, span.end)]
    require(near == [0, 1.0, 1.0, 1.4, 0.5, 0.8, 0.9, 1.4] and step.buckets == 2, f"{step}")
    picture = io.StringIO()
    plots.draw_timeline("made up", [("a run", step)]).savefig(picture, format="svg")
    require("waits for sums" in picture.getvalue() or len(picture.getvalue()) > 1000, "no picture")


def clusters() -> None:
    """Links are the same in all of the study, with short bursts where they are slow."""
    for rate, bits, queue in (("100 Mb/s", 1e8, 625_000), ("1 Gb/s", 1e9, None), ("unlimited", None, None)):
        with mock.patch.object(emulation, "Cluster") as made:
            emulation.cluster_of(4, rate)
        require(made.call_args == mock.call(4, bits, queue_bytes=queue, congestion="cubic", offload=True), f"{rate}: {made.call_args}")
    require(emulation.EMULATION == {"congestion_control": "cubic", "segments": "offloaded"}, f"{emulation.EMULATION}")


def alone() -> None:
    said = [{"way": way, "bytes": 4096, "seconds": seconds}
            for way, seconds in (("ring", 2e-3), ("pairwise", 1e-3), ("pairwise, bfloat16", 1e-4), ("MPI_Allreduce", 9e-4), ("gloo", 3e-3))]

    def measured(rate: str) -> list[dict]:
        cluster = mock.MagicMock()
        cluster.__enter__.return_value.keeps_order = True
        with (mock.patch.object(overlap_alone, "cluster_of", return_value=cluster) as made,
              mock.patch.object(overlap_alone, "commit", return_value="abc"),
              mock.patch.object(overlap_alone, "_over_mpi", side_effect=[said, [], [], []])):
            lines = overlap_alone.measure("program", None, 2, rate, [4096], 1)
        require(made.call_args == mock.call(2, rate), f"another cluster: {made.call_args}")
        return lines

    lines = measured("1 Gb/s")
    environment = {"commit": "abc", **emulation.EMULATION, "packet_steering": True}
    require(all(environment.items() <= each.items() for each in lines), f"of what, over what? {lines}")
    require(not any(each["within_burst"] for each in lines), f"4096 bytes in 0.1 ms are no more than 1 Gb/s: {lines}")
    text = overlap_alone.table(lines)
    # Half the bits are no answer to a rival that keeps them.
    require("| the best of ours over the best rival | **loses**, 1.11 |" in text and "burst" not in text, text)
    large = [{**lines[0], "bytes": size, "seconds": seconds} for size, seconds in ((8 << 20, 0.9994), (16 << 20, 1.2834))]
    require("| ring | 999 | 1,283 |" in overlap_alone.table(large), overlap_alone.table(large))
    # They take 0.34 ms at 100 Mb/s, and 0.17 ms in half the bits.
    slow = measured("100 Mb/s")
    require([each["way"] for each in slow if each["within_burst"]] == ["pairwise, bfloat16"], f"{slow}")
    text = overlap_alone.table(slow)
    require("| pairwise, bfloat16 | 0.1 **!** |" in text and text.count("**!**") == 2, text)
    for way, rate, within in (("ring", "100 Mb/s", True), ("pairwise, bfloat16", "100 Mb/s", False), ("ring", "unlimited", False)):
        found = overlap_alone.is_within_burst(2, rate, {"way": way, "bytes": 4096, "seconds": 2e-4})
        require(found is within, f"{way} in 0.2 ms at {rate} is within a burst: {found}")
    require([overlap_alone.size_name(size) for size in (4096, 1 << 20, 102_228_128)] == ["4 KiB", "1 MiB", "102.2 MB"], "sizes")
    with tempfile.TemporaryDirectory() as directory:
        (pathlib.Path(directory) / "alone.json").write_text(json.dumps([{**lines[0], "congestion_control": "bbr"}]))
        sys.argv = ["overlap", "--program", "program", "--torch-python", "/nonexistent", "--output", directory]
        refused(overlap_alone.main, directory, "congestion_control bbr, segments offloaded")


def paper() -> None:
    resnet, vgg = overlap_paper.NETWORKS
    require((round(resnet.node_share, 2), round(vgg.node_share, 2)) == (10.68, 9.83), "sigma eta")
    require((round(resnet.least_efficiency, 3), round(vgg.least_efficiency, 3)) == (0.334, 0.307), "eta")
    one = [overlap_paper.efficiency(scheme, vgg, 1, 4096) for scheme in overlap_paper.SCHEMES]
    require(all(abs(each - 1) < 1e-12 for each in one), f"one node has nobody to wait for: {one}")
    for nodes in (2, 64, 256):
        reached = [overlap_paper.efficiency(scheme, vgg, nodes, 4096) for scheme in overlap_paper.SCHEMES]
        require(reached == sorted(reached) and reached[0] < reached[2], f"{nodes} nodes: {reached}")
    # 494 MB of gradients stay where they are, and inputs and errors of 4096/256 images a node move.
    of = overlap_paper.MIDDLE
    less = (overlap_paper.communication_seconds(vgg, 256, 4096, of, False) - overlap_paper.communication_seconds(vgg, 256, 4096, of, True))
    weights = sum(inputs * outputs for inputs, outputs in vgg.connected)
    errors = 16 * sum(inputs + 256 * outputs for inputs, outputs in vgg.connected)
    require(abs(less * of.bandwidth - 4 * 255 / 256 * (weights - errors)) < 1, f"activations save {less * of.bandwidth} bytes")
    require(abs(4 * weights - 494e6) < 1e6, "VGG-16's fully connected layers have 494 MB")


def main() -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        for check in (medians_and_model, rivals, criteria, criteria_of_cells, rows_and_cells, steps_that_count, networks, sessions, timelines, clusters, alone, paper):
            check()


main()
