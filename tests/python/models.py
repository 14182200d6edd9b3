# SPDX-License-Identifier: MIT
"""Small models, their batches, and steps of DDP over them."""

import contextlib
import logging

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
import torch.distributed as dist

import lamina.torch
import ranks

# DDP's first bucket takes a megabyte whatever bucket_cap_mb says: these models would all be one bucket.
dist._DEFAULT_FIRST_BUCKET_BYTES = 1


def small(seed=0):
    """20 layers of 10 to 9,216 elements."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1),
                         nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
                         nn.Flatten(), nn.Linear(32 * 16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))


def batch(step, rank, size=8):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    labels = torch.randint(10, (size,), generator=generator)
    images = torch.randn(size, 3, 16, 16, generator=generator, dtype=torch.float32)
    return images + labels.view(-1, 1, 1, 1).float() / 5, labels


def train(model, steps, optimizer=None, first=1):
    """The losses, under DDP or without."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    for step in range(first, first + steps):
        images, labels = batch(step, dist.get_rank())
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_local(model, optimizer, steps, first=1):
    return train(model, steps, optimizer, first)


def dropping(model, ddp_options=None, **options):
    ddp = DDP(model, **(ddp_options or {}))
    return ddp, lamina.torch.register(ddp, **options)


@contextlib.contextmanager
def default_type(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def bits(module):
    """All parameters, as bytes."""
    return b"".join(each.detach().contiguous().numpy().tobytes() for each in module.parameters())


class Weights(nn.Module):
    """Parameters whose gradients are what the caller says: forward returns Σ parameter · given."""

    def __init__(self, *shapes):
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)

    def forward(self, given):
        return sum((parameter * each).sum() for parameter, each in zip(self.all, given) if each is not None)


def backward(ddp, given):
    """The gradients of Weights, for what forward is given."""
    ddp.zero_grad()
    ddp(given).backward()
    return [parameter.grad.clone() for parameter in ddp.module.all if parameter.grad is not None]


class Ledger:
    """What a rank gave, layer by layer, and what arrived of it."""

    def __init__(self, shapes):
        self.given, self.arrived = ([torch.zeros(shape) for shape in shapes] for _ in range(2))

    def add(self, given, arrived):
        """Of a step; None is no gradient."""
        for totals, those in ((self.given, given), (self.arrived, arrived)):
            for total, each in zip(totals, those):
                if each is not None:
                    total += each

    def lost(self, state):
        """The share of what all ranks gave that neither arrived nor waits."""
        lost = total = 0
        for name, given, arrived in zip(state.names, self.given, self.arrived):
            mean, waits = (sum(ranks.gathered(each)) / dist.get_world_size() for each in (given, state.residual(name)))
            lost += (arrived + waits - mean).abs().sum().item()
            total += mean.abs().sum().item()
        return lost / total


class Scaler:
    """A GradScaler whose scale is what the test says."""

    def __init__(self, scale=1.0):
        self.scale = scale

    def is_enabled(self):
        return True

    def get_scale(self):
        return self.scale


def whole_numbers(shapes, step, rank, most=8):
    """Integers up to `most` times 2^(layer), so that layers differ: their sums and halves are exact."""
    generator = torch.Generator().manual_seed(77 * step + rank)
    return [torch.randint(-most, most + 1, shape, generator=generator).float() * 2.0 ** (layer % 5)
            for layer, shape in enumerate(shapes)]


def recorded():
    """What the logger says from now on, as records."""
    records, handler = [], logging.Handler()
    handler.emit = records.append
    lamina.torch._report.logger.handlers[:] = [handler]
    lamina.torch._report.logger.setLevel(logging.INFO)
    return records


def messages(records):
    return [record.getMessage() for record in records]
