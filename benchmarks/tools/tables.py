#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes the tables of results on the documentation's pages, between <!-- table: NAME --> and <!-- end -->, from benchmarks/results.
With --check it changes nothing, and fails where a page differs. Its lookups are also those of docs/claims.toml: each finds one row, or fails."""

import collections
import functools
import json
import math
import pathlib
import re
import statistics
import sys
from types import SimpleNamespace

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
sys.path[:0] = [str(ROOT / "benchmarks/learning"), str(ROOT / "benchmarks/tools")]
import digest  # noqa: E402
import report  # noqa: E402
import suite  # noqa: E402

MARKED = re.compile(r"<!-- table: (\w+) -->\n(.*?)<!-- end -->", re.DOTALL)
MS = 1e-3
PAPER = {"everything": (0.388, 0.073, 3.457, 3.918), "dropping": (0.408, 0.085, 0.182, 0.675)}  # Table 1, first topology


@functools.cache
def record(name: str):
    return json.loads((RESULTS / name).read_text())


def only(found: list, sought):
    if len(found) != 1:
        raise LookupError(f"{len(found)} records are {sought}")
    return found[0]


# Seconds, bytes and shares; never milliseconds, megabytes or per cent.


def hook(name: str, network: str = "1Gbs") -> SimpleNamespace:
    of = record(f"pytorch/{network}.json")
    row = of["medians"][name]
    return SimpleNamespace(seconds=row["step"], least=row["least step"], bytes=row["bytes"], n=of["steps"])


def allreduce(row: str, workers: int = 4, rate: str = "1 Gb/s", compute: float = 0.388, network: str = "resnet50") -> SimpleNamespace:
    cell = {"workers": workers, "rate": rate, "compute_seconds": compute, "network": network}
    of = only([each for each in record("overlap/results.json")["results"] if each["cell"] == cell and each["row"] == row], (cell, row))
    steps = [step for turn in of["turns"] for step in turn["steps"]]
    seconds = [step["total_seconds"] for step in steps]
    return SimpleNamespace(seconds=statistics.median(seconds), least=min(seconds), most=max(seconds), n=len(seconds),
                           bytes=statistics.median(step["sent_bytes"] for step in steps))


def server(row: str, rate: str = "1 Gb/s", topology: str = "first") -> SimpleNamespace:
    if row in PAPER:
        worker, serving, communication, seconds = PAPER[row]
        return SimpleNamespace(worker=worker, server=serving, communication=communication, seconds=seconds, n=1, up=math.nan, down=math.nan)
    of = only([each for each in record("network/results.json")["results"] if each["rate"] == rate and each["row"] == row
               and each["topology"].startswith(f"{topology},")], (row, rate, topology))
    return SimpleNamespace(worker=of["worker_seconds"], server=of["server_seconds"], communication=of["communication_seconds"],
                           seconds=of["total_seconds"], up=of["sent_up"], down=of["sent_down"], n=of["steps"])


def incast(transport: str, row: str = "4 to 1, 1 MB, queue 64 KiB", rate: str = "200 Mb/s") -> SimpleNamespace:
    of = only([each for each in record("incast/results.json")["results"] if each["rate"] == rate and each["row"] == row
               and each["transport"] == transport], (transport, row, rate))
    return SimpleNamespace(seconds=of["seconds"]["mean"], interval=of["seconds"]["mean_interval"], p99=of["seconds"]["p99"], n=of["steps"])


@functools.cache
def outcomes(task: str):
    return report.outcomes(report.read(RESULTS / "learning" / task))


def learned(title: str, steps: int = 2000, task: str = "char-gpt", workers: int = 4) -> SimpleNamespace:
    """`to_dense` and the errors are those of seeds that nothing was tuned on, where there are any."""
    groups = outcomes(task)
    of = only([each for each in groups[workers, steps] if report.title(each.best.row) == title], (title, task, steps))
    behind, counted = of.behind(report.dense_of(groups, workers, steps, of.best.row.optimizer)), of.counted()
    if title.startswith("dense"):
        counted = best_of_untuned(of) or counted
    top1 = [run.top1 for run in counted]
    losses = [run.sort_key() for run in counted]
    return SimpleNamespace(loss=statistics.fmean(losses), error=error_of(losses), to_dense=statistics.fmean(behind) if behind else math.nan, to_dense_error=error_of(behind),
                           up=of.best.up_share, down=of.best.down_share, n=len(counted), tried=of.tried, rate=of.best.row.rate,
                           seeds=[run.row.seed for run in counted],
                           top1=math.nan if None in top1 else statistics.fmean(top1), top1_error=None if None in top1 else error_of(top1))


def best_of_untuned(of) -> list:
    """Of the dense run, which all are compared with, the runs of the learning rate that is best over the seeds that nothing was tuned on."""
    by_rate: dict = {}
    for run in of.all_runs:
        if run.row.seed != report.TUNING_SEED:
            by_rate.setdefault(run.row.rate, []).append(run)
    return min(by_rate.values(), key=lambda runs: statistics.fmean(run.sort_key() for run in runs), default=[])


def error_of(of: list) -> "float | None":
    return statistics.stdev(of) / math.sqrt(len(of)) if len(of) > 1 else None


def cells(table: str) -> dict[str, list[str]]:
    """The cells of each row of a Markdown table, by the first one."""
    lines = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines() if line.startswith("|")]
    return {line[0]: line[1:] for line in lines if not set("".join(line)) <= set("-: ")}


@functools.cache
def micro(title: str) -> dict[str, list[str]]:
    _, results, more = suite.read(RESULTS / "results.json")
    return cells(digest.tables(results, more)[title])


def ratios_of(name: str) -> list[float]:
    """Of ./benchmarks/run: a ratio that has a limit, at each instruction set and optimization."""
    lines = (RESULTS / "ratios.txt").read_text().splitlines()
    return [float(line.split()[1]) for line in lines if line.startswith(f"{name}/")]


def gpu(row: str, column: int = 0) -> float:
    """Of the record on the H200: a cell as it stands there, µs of the worker's step and ms of the hook."""
    return float(cells((RESULTS / "cuda/h200.txt").read_text())[row][column].replace(",", ""))


