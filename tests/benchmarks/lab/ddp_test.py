#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""benchmarks/lab/ddp.py: the paced model gives the recorded gradients in the order in which they are ready, DDP means them over two
ranks, and a run of each kind writes its steps. With the python3 that has torch."""

import gc
import importlib.util
import json
import pathlib
import struct
import sys
import tempfile

from here import LAB, require, skip

if importlib.util.find_spec("torch") is None:
    skip("no torch; tools/install_packages python installs it")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402

import ddp  # noqa: E402
import paced_model  # noqa: E402
import torch_ranks  # noqa: E402

SHAPES = [[2, 3], [4], [40, 30]]
READY = [0.9, 0.2, 0.5]  # not the reverse of their order


def write_recording(directory: pathlib.Path) -> None:
    count = sum(torch.Size(shape).numel() for shape in SHAPES)
    for worker in range(2):
        for step in range(2):
            numbers = [float(i % 7 + 10 * worker + 100 * step) for i in range(count)]
            (directory / f"worker-{worker}-{step}.f32").write_bytes(struct.pack(f"<{count}f", *numbers))
    lines = "".join(f"{needed} {ready}\n" for needed, ready in zip((0.0, 0.3, 0.6), READY))
    (directory / "profile.txt").write_text(f"forward_share 0.25\n{lines}")
    (directory / "model.txt").write_text("# made up\n" + "".join(f"layer{i} {'x'.join(map(str, shape))}\n" for i, shape in enumerate(SHAPES)))


def order_and_values(directory: pathlib.Path) -> None:
    require([shape for _, shape in paced_model.layers_of(str(directory / "model"))] == SHAPES, "other layers than the file has")
    network = paced_model.PacedNetwork(SHAPES, paced_model.Profile(directory, 3), compute_seconds=0.02)
    recording = paced_model.Recording(directory, 1, SHAPES)
    seen = []
    for layer, parameter in enumerate(network.parameters()):
        parameter.register_hook(lambda _, layer=layer: seen.append(layer))
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=0, world_size=1)
    module = DDP(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    for step in range(3):
        seen.clear()
        before = [parameter.detach().clone() for parameter in network.parameters()]
        ddp.a_step(module, network, optimizer, recording)
        # Of backward alone: three gradients and the end.
        require(len(network.pace.between) == 4, f"what Python takes between layers is measured of others: {network.pace.between}")
        require(seen == [1, 2, 0], f"gradients come in the order {seen}")
        expected = recording.steps[step % 2]
        for parameter, gradient, old in zip(network.parameters(), expected, before):
            require(torch.equal(parameter.grad, gradient), "another gradient than the recorded one")
            require(torch.equal(parameter, old - gradient), "the update is another")
    # A worker beyond those recorded has the same gradients, a step later.
    require(torch.equal(paced_model.Recording(directory, 3, SHAPES).next()[1], recording.steps[1][1]), "worker 3 begins elsewhere")
    del module, optimizer  # before the group, as ddp.py has it
    gc.collect()
    dist.destroy_process_group()


def accounts() -> None:
    """What others take comes on top, but for the interpreter's share."""
    pace = paced_model.Pace()
    for share, comes_on_top in ((0.0, True), (1e9, False)):
        pace.interpreter_seconds = share
        pace.begin()
        begun = pace.due
        pace.spend_until(0.0)
        require((pace.due > begun) is comes_on_top, f"a share of {share} s: due {pace.due - begun} s later")


def runs(directory: pathlib.Path) -> None:
    output = directory / "steps.json"
    program = [sys.executable, str(LAB / "ddp.py"), "--hook", "powersgd", "--model", str(directory / "model"), "--replay", str(directory),
               "--compute-seconds", "0.01", "--warm-up", "3", "--steps", "2", "--interface", "lo", "--output", str(output)]
    torch_ranks.run(2, "127.0.0.1", "lo", lambda _: program, 300)
    found = json.loads(output.read_text())
    require(found["torch"] == torch.__version__ and len(found["steps"]) == 2, f"{found}")
    for step in found["steps"]:
        require(step["total_seconds"] > step["exposed_seconds"] >= 0 and step["sent_bytes"] > 0, f"{step}")


with tempfile.TemporaryDirectory() as name:
    write_recording(pathlib.Path(name))
    accounts()
    order_and_values(pathlib.Path(name))
    runs(pathlib.Path(name))
