# SPDX-License-Identifier: MIT
"""Ranks that train by the package do what the study's workers do, which take turns in one process."""

import pathlib
import sys

import pytest
import torch
import torch.distributed as dist

from lamina.torch import LocalUpdates
from rows import parsed
from schemes import Local
from toy import Toy

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "python"))
import ranks  # noqa: E402

RATE = 0.5


@pytest.mark.parametrize("text", [
    "traffic=0.4", "traffic=0.2 age_power=1 payload=int4", "traffic=0.25 age_power=1 payload=int8 delay=1", "traffic=0.2 payload=int4 delay=3",
    "traffic=0.125 age_power=1 payload=ternary error_feedback=1 delay=1", "traffic=0.3 payload=bfloat16 delay=5"])
@ranks.on(4)
def test_local_updates_are_those_of_the_study(text):
    """What all ranks share is what one server would make of what all send."""
    row = parsed(f"scheme=local workers=4 steps=24 optimizer=sgd outer_rate=0.5 outer_momentum=0.5 {text}")
    scheme, rank = Local(Toy(row), row), dist.get_rank()
    shapes = list(scheme.task.shapes().values())

    def cut(numbers):
        return [each.reshape(shape) for each, shape in zip(torch.split(numbers, [torch.Size(shape).numel() for shape in shapes]), shapes)]

    parameters = [torch.nn.Parameter(each.clone()) for each in cut(scheme.task.begin)]
    local = LocalUpdates(torch.optim.SGD(parameters, RATE), send_budget=1 / scheme.choice.period, fragment_elements=row.fragment,
                         payload=row.payload, error_feedback=bool(row.error_feedback), delay=row.delay, outer_rate=row.outer_rate, outer_momentum=row.outer_momentum,
                         by_score=bool(row.age_power))
    sent = 0
    for step in range(1, row.steps + 1):
        scheme.step(step, RATE)
        for parameter, gradient in zip(parameters, cut(scheme.task.drawn[step - 1, rank])):
            parameter.grad = gradient.clone()
        local.step()
        sent += len(local.backend.core.sent)
        own = torch.cat([each.detach().flatten() for each in parameters])
        with local.evaluation_parameters():
            shared = torch.cat([each.detach().flatten() for each in parameters])
        for what, found, expected in (("own", own, scheme.replicas.y[rank]), ("shared", shared, scheme.shared)):
            assert torch.equal(found, expected), (what, step)
    assert 0 < sent < row.steps * len(shapes)