def s(value: float, digits: int = 3) -> str:
    return "" if math.isnan(value) else f"{value:.{digits}f}"


def percent(value: float, digits: int = 2) -> str:
    return "" if math.isnan(value) else f"{100 * value:.{digits}f}"


def pm(value: float, error: "float | None", digits: int = 3, sign: str = "+") -> str:
    text = f"{value:{sign}.{digits}f}".replace("-", "−") + ("" if error is None else f" ± {error:.{digits}f}")
    return "" if math.isnan(value) else text


def verdict(ratio: float, least: "float | None" = None) -> str:
    """By the medians, and the least seconds where they are known: within 3 % by either there is no difference."""
    both = [ratio, ratio if least is None else least]
    return "**gains**" if max(both) < 0.97 else "**loses**" if min(both) > 1.03 else "no difference"


def compared(what: str, ours, name: str, theirs):
    least = ours.least / theirs.least if hasattr(ours, "least") and hasattr(theirs, "least") else None
    ratio = ours.seconds / theirs.seconds
    return [what, name, s(theirs.seconds), s(ours.seconds), f"{ratio:.2f}", ours.n, verdict(ratio, least)]


HOOKS = ("plain allreduce", "DDP, no hook", "fp16_compress_hook", "bf16_compress_hook", "powerSGD_hook, rank 1", "powerSGD_hook, rank 4",
         "lamina, R = 0", "lamina, R = 0, overlap", "lamina, R = 0.95", "lamina, R = 0.95, overlap", "lamina, R = 0.95, bfloat16",
         "lamina, R = 0.99, fragments")
SUMS = ("DDP as it comes", "DDP, fp16_compress_hook", "DDP, PowerSGD rank 2", "everything, no overlap", "everything, backward",
        "everything, owners, step", "R = 0.95 at_end, no overlap", "R = 0.95 ahead, step",
        "R = 0.95 ahead, bf16, step", "R = 0.99 in fragments, ahead, step")
SERVED = ("nodes, everything", "nodes, R = 0.95", "nodes, agreed, R = 0.95", "nodes, agreed, budget 3 %",
          "flat, everything", "flat, agreed, budget 3 %", "allreduce, everything", "allreduce, agreed, R = 0.95")
PLAIN, TIMER, LOSSLESS, LOSSY = "MPI, cubic", "MPI, cubic, rto_min 5 ms", "udp, p = 0", "udp, p = 0.1"
BASE = "4 to 1, 1 MB, queue 64 KiB"
INCASTS = (BASE, "1 to 1, 1 MB, queue 64 KiB", "8 to 1, 1 MB, queue 64 KiB", "4 to 1, 1 MB, queue 50 ms",
           f"{BASE}, loss 5 %", "8 to 1, 0.25 MB, queue 64 KiB")
