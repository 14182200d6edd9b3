# SPDX-License-Identifier: MIT
"""Where layers and fragments lie in flat parameters, and replicas of a model on them."""

import math

import torch

ELEMENTS = 4096  # of a fragment


class Layout:
    """Each layer is padded to whole fragments, so that parameters (..., N) are fragments (..., F, 4096). The padding stays 0."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], device: torch.device):
        self.shapes, self.device = shapes, device
        self.spans, layers, sizes = {}, [], []
        for layer, (name, shape) in enumerate(shapes.items()):
            count, begin = math.prod(shape), ELEMENTS * len(sizes)
            self.spans[name] = slice(begin, begin + count)
            sizes += [min(ELEMENTS, count - at) for at in range(0, count, ELEMENTS)]
            layers += [layer] * (len(sizes) - len(layers))
        self.elements = sum(sizes)  # without padding
        self.fragments, self.padded = len(sizes), ELEMENTS * len(sizes)
        self.layer = torch.tensor(layers, device=device)  # (F,)
        self.sizes = torch.tensor(sizes, device=device, dtype=torch.float32)  # (F,), without padding

    def flat(self, layers: dict[str, torch.Tensor]) -> torch.Tensor:
        """(N,)"""
        parameters = torch.zeros(self.padded)
        for name, span in self.spans.items():
            parameters[span] = layers[name].flatten()
        return parameters.to(self.device)

    def views(self, parameters: torch.Tensor) -> dict[str, torch.Tensor]:
        """The layers (R, *shape) of R replicas, (R, N)."""
        return {name: parameters[:, self.spans[name]].view(-1, *shape) for name, shape in self.shapes.items()}

    def in_fragments(self, parameters: torch.Tensor) -> torch.Tensor:
        """(..., N) -> (..., F, 4096), a view."""
        return parameters.view(*parameters.shape[:-1], self.fragments, ELEMENTS)

    def decay(self, share: float) -> torch.Tensor:
        """(N,): the weight decay of each element. Vectors do not decay."""
        return self.flat({name: torch.full(shape, share if len(shape) > 1 else 0.0) for name, shape in self.shapes.items()})


class Replicas:
    """R replicas as one batch of models on y, (R, N). Their gradients are (R, N) as well."""

    def __init__(self, task, y: torch.Tensor):
        self.task, self.gradients = task, torch.zeros_like(y)
        self.layers = {name: view.detach().requires_grad_() for name, view in task.layout.views(y).items()}
        for name, view in task.layout.views(self.gradients).items():
            self.layers[name].grad = view

    def backward(self, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The losses (R,) of a batch of tensors (R, B, ...); leaves their gradients, each clipped to the norm that the task allows."""
        self.gradients.zero_()
        with torch.autocast(self.gradients.device.type, dtype=torch.bfloat16):
            losses = self.task.losses(self.layers, *batch)
        losses.sum().backward()
        if self.task.clip is not None:
            self.gradients.mul_((self.task.clip / (self.gradients.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1.0))
        return losses.detach()
