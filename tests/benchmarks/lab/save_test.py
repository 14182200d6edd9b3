#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Trains for a step, keeps the model, and takes it elsewhere: save_test.py PROGRAM MPIRUN..."""

import pathlib
import subprocess
import sys
import tempfile

from runs import DEADLINE_SECONDS, PROGRAM, TRAINING, require

OPTIONS = [each for each in TRAINING if each not in ("--runs", "with")]
OPTIONS += ["--transport", "inprocess", "--workers", "2", "--steps", "1", "--no-evaluation"]


def train(*options: str) -> subprocess.CompletedProcess:
    return subprocess.run([PROGRAM, *OPTIONS, *options], capture_output=True, text=True, timeout=DEADLINE_SECONDS)


def load_in_python(model: pathlib.Path) -> None:
    try:
        import torch
    except ImportError:
        print("the part with Python's torch is skipped: it is not here (python3-torch)")
        return
    state = torch.jit.load(str(model)).state_dict()
    require(len(state) == 161 + 3 * 53, f"{len(state)} tensors")
    require(tuple(state["layer4.2.conv3.weight"].shape) == (2048, 512, 1, 1), "layer4.2.conv3.weight")
    require(tuple(state["fc.weight"].shape) == (10, 2048), "fc.weight")
    require(int(state["bn1.num_batches_tracked"]) == 1, "bn1.num_batches_tracked")
    require(all(bool(torch.isfinite(tensor).all()) for tensor in state.values()), "a tensor is not finite")


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        model = pathlib.Path(directory) / "model.pt"
        saved = train("--runs", "with", "--save", str(model))
        require(saved.returncode == 0, saved.stderr)
        require(model.is_file() and not model.with_name("model.pt.part").exists(), "no model, or a part of one")
        load_in_python(model)
        loaded = train("--runs", "without", "--load", str(model))
        require(loaded.returncode == 0, loaded.stderr)

        for options, said in [(["--save", str(model)], "--save needs --runs with or without"),
                              (["--runs", "with", "--load", str(model), "--classes", "12"], "fc.weight is of [10, 2048]"),
                              (["--runs", "with", "--load", str(model) + "x"], f"there is no model {model}x"),
                              (["--runs", "with", "--save", "/nowhere/model.pt"], "/nowhere/model.pt")]:
            refused = train(*options)
            require(refused.returncode != 0 and said in refused.stderr, f"{options}: {refused.stderr}")


if __name__ == "__main__":
    sys.exit(main())