BY_SCORE = "local, by score, int4, momentum in time"
TERNARY = "local, by score, ternary, error feedback"
ENTROPY, TRITS, BLOCKS, TOP = (f"local, in levels, {code}" for code in ("entropy, every 3 steps", "trits", "blocks", "top, every 3 steps"))
LOCO = "SparseLoCo, 256 of 4,096 every 3 steps, mean over all workers"
LOCO_BACK = "SparseLoCo, 640 of 4,096 every 3 steps, mean over all workers, answers rounded"
NESTEROV = f"{BY_SCORE}, nesterov"
FRUGAL = f"{BY_SCORE}, 0.3%, nesterov"
# Titles of the study, in the words of the pages.
TEXT = {"dense, fp32": "dense", LOCO: "SparseLoCo, every 3 steps", "DeMo, bfloat16, 32 a tile": "DeMo, 32 components a tile",
        TERNARY: "**local updates, ternary**", BY_SCORE: "local updates, int4", ENTROPY: "−3 to 3 of one step a message, entropy coded",
        TRITS: "−1, 0, 1 of a scale for each 4,096", BLOCKS: "−1, 0, 1 of a scale for each 64, by their mean",
        TOP: "the largest, with their positions", "local, fragments in turn (Streaming DiLoCo), int4": "round robin (Streaming DiLoCo)",
        "local, all at once (DiLoCo), int4": "all fragments (DiLoCo)", f"{LOCO}, answers rounded": "SparseLoCo, compressed downlink",
        LOCO_BACK: "SparseLoCo, 640 of 4,096, compressed downlink",
        f"{BY_SCORE}, 1 step later": "local updates, int4, `delay=1`",
        f"{BY_SCORE}, 0.3%": "local updates, int4, fewer bytes", "PowerSGD, fp32, rank 1": "PowerSGD, rank 1",
        "1-bit Adam, the first 50 steps dense": "1-bit Adam",
        "gradients dropped, R = 0.95, fp32": "layer dropping, zeros for dropped layers", "one worker, no communication": "one worker, no communication"}
CODES = (ENTROPY, TRITS, BLOCKS, TERNARY, TOP)
LONG = ("dense, fp32", LOCO, "DeMo, bfloat16, 32 a tile", TERNARY, BY_SCORE, "local, fragments in turn (Streaming DiLoCo), int4",
        "local, all at once (DiLoCo), int4", LOCO_BACK, f"{BY_SCORE}, 1 step later", f"{BY_SCORE}, 0.3%", "PowerSGD, fp32, rank 1")
SHORT = ("dense, fp32", LOCO, "1-bit Adam, the first 50 steps dense", TERNARY, BY_SCORE, "DeMo, bfloat16, 32 a tile",
         "one worker, no communication",
         "gradients dropped, R = 0.95, fp32")
STUDY = ["method", "uplink, %", "downlink, %", "loss", "to dense", "seeds", "settings tried"]


def studied(titles, steps):
    for title in titles:
        of = learned(title, steps)
        yield [TEXT[title], percent(of.up), percent(of.down), pm(of.loss, of.error, sign=""),
               "" if title == "dense, fp32" else pm(of.to_dense, of.to_dense_error), of.n, of.tried]


def coded():
    for title in CODES:
        of = learned(title)
        yield [TEXT[title], pm(of.loss, of.error, sign=""), pm(of.to_dense, of.to_dense_error)]


# The rows on a GPU: those of a record that are not as here are of another setting.
ON_GPU = {"task": "text", "opt": "adamw", "W": 4, "steps": 2000}
GPU_SETTINGS = {"text, AdamW, 4 workers": {}, "8 workers": {"W": 8}, "16 workers, 1,000 steps": {"W": 16, "steps": 1000},
                "6,000 steps": {"steps": 6000}, "Muon": {"opt": "muon"}, "0.3 % each way": {"H": 10.0},
                "images, SGD, top-1 in %": {"task": "images", "opt": "sgd", "steps": 1500}}
GPU_SCHEMES = ("dense", "levels", "sparseloco", "int4", "diloco4")


