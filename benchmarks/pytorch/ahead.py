#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Does training learn where a step's choice of layers is made before its gradients are there? Workers take turns in one process,
each with a lamina.Worker; what differs is alone by which agreed values a step selects:

  at_end  by those of this step's residuals: what lamina.torch does
  ahead   by those predicted at the end of the step before: (sent then ? 0 : the residual's value) + the value of that step's
          gradient alone
  stale   by those of the residuals that the step before has left, without a prediction: the control

Step 1 of the last two sends everything. The example's network and its waves in noise; SGD with momentum, no warm-up, fragments of
4,096 elements. Rows that are in the output already are kept, so a run that is stopped goes on. Needs the package: tests/python/run,
then build/python/venv/bin/python benchmarks/pytorch/ahead.py. --table prints what is recorded.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time

import numpy as np
import torch
from torch import nn

import lamina

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples/pytorch"))
import train as images  # noqa: E402

WORKERS = 4
DECISIONS = ("at_end", "ahead", "stale")
RATIOS = (0.9, 0.95, 0.99)
PART_ELEMENTS = 4096
BATCH, LEARNING_RATE = 16, 0.01
LAST = 20  # steps whose mean loss is reported


def initialised(seed):
    """The example's network."""
    model = images.make_model("small")
    torch.manual_seed(seed)  # make_model() has a seed of its own
    for layer in model:
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    return model


def accuracy(model):
    """On 1,000 images, in %."""
    model.eval()
    return 100 * statistics.mean((model(pictures).argmax(1) == labels).float().mean().item()
                                 for pictures, labels in (images.drawn(-1 - index, 250) for index in range(4)))


def mean_abs(fragments):
    return np.array([each.abs().mean().item() for each in fragments])


def trained(steps, decision, ratio, seed):
    """The losses of all workers in each step, the share of the elements that each step sent, and the accuracy. Ratio 0 is dense."""
    model = initialised(seed)
    parameters = list(model.parameters())
    layout = lamina.Layout({str(index): tuple(each.shape) for index, each in enumerate(parameters)})
    workers = [lamina.Worker(layout, drop_ratio=ratio, fragment_elements=PART_ELEMENTS) for _ in range(WORKERS)]
    sizes = workers[0].fragments.sizes
    optimizer = torch.optim.SGD(parameters, LEARNING_RATE, momentum=0.9)
    losses, shares, left = [], [], np.ones(len(sizes))  # all alike: all are sent
    for step in range(steps):
        steps_of_workers, packed = [], 0
        for index, worker in enumerate(workers):
            optimizer.zero_grad()
            pictures, labels = images.drawn((1 + seed) * 10**6 + step * WORKERS + index, BATCH)
            loss = nn.functional.cross_entropy(model(pictures), labels)
            loss.backward()
            losses.append(loss.item())
            gradients = [each.grad.flatten() for each in parameters]
            steps_of_workers.append(worker.add(gradients))
        values = sum(np.array(each.values()) for each in steps_of_workers) / WORKERS
        for each in steps_of_workers:
            sent = each.select(values if decision == "at_end" else left)
            own = torch.empty(each.sent_elements)
            each.pack(own, 1 / WORKERS)
            packed = packed + own
            each.commit()
        mean = [torch.empty(each.numel()) for each in parameters]
        steps_of_workers[0].unpack(packed, mean)
        for parameter, each in zip(parameters, mean):
            parameter.grad = each.view_as(parameter)
        optimizer.step()
        shares.append(len(packed) / layout.elements)
        left = values.copy()  # what the step has left in the residuals
        left[sent] = 0
    return losses, shares, accuracy(model)


def rows(given):
    for steps in given.steps or (80, 200):
        for seed in range(given.seeds):
            yield steps, "at_end", 0.0, seed  # dense
            for ratio in RATIOS:
                for decision in DECISIONS:
                    yield steps, decision, ratio, seed


def table(recorded):
    yield "| steps | R | decided | loss, each seed | mean | accuracy, % | share sent | largest after step 1 |"
    yield "|---:|---:|---|---|---:|---:|---:|---:|"
    groups = {}
    for row in recorded:
        groups.setdefault((row["steps"], row["ratio"], DECISIONS.index(row["decision"])), []).append(row)
    for (steps, ratio, decision), each in sorted(groups.items()):
        mean = {what: statistics.mean(row[what] for row in each) for what in ("loss", "accuracy", "share")}
        yield (f"| {steps} | {ratio:g} | {DECISIONS[decision] if ratio else 'all sent'} | "
               f"{', '.join(format(row['loss'], '.3f') for row in each)} | {mean['loss']:.3f} | {mean['accuracy']:.0f} | "
               f"{mean['share']:.3f} | {max(row['largest'] for row in each):.3f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, action="append", help="default: 80 and 200")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no row after so many")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "benchmarks/results/pytorch/ahead.json")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    recorded = json.loads(given.output.read_text())["rows"] if given.output.exists() else []
    end = time.monotonic() + given.seconds
    for steps, decision, ratio, seed in rows(given) if not given.table else ():
        key = {"steps": steps, "decision": decision, "ratio": ratio, "seed": seed}
        if any(key.items() <= row.items() for row in recorded) or time.monotonic() > end:
            continue
        losses, shares, right = trained(steps, decision, ratio, seed)
        recorded.append(key | {"loss": statistics.mean(losses[-LAST * WORKERS:]), "accuracy": right,
                               "share": statistics.mean(shares), "largest": max(shares[1:])})
        print(recorded[-1], flush=True)
        given.output.write_text(json.dumps({"torch": torch.__version__, "lamina": lamina.__version__, "workers": WORKERS,
                                            "rows": recorded}, indent=1) + "\n")
    print("\n".join(table(recorded)))


if __name__ == "__main__":
    main()
