# SPDX-License-Identifier: MIT
"""The examples and the documents' Python, run as their readers run them."""

import importlib.util
import pathlib
import re
import subprocess
import sys
import time

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import ranks
from test_sharded import HAS_HOOK

ROOT = pathlib.Path(__file__).parents[2]
TRAIN = ROOT / "examples/pytorch/train.py"


def test_the_command_of_the_readme_learns():
    readme = (ROOT / "README.md").read_text()
    command = re.search(r"examples/pytorch/train.py (--drop-ratio \S+)\s", readme)
    last = ranks.Program(TRAIN, *command[1].split()).outputs()[0].splitlines()[-1]
    assert float(re.search(r"accuracy ([\d.]+) %", last)[1]) > 95, last
    said, found = (float(re.search(r"([\d.]+) % of DDP's bytes", text)[1]) for text in (readme, last))
    assert abs(said - found) < 1, last


def test_one_run_compares_what_one_rank_cannot_learn(tmp_path):
    picture = ["--picture", str(tmp_path / "a.png")] if importlib.util.find_spec("matplotlib") else []
    output = ranks.Program(TRAIN, "--compare", "--steps", "80", "--batch", "16", "--drop-ratio", "0.8", "--warm-up", "1", *picture).outputs()[0]
    found = {name: (float(accuracy), float(sent)) for name, accuracy, sent in re.findall(r"(.+): accuracy ([\d.]+) %, ([\d.]+) MB", output)}
    assert list(found) == ["one rank", "DDP", "lamina"], output
    assert found["one rank"][0] < 55 and found["DDP"][0] > 95 and found["lamina"][0] > 90, output  # it has half of the classes
    assert found["one rank"][1] == 0 and 0 < found["lamina"][1] < 0.3 * found["DDP"][1], output
    assert not picture or (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_local_updates_learn(tmp_path):
    program, file = ROOT / "examples/pytorch/local_updates.py", tmp_path / "model.pt"
    lines = [ranks.Program(program, "--steps", "120", *more).outputs()[0] for more in (["--save", str(file), "--delay", "2"], ["--optimizer", "sgd"], ["--dense"])]
    losses = [float(re.search(r"loss ([\d.]+),", line)[1]) for line in lines]
    shares = [float(re.search(r"([\d.]+) % of the gradients'", line)[1]) for line in lines]
    assert max(losses) < 2, lines  # of ten classes, so 2.3 by guessing
    assert shares[2] == 100 and all(0.8 < share - 100 / 120 < 1.3 for share in shares[:2]), lines  # finish() is a dense step
    assert torch.load(file)["0.weight"].shape == (256, 32)


def test_a_killed_run_goes_on_bit_for_bit(tmp_path):
    arguments = ["--drop-ratio", "0.9", "--overlap", "--batch", "8", "--steps", "16", "--checkpoint-every", "4", "--accumulate", "2"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    expected = ranks.Program(TRAIN, *arguments, "--checkpoint", str(whole)).outputs()[0]
    program = ranks.Program(TRAIN, *arguments, "--checkpoint", str(killed))
    end = time.monotonic() + ranks.SECONDS
    while not list(killed.glob("rank1-*.pt")) and time.monotonic() < end:
        time.sleep(0.01)
    program.kill()
    assert list(killed.glob("rank1-*.pt")) and not list(killed.glob("*-16.pt"))
    resumed = ranks.Program(TRAIN, *arguments, "--checkpoint", str(killed)).outputs()[0]
    assert resumed.splitlines()[-1] == expected.splitlines()[-1]
    for rank in range(2):
        one, other = (torch.load(folder / f"rank{rank}-16.pt") for folder in (whole, killed))
        assert all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])
        assert torch.equal(one["dropping"]["memory"], other["dropping"]["memory"])


@pytest.mark.parametrize("name, framework, world, share", [
    ("accelerate", "accelerate", 2, (10, 16)), ("lightning", "lightning", None, (10, 16)), ("trainer", "transformers", 2, (10, 16)),
    ("fsdp2", None, 4, (20, 30)), ("torchtitan", None, 4, (0.9, 1.3))])
def test_it_works_in_a_framework(name, framework, world, share):
    if framework is not None:
        pytest.importorskip(framework, reason=f"{framework} is not installed")
    elif not HAS_HOOK:
        pytest.skip(f"PyTorch {torch.__version__} has no FSDPModule.set_all_reduce_hook")
    program = ROOT / f"examples/pytorch/with_{name}.py"
    if world is not None:
        output = ranks.Program(program, world=world).outputs()[0]
    else:
        done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=2 * ranks.SECONDS)
        output = done.stdout + done.stderr
    lines = re.findall(r"^step (\d+): loss ([\d.]+), (\d+) bytes, ([\d.]+) % of (?:DD|HSD)P's, ([\d.]+) s$", output, re.MULTILINE)
    steps, losses, sent, shares, seconds = ([float(each) for each in column] for column in zip(*lines))
    assert steps == [32, 64, 96, 128], output
    assert losses[-1] < 0.7 and losses[-1] < losses[0] and sent == sorted(sent) and seconds == sorted(seconds), output
    assert share[0] < shares[-1] < share[1], output


def test_the_picture_of_layers(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    done = subprocess.run([sys.executable, str(ROOT / "examples/python/which_layers.py"), str(tmp_path / "a.png")],
                          capture_output=True, text=True, timeout=ranks.SECONDS)
    losses = re.match(r"loss ([\d.]+) at the beginning, ([\d.]+) after", done.stdout)
    assert float(losses[2]) < 0.2 * float(losses[1]), done.stdout + done.stderr
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@ranks.on(1)
def test_the_blocks_of_the_pytorch_pages_run():
    """But for those that the comment before them says are not run."""
    torch.manual_seed(0)
    names = {"torch": torch, "DistributedDataParallel": DistributedDataParallel}
    for page in ("pytorch", "pytorch/hook", "pytorch/local-updates"):
        found = re.findall(r"(?<!-->\n)^```python\n(.*?)^```$", (ROOT / f"docs/{page}.md").read_text(), re.DOTALL | re.MULTILINE)
        assert found, page
        for number, block in enumerate(found):
            exec(compile(block, f"docs/{page}.md, block {number + 1}", "exec"), names)
        if page == "pytorch":
            assert names["local"].totals.steps == 1
            assert len(names["worker"].residual(0)) == 64000 and names["parameters"][1][0] < 0 == names["parameters"][0][0]
            names["optimizer"] = torch.optim.SGD(names["ddp"].parameters(), 0.1)
    assert names["state"].step == 1
    assert names["local"].totals.steps == 2 and names["resumed"].backend.step == 2
