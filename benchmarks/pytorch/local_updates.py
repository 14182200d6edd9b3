# SPDX-License-Identifier: MIT
"""What examples/pytorch/local_updates.py reaches by its settings: each with its learning rates, on three seeds that draw three tasks.
Prints a table in which a row has the rate that is best in the mean. Two ranks of one thread each; half an hour. Arguments are words
that the rows to run have in their names; none: all. First tests/python/run --newest, then

    build/python/newest/bin/python benchmarks/pytorch/local_updates.py [WORD...]
"""

import math
import os
import pathlib
import re
import statistics
import subprocess
import sys

import torch

PROGRAM = pathlib.Path(__file__).resolve().parents[2] / "examples/pytorch/local_updates.py"
SEEDS = range(3)
ADAMW, SGD = (0.002, 0.004, 0.008, 0.016), (0.025, 0.05, 0.1, 0.2, 0.4)
# Averaging is what the example does unless it is told otherwise.
ROWS = {"adamw, dense": "--dense", "adamw, outer momentum 0.6": "--outer-rate 0.7 --outer-momentum 0.6", "adamw, averaging": "",
        "adamw, alone": "--alone", "adamw, outer momentum 0.9": "--outer-rate 0.7 --outer-momentum 0.9", "sgd, dense": "--dense",
        "sgd, averaging": "", "sgd, outer momentum 0.75": "--outer-momentum 0.75", "sgd, alone": "--alone"}


def trained(optimizer: str, options: str, rate: float, seed: int) -> tuple[float, float]:
    """The validation loss, infinite where training has failed, and the share of the gradients' bytes in percent."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(PROGRAM),
               "--optimizer", optimizer, *options.split(), "--learning-rate", str(rate), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    # Not by the exit status: gloo may abort when all is done (docs/pytorch/hook.md, Limits).
    if not (found := re.search(r"loss (\S+), .* ([\d.]+) % of the gradients'", done.stdout)):
        sys.exit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    loss = float(found[1])
    return math.inf if math.isnan(loss) else loss, float(found[2])


def main() -> None:
    if unknown := [word for word in sys.argv[1:] if not any(word in name for name in ROWS)]:
        sys.exit(f"no row has {unknown} in its name; there are: {'; '.join(ROWS)}")
    print(f"PyTorch {torch.__version__}\n")
    print("| row | options | rates tried | rate | of the gradients' bytes | " + " | ".join(f"seed {seed}" for seed in SEEDS) + " |")
    print("|---|---|---|---:|---:|" + "---:|" * len(SEEDS), flush=True)
    for name, options in ROWS.items():
        if len(sys.argv) > 1 and not any(word in name for word in sys.argv[1:]):
            continue
        optimizer = name.partition(",")[0]
        rates = {"adamw": ADAMW, "sgd": SGD}[optimizer]
        reached = {rate: [trained(optimizer, options, rate, seed) for seed in SEEDS] for rate in rates}
        best = min(rates, key=lambda rate: statistics.mean(loss for loss, _ in reached[rate]))
        print(f"| {name} | {f'`{options}`' if options else ''} | {rates[0]} to {rates[-1]} | {best} | {reached[best][0][1]:.2f} % | "
              + " | ".join(f"{loss:.3f}" for loss, _ in reached[best]) + " |", flush=True)


if __name__ == "__main__":
    main()
