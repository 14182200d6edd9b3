# SPDX-License-Identifier: MIT
"""A model that takes its time layer by layer, as paced_player of replay.cpp does for the lab: forward passes the layers as
they are needed, and backward is one of autograd, in which each gradient is complete when its share of the pass is over."""

import pathlib
import time
from collections.abc import Callable

import torch
from torch import nn

MODELS = pathlib.Path(__file__).resolve().parents[1] / "models"


def layers_of(name: str) -> list[tuple[str, list[int]]]:
    """Names and shapes of a file of benchmarks/models, in the order of the network's parameters."""
    lines = (MODELS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    words = [line.split() for line in lines if line and not line.startswith("#")]
    return [(layer, [int(size) for size in shape.split("x")]) for layer, shape in words]


class Profile:
    """When the parameters of each layer are needed and its gradient is complete, as shares of the two passes."""

    def __init__(self, directory: pathlib.Path, layers: int):
        lines = (directory / "profile.txt").read_text(encoding="ascii").split()
        if len(lines) != 2 + 2 * layers or lines[0] != "forward_share":
            raise RuntimeError(f"{directory}/profile.txt is no profile of {layers} layers")
        numbers = [float(word) for word in lines[1:]]
        self.forward_share, self.needed, self.ready = numbers[0], numbers[1::2], numbers[2::2]


class Pace:
    """Sleeps to absolute times, so that errors do not add up. What others take between two sleeps comes on top, but for what
    `interpreter_seconds` says: the time in which Python calls one layer after another, which no network written for PyTorch pays."""

    def __init__(self) -> None:
        self.interpreter_seconds = 0.0
        self.between: list[float] = []  # since resume()

    def begin(self) -> None:
        self.spent = 0.0
        self.due = self.woke = time.monotonic()
        self.between = []

    def resume(self) -> None:
        """What has passed since the last sleep is the interpreter's."""
        self.woke, self.between = time.monotonic(), []

    def spend_until(self, seconds: float, work: Callable[[], None] = lambda: None) -> None:
        taken = time.monotonic() - self.woke
        self.between.append(taken)
        self.due += max(0.0, taken - self.interpreter_seconds)
        work()
        self.due += max(0.0, seconds - self.spent)
        self.spent = max(self.spent, seconds)
        time.sleep(max(0.0, self.due - time.monotonic()))
        self.woke = time.monotonic()


class PacedLayer(torch.autograd.Function):
    """One layer of the backward pass, in time alone."""

    @staticmethod
    def forward(context, x, _parameter, layer, network):
        context.layer, context.network = layer, network
        return x + 1

    @staticmethod
    def backward(context, of_output):
        return of_output, context.network.gradient_of(context.layer), None, None


class PacedNetwork(nn.Module):
    """Parameters of the shapes given, in their order; gradients are `gradients`, whatever the input is."""

    def __init__(self, shapes: list[list[int]], profile: Profile, compute_seconds: float):
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])
        self.profile, self.compute_seconds, self.pace = profile, compute_seconds, Pace()
        indices = range(len(shapes))
        self.forward_order = sorted(indices, key=lambda layer: profile.needed[layer])
        self.backward_order = sorted(indices, key=lambda layer: profile.ready[layer])
        self.gradients: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = self.profile.forward_share
        self.pace.begin()
        for layer in self.forward_order:
            self.pace.spend_until(share * self.profile.needed[layer] * self.compute_seconds)
        self.pace.spend_until(share * self.compute_seconds)
        for layer in reversed(self.backward_order):
            x = PacedLayer.apply(x, self.layers[layer], layer, self)
        self.pace.resume()
        return x.sum()

    def gradient_of(self, layer: int) -> torch.Tensor:
        """In backward: complete when its time has come. A copy, which autograd makes the parameter's own."""
        share, found = self.profile.forward_share, []
        self.pace.spend_until((share + (1 - share) * self.profile.ready[layer]) * self.compute_seconds,
                              lambda: found.append(self.gradients[layer].clone()))
        return found[0]

    def end_of_step(self) -> None:
        """After backward: the rest of its time."""
        self.pace.spend_until(self.compute_seconds)


class Recording:
    """The recorded gradients of one worker, again and again, as recorded_gradients of replay.cpp takes them up; or zeros, if they
    may be, where none are recorded: it does not matter what gradients are that all are sent."""

    def __init__(self, directory: pathlib.Path, worker: int, shapes: list[list[int]], or_zeros: bool = False):
        workers = len(list(directory.glob("worker-*-0.f32")))
        self.following = 0
        if workers == 0 and or_zeros:
            self.steps = [[torch.zeros(1).expand(shape) for shape in shapes]]
            return
        if workers == 0:
            raise RuntimeError(f"there are no recorded gradients in {directory}")
        elements = [torch.Size(shape).numel() for shape in shapes]
        self.steps = []
        for step in range(len(list(directory.glob(f"worker-{worker % workers}-*.f32")))):
            file = directory / f"worker-{worker % workers}-{step}.f32"
            if file.stat().st_size != 4 * sum(elements):
                raise RuntimeError(f"{file} holds gradients of another model")
            flat = torch.from_file(str(file), size=sum(elements), dtype=torch.float32).clone()
            self.steps.append([part.reshape(shape) for part, shape in zip(flat.split(elements), shapes)])
        self.following = worker // workers % len(self.steps)

    def next(self) -> list[torch.Tensor]:
        """Those of the next step."""
        now = self.steps[self.following]
        self.following = (self.following + 1) % len(self.steps)
        return now
