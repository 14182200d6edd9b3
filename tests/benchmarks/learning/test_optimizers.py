# SPDX-License-Identifier: MIT
import numpy as np
import pytest
import torch

from optimizers import BETAS, EPSILON, AdamWOfMean
from rows import parsed
from toy import Toy
from training import Replicas

RATE, DECAY = 0.125, 0.1


@pytest.mark.parametrize("workers", [1, 4, 16])
def test_the_step_is_the_formulas(workers):
    gradients = 0.5 + torch.randn(20, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parameter = torch.ones(50, dtype=torch.float64)
    optimizer = AdamWOfMean([{"params": [parameter], "weight_decay": DECAY, "lr": RATE}], workers)
    theta, m, v = np.ones(50), np.zeros(50), np.zeros(50)
    for t, g in enumerate(gradients.numpy(), 1):
        parameter.grad = gradients[t - 1].clone()
        optimizer.step()
        m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g * g
        m_hat, v_hat = m / (1 - BETAS[0] ** t), v / (1 - BETAS[1] ** t)
        of_mean = m_hat ** 2 + np.maximum(v_hat - m_hat ** 2, 0) / workers
        theta = theta * (1 - RATE * DECAY) - RATE * m_hat / (np.sqrt(of_mean) + EPSILON)
    assert np.allclose(parameter, theta, rtol=1e-12)


@pytest.mark.parametrize("replicas", [1, 4])
def test_replicas_that_are_averaged_are_its_workers(replicas):
    """The dense run has one replica, which steps on the mean itself."""
    row = parsed("workers=4 steps=1 optimizer=adamw_of_mean")
    assert Replicas(Toy(row), row, replicas).optimizer.workers == replicas
