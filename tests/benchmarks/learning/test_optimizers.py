# SPDX-License-Identifier: MIT
import numpy as np
import pytest
import torch

from optimizers import BETAS, EPSILON, AdamWOfMean
from rows import parsed
from toy import Toy
from training import Replicas

RATE, DECAY = 0.125, 0.1


def after(optimizer, gradients):
    """The parameters, which begin at 1, after a step of each of (T, N)."""
    parameter = torch.ones(gradients.shape[1], dtype=gradients.dtype)
    made = optimizer([{"params": [parameter], "weight_decay": DECAY}])
    for gradient in gradients:
        made.param_groups[0]["lr"] = RATE
        parameter.grad = gradient.clone()
        made.step()
    return parameter


def drawn(*shape, signal=0.0):
    return signal + torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("workers", [1, 4, 16])
def test_the_step_is_the_formulas(workers):
    gradients = drawn(20, 50, signal=0.5)
    theta, m, v = np.ones(50), np.zeros(50), np.zeros(50)
    for t, g in enumerate(gradients.numpy(), 1):
        m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g * g
        m_hat, v_hat = m / (1 - BETAS[0] ** t), v / (1 - BETAS[1] ** t)
        of_mean = m_hat ** 2 + np.maximum(v_hat - m_hat ** 2, 0) / workers
        theta = theta * (1 - RATE * DECAY) - RATE * m_hat / (np.sqrt(of_mean) + EPSILON)
    assert np.allclose(after(lambda groups: AdamWOfMean(groups, workers), gradients), theta, rtol=1e-12)


@pytest.mark.parametrize("replicas", [1, 4])
def test_replicas_that_are_averaged_are_its_workers(replicas):
    """The dense run has one replica, which steps on the mean itself."""
    row = parsed("workers=4 steps=1 optimizer=adamw_of_mean")
    assert Replicas(Toy(row), row, replicas).optimizer.workers == replicas
