# SPDX-License-Identifier: MIT
"""The study of local updates on a GPU, at toy size on the CPU."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
import torch

from gpu import payloads, sparse_loco, study
from gpu.by_score import int4_message
from gpu.images import Sizes as ImageSizes
from gpu.row import Row
from gpu.text import Sizes as TextSizes

RECORDS = pathlib.Path(__file__).resolve().parents[3] / "benchmarks/results/learning/gpu/records.jsonl"
RECORDED = [json.loads(line) for line in RECORDS.read_text().splitlines()]
FIELDS = [field.name for field in dataclasses.fields(Row)]
CPU = torch.device("cpu")
SMALL = {"text": TextSizes(width=64, depth=1, heads=2, context=16, batch=2, warm_up_steps=2),
         "images": ImageSizes(widths=(8, 16, 16, 64), batch=16, warm_up_steps=2)}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A text of few words, and images of which the label decides how bright they are, in files as CIFAR-10's."""
    directory = tmp_path_factory.mktemp("data")
    generator = np.random.default_rng(1)
    (directory / "text").write_text(" ".join(generator.choice(["one", "word", "after", "another"], size=4000)))
    for name, count in (("data_batch_1", 200), ("test_batch", 50)):
        labels = generator.integers(10, size=(count, 1))
        pixels = generator.integers(30, size=(count, 3072)) + 22 * labels
        np.concatenate([labels, pixels], axis=1).astype(np.uint8).tofile(directory / f"{name}.bin")
    return {"text": directory / "text", "images": directory}


def training(data, row):
    return study.Training(study.TASKS[row.task](data[row.task], row.seed, CPU, SMALL[row.task]), row)


ROWS = [*(Row(scheme=scheme, W=2, steps=24, rate=8e-3, k=512) for scheme in study.SCHEMES),
        Row(scheme="mean", W=2, steps=12, rate=8e-3, opt="of_mean"), Row(scheme="levels", W=2, steps=24, rate=8e-3, opt="muon"),
        *(Row(task="images", scheme=scheme, W=2, steps=40, rate=0.01, opt="sgd") for scheme in ("dense", "levels", "int4"))]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.task}-{row.scheme}-{row.opt}")
def test_every_scheme_learns(data, row):
    run = training(data, row)
    losses = [float(run.step(step).mean()) for step in range(1, row.steps + 1)]
    assert sum(losses[-4:]) / 4 < losses[0] - 0.1
    assert run.scheme.up_bits > 0 or row.scheme in ("dense", "mean")


@pytest.mark.parametrize("scheme", ["levels", "trits", "int4"])
def test_nothing_is_lost(data, scheme):
    """What all optimizers did is in the shared parameters, in the local deltas or in the residuals, at every element after every step."""
    run = training(data, Row(scheme=scheme, W=3, steps=8, rate=1e-2))
    scheme, optimizer = run.scheme, run.optimizer.step
    first, did = scheme.x.clone(), torch.zeros_like(scheme.x)

    def step(gradients, rate):
        before = scheme.y.clone()
        optimizer(gradients, rate)
        did.add_((before - scheme.y).mean(0))

    run.optimizer.step = step
    for number in range(1, 9):
        run.step(number)
        residual = 0 if scheme.residual is None else scheme.residual
        kept = first - scheme.x + (residual + scheme.x - scheme.y).mean(0) + scheme.server_residual
        assert torch.allclose(kept, did, rtol=0, atol=1e-6)
    assert scheme.server_residual.any() and not torch.equal(scheme.x, first) and did.abs().max() > 1e-2


def test_levels_meet_their_budget(data):
    run = training(data, Row(scheme="levels", W=2, steps=80, rate=4e-3))
    for step in range(1, 81):
        run.step(step)
    budget = 80 * 0.0099 * 32 * run.task.layout.elements
    assert float(run.scheme.up_bits) == pytest.approx(budget, rel=0.05) and float(run.scheme.down_bits) == pytest.approx(budget, rel=0.05)


def test_records_are_rows():
    assert len(RECORDED) == 85
    for record in RECORDED:
        fields = {name: value for name, value in record.items() if name in FIELDS}
        row, given = study.arguments([*(word for name, value in fields.items() for word in (f"--{name}", str(value))), "--data", "file"])
        assert {name: getattr(row, name) for name in fields} == fields and (given.device.type, given.toy) == ("cuda", False)
        assert set(study.fields_read(row)) - set(fields) <= {"keep"}  # which is as by default where a record does not have it
        assert set(record) - set(fields) <= {"loss", "top1", "flushed", "curve", "up_pct", "down_pct", "N", "seconds", "card"}


def test_records_have_the_sizes_and_bytes_of_the_program(data):
    layouts = {task: kind(data[task], 0, CPU).layout for task, kind in study.TASKS.items()}
    for record in RECORDED:
        layout, steps, period = layouts[record["task"]], record["steps"], int(record.get("H", 1))
        exchanges = -(-steps // period)
        up_bits = {"dense": lambda: 0, "mean": lambda: 0,
                   "levels": lambda: steps * record["pct"] * 0.32 * layout.elements,
                   "int4": lambda: steps * int4_message(layout, record["pct"])[1],
                   "sparseloco": lambda: exchanges * sparse_loco.message_bits(layout, record["k"]),
                   "diloco4": lambda: exchanges * payloads.INT4_BITS * layout.elements}[record["scheme"]]()
        assert record.get("N", layout.elements) == layout.elements
        tolerance = 2e-3 if record["scheme"] == "levels" else 6e-5  # levels meet their budget after a while
        assert record["up_pct"] == pytest.approx(up_bits / layout.elements / steps / 0.32, abs=tolerance)
