# SPDX-License-Identifier: MIT
"""What the tasks of the study have in common. A task has besides
    name, clip, warm_up_steps      of its results; the norm of a gradient at most, or None; steps in which the rate grows
    read(path) -> data             OSError or ValueError for what is not the task's
    data_of(data) -> dict          by which a result says what was learned
    gradients(parameters, step)    losses (R,) and gradients (R, N) of R replicas, (R, N), with what W workers draw divided among them
    validation_loss(parameters, every=1)
"""

import torch


class Task:
    def __init__(self, model, data: dict, seed: int, workers: int):
        self.model, self.data, self.seed, self.workers = model, data, seed, workers

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The layers, in the order in which they lie in the parameters."""
        return self.model.shapes()

    def is_decayed(self, layer: str) -> bool:
        return len(self.shapes()[layer]) > 1

    def is_hidden(self, layer: str) -> bool:
        """Whether it is a matrix that Muon is for."""
        return False

    def initial(self) -> torch.Tensor:
        """(N,)"""
        return self.model.initial(torch.Generator().manual_seed(self.seed))

    def generator(self, step: int) -> torch.Generator:
        """Of what is drawn in a step: the same for every scheme."""
        return torch.Generator().manual_seed(self.seed * 1_000_003 + step)  # which looks at 32 bits

    def facts(self, parameters: torch.Tensor) -> dict:
        """Of the end of a run, for its result."""
        return {}