def gpu_score(scheme: str, setting: dict) -> str:
    """The mean at the best of the rates that have most seeds."""
    wanted = ON_GPU | setting
    of_rates = collections.defaultdict(list)
    for line in (RESULTS / "learning/gpu/records.jsonl").read_text().splitlines():
        of = json.loads(line)
        is_other = of.get("H", 3) not in (3, 13) if "H" not in wanted else of.get("H", wanted["H"]) != wanted["H"]
        if of["scheme"] == scheme and not is_other and all(of[name] == wanted[name] for name in ON_GPU):
            of_rates[of["rate"]].append(of.get("loss", of.get("top1")))
    most = max(map(len, of_rates.values()), default=0)
    best = (max if wanted["task"] == "images" else min)((scores for scores in of_rates.values() if len(scores) == most),
                                                        key=statistics.fmean, default=[math.nan])
    return pm(statistics.fmean(best), error_of(best), sign="", digits=1 if wanted["task"] == "images" else 3)


def on_gpu():
    for name, setting in GPU_SETTINGS.items():
        yield [name, *(gpu_score(scheme, setting) for scheme in GPU_SCHEMES)]


def images():
    for title in IMAGES:
        of = learned(title, 5000, "cifar")
        yield [IMAGES[title], percent(of.up), percent(of.down), pm(of.loss, of.error, sign=""),
               pm(100 * of.top1, None if of.top1_error is None else 100 * of.top1_error, 2, ""), of.n, of.tried]


IMAGES = {"dense, fp32, nesterov": "dense", FRUGAL: "**local updates, by score, outer momentum 0.75**", NESTEROV: "**the same, more bytes**",
          f"{BY_SCORE.removesuffix(', momentum in time')}, nesterov": "local updates, by score, averaged",
          "local, fragments in turn (Streaming DiLoCo), int4, nesterov": "round robin (Streaming DiLoCo)",
          "local, all at once (averaged), int4, nesterov": "all fragments, averaged",
          "DGC, fp32, 0.5 % of the elements, momentum correction 0.9, sgd": "DGC", "PowerSGD, bfloat16, rank 2, nesterov": "PowerSGD, rank 2, 16 bits",
          "PowerSGD, fp32, rank 1, nesterov": "PowerSGD, rank 1", f"{LOCO}, nesterov": "SparseLoCo, every 3 steps",
          "gradients dropped, R = 0.95, fp32, sgd": "**layer dropping**, no momentum", "dense, fp32, sgd": "dense, no momentum"}


def summary():
    ddp, loopback = hook("DDP, no hook"), hook("DDP, no hook", "loopback")
    yield compared("PyTorch hook, R = 0.95, 1 Gb/s", hook("lamina, R = 0.95"), "DDP", ddp)
    yield compared("the same", hook("lamina, R = 0.95"), "DDP, bf16 hook", hook("bf16_compress_hook"))
    yield compared("the same", hook("lamina, R = 0.95"), "PowerSGD, rank 1", hook("powerSGD_hook, rank 1"))
    yield compared("the same, over loopback", hook("lamina, R = 0.95", "loopback"), "DDP", loopback)
    yield compared("PyTorch hook, R = 0, 1 Gb/s", hook("lamina, R = 0"), "DDP", ddp)
    yield compared("C++ all-reduce, R = 0.95, 1 Gb/s", allreduce("R = 0.95 ahead, step"), "DDP, bf16 hook", allreduce("DDP, bf16_compress_hook"))
    yield compared("the same, R = 0", allreduce("everything, backward"), "DDP", allreduce("DDP as it comes"))
    yield compared("the same, R = 0, shard owners", allreduce("everything, owners, step"), "DDP", allreduce("DDP as it comes"))
    yield compared("the same, R = 0.95, 100 Mb/s", allreduce("R = 0.95 ahead, step", rate="100 Mb/s"), "PowerSGD, rank 2",
                   allreduce("DDP, PowerSGD rank 2", rate="100 Mb/s"))
    yield compared("parameter server, R = 0.95, 1 Gb/s", server("nodes, R = 0.95"), "the same server, R = 0", server("nodes, everything"))
    yield compared("UDP, bound 0.1, 200 Mb/s", incast(LOSSY), "MPI over TCP, short timer", incast(TIMER))
    yield compared("the same, one sender", incast(LOSSY, INCASTS[1]), "MPI over TCP, short timer", incast(TIMER, INCASTS[1]))
    ours, theirs = gpu("lamina, R = 0.95"), gpu("DDP, no hook")
    yield ["PyTorch hook on an H200, nothing sent", "DDP", s(theirs * MS, 4), s(ours * MS, 4), f"{ours / theirs:.2f}", "", verdict(ours / theirs)]


