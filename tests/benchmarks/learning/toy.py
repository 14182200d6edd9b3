# SPDX-License-Identifier: MIT
"""A task whose gradients are small integers, drawn beforehand: with rates that are powers of two no addition rounds."""

import torch


class Toy:
    name = "toy"
    clip = None
    warm_up_steps = 0
    data = {"bytes": 0, "sha256": ""}

    def __init__(self, row):
        self.workers = row.workers
        generator = torch.Generator().manual_seed(row.seed)
        self.begin = torch.randint(-8, 9, (330,), generator=generator).float()
        self.drawn = torch.randint(-8, 9, (row.steps, row.workers, 330), generator=generator).float()
        # Fragments differ, so that some are dropped.
        self.drawn[:, :, 194:] *= 4

    def shapes(self):
        return {"a": (64,), "b": (65, 2), "c": (70,), "d": (66,)}

    def is_decayed(self, layer):
        return False

    def is_hidden(self, layer):
        return False

    def initial(self):
        return self.begin.clone()

    def gradients(self, parameters, step):
        drawn = self.drawn[step - 1]
        return torch.zeros(parameters.shape[0]), drawn.clone() if parameters.shape[0] == self.workers else drawn.mean(0, keepdim=True)

    def validation_loss(self, parameters, every=1):
        return float(parameters.abs().mean())

    def facts(self, parameters):
        return {}