def learning_summary():
    for what, title, steps in (("AdamW, local updates, ternary, 2,000 steps", TERNARY, 2000), ("AdamW, SparseLoCo (not in the library), 2,000 steps", LOCO, 2000),
                               ("the same, a compressed downlink", LOCO_BACK, 2000), ("DeMo (not in the library), 2,000 steps", "DeMo, bfloat16, 32 a tile", 2000),
                               ("AdamW, layer dropping, 300 steps", "gradients dropped, R = 0.95, fp32", 300)):
        of = learned(title, steps)
        yield [what, percent(of.up), percent(of.down), pm(of.to_dense, of.to_dense_error), of.n]
    for what, title in (("SGD with momentum, local updates, by score, 5,000 steps", FRUGAL), ("SGD without momentum, layer dropping, 5,000 steps", "gradients dropped, R = 0.95, fp32, sgd")):
        of = learned(title, 5000, "cifar")
        yield [what, percent(of.up), percent(of.down), pm(of.to_dense, of.to_dense_error), of.n]


def hooks():
    dense = hook("DDP, no hook")
    for name in HOOKS:
        of = hook(name)
        yield [name, f"{of.bytes / 1e6:.1f}", s(of.seconds), s(of.least), f"{of.seconds / dense.seconds:.2f}", of.n]


def all_reduces():
    for row in SUMS:
        yield [row, *(s(allreduce(row, workers, rate).seconds) for workers, rate in
                      ((4, "100 Mb/s"), (2, "1 Gb/s"), (4, "1 Gb/s"), (4, "10 Gb/s"))),
               f"{allreduce(row).least:.2f}–{allreduce(row).most:.2f}", allreduce(row).n]


def served(rows):
    for row in rows:
        of, base = server(row), server(f"{row.split(',')[0]}, everything") if row not in PAPER else server("everything")
        cut = [f"{-100 * (1 - ours / theirs):.1f}".replace("-", "−") if ours != theirs else "" for ours, theirs in
               ((of.communication, base.communication), (of.seconds, base.seconds))]
        yield [f"*the paper, {row}*" if row in PAPER else row, s(of.worker), s(of.server), s(of.communication), cut[0], s(of.seconds), cut[1],
               percent(of.up, 1), percent(of.down, 1), "" if row in PAPER else of.n]


def senders():
    for row in INCASTS:
        found = [incast(transport, row) for transport in (PLAIN, TIMER, LOSSLESS, LOSSY)]
        last = found[-1]
        yield [row.replace(", queue 64 KiB", "").replace(", 1 MB", ""), *(f"{of.seconds / MS:.1f}" for of in found),
               f"{last.interval[0] / MS:.1f}–{last.interval[1] / MS:.1f}", f"{found[1].p99 / MS:.1f}", f"{last.p99 / MS:.1f}", last.n]


def of_micro(title, columns, names=()):
    (name, header), *rows = micro(title).items()
    return [name, *(header[column] for column in columns)], ([row, *(of[column].replace(" us", " µs") for column in columns)]
                                                            for row, of in rows if not names or row in names)


def of_gpu():
    for name in ("copy of as many bytes", "step, graph", "sampled top 1 % (DGC)", "PowerSGD's products, rank 1"):
        yield [f"{name}, µs", f"{gpu(name):,.0f}"]
    for name in ("DDP, no hook", "bf16_compress_hook", "powerSGD_hook, rank 1", "lamina, R = 0.95"):
        yield [f"{name}, ms a step", f"{gpu(name):.1f}"]


STEPS = ("lamina, whole layers, 5 %", "lamina, fragments of 65,536, 5 %", "top-k, 5 %", "last step's threshold, one pass (Ok-Topk), 5 %",
         "top-k of a sample (DGC), 5 %", "blocks of 256 (OmniReduce), 5 %", "PowerSGD, rank 1", "PowerSGD, rank 4", "1-bit")
FRAMES = ("decode", "encode segments, as they are", "encode segments, int4", "encode segments, fp16", "restore, as they are")
LAB = ["", "worker, s", "server, s", "communication, s", "less, %", "step, s", "less, %", "up, %", "down, %", "steps"]
HOOKED = ["hook", "MB a step and rank", "step, s", "least, s", "over DDP", "steps"]
TABLES = {
    "summary": lambda: (["lamina", "baseline", "baseline, s", "lamina, s", "ratio", "steps", ""], summary()),
    "learning_summary": lambda: (["", "uplink, %", "downlink, %", "loss to dense", "seeds"], learning_summary()),
    "text": lambda: (STUDY, studied(LONG, 2000)),
    "codes": lambda: (["code", "loss", "to dense"], coded()),
    "levels": lambda: (["", "dense", "levels", "SparseLoCo", "int4 by score", "DiLoCo, int4"], on_gpu()),
    "text_short": lambda: (STUDY, studied(SHORT, 300)),
    "images": lambda: (["method", "uplink, %", "downlink, %", "loss", "test top-1, %", "seeds", "settings tried"], images()),
    "hooks_1gbs": lambda: (HOOKED, hooks()),
    "hooks": lambda: (["", "MB", "seconds", "of DDP's"], (
        [title, *row[1:3], row[4]] for name, title in README.items() for row in hooks() if row[0] == name)),
    "all_reduce": lambda: (["seconds a step", "4 workers, 100 Mb/s", "2, 1 Gb/s", "4, 1 Gb/s", "4, 10 Gb/s", "4, 1 Gb/s: range", "4, 1 Gb/s: steps"], all_reduces()),
    "server": lambda: (LAB, served(SERVED)),
    "paper": lambda: (LAB, served(("everything", "nodes, everything", "dropping", "nodes, R = 0.95", "nodes, R = 0.99", "nodes, agreed, budget 3 %"))),
    "incast": lambda: (["mean, ms", "TCP", "TCP, short timer", "UDP, nothing lost", "UDP, bound 0.1", "95 %", "TCP, short timer, p99", "UDP, bound 0.1, p99",
                        "steps"], senders()),
    "step": lambda: of_micro("A worker's step and what the receiver has, avx2", (0, 1, 3, 5, 6, 8), STEPS),
    "search": lambda: of_micro("Algorithm 1 over L layers", (0, 2, 3), ("10", "161", "10,000", "1,000,000")),
    "frames": lambda: of_micro("Frames", (1, 2, 4, 5), FRAMES),
    "server_pass": lambda: of_micro("The server's pass", range(5)),
    "sizes": lambda: of_micro("Elements, layers, threads", (2, 4), ("10,000", "1,000,000", "10,000,000", "1,000,000,000")),
    "include": lambda: of_micro("Compiling", (0, 1), ("vector, string", "lamina.hpp", "a worker's step", "a server's step")),
    "gpu": lambda: (["one H200, ResNet-50", ""], of_gpu()),
}
README = {"DDP, no hook": "DDP", "bf16_compress_hook": "`bf16_compress_hook`", "powerSGD_hook, rank 1": "PowerSGD, rank 1",
          "lamina, R = 0.95": "**lamina, 95 % dropped**", "lamina, R = 0": "lamina, nothing dropped"}


def table(header, rows):
    lines = [f"| {' | '.join(map(str, row))} |" for row in [header, *rows]]
    if len(lines) > 16:
        raise ValueError(f"{len(lines) - 1} rows")
    lines.insert(1, "|---" + "|---:" * (len(header) - 1) + "|")  # as the tables that are written by hand
    return "\n".join(lines) + "\n"


def pages() -> list[pathlib.Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str) -> str:
    """The page with its tables as the records have them. KeyError for a name that TABLES has not."""
    return MARKED.sub(lambda found: f"<!-- table: {found[1]} -->\n{table(*TABLES[found[1]]())}<!-- end -->", text)


def main() -> int:
    wrong = 0
    for page in pages():
        text = page.read_text()
        new = filled(text)
        if len(re.findall(r"<!-- *(?:\w+ *:|end)", text)) != 2 * len(MARKED.findall(text)):  # one that is misspelt, too
            wrong += 1
            print(f"{page.relative_to(ROOT)}: a table's mark is not closed", file=sys.stderr)
        if new != text and "--check" in sys.argv:
            wrong += 1
            print(f"{page.relative_to(ROOT)} has tables that are not those of benchmarks/results: run benchmarks/tools/tables.py", file=sys.stderr)
        elif new != text:
            page.write_text(new)
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
