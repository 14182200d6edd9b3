# SPDX-License-Identifier: MIT
"""A small residual network (He, Zhang, Ren and Sun, arXiv 1512.03385) with groups normalised in place of batches (Wu and He, arXiv
1803.08494), so that what it says of an image depends on that image alone. Parameters lie flat, one layer behind the other."""

import dataclasses
import math

import torch
from torch.nn import functional

GROUPS = 8
STEM = 5


@dataclasses.dataclass(frozen=True)
class ResNet:
    """A block a width, the first convolution and each block but the first with a stride of 2."""

    widths: tuple[int, ...] = (32, 64, 128)
    classes: int = 10

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The layers, in the order in which they lie in the parameters."""
        def norm(name, width):
            return {f"{name}.scale": (width,), f"{name}.shift": (width,)}

        before = self.widths[0]
        shapes = {"stem": (before, 3, STEM, STEM), **norm("stem", before)}
        for block, width in enumerate(self.widths):
            shapes |= {f"{block}.first": (width, before, 3, 3), **norm(f"{block}.first", width),
                       f"{block}.second": (width, width, 3, 3), **norm(f"{block}.second", width)}
            if block:
                shapes |= {f"{block}.shortcut": (width, before, 1, 1)}
            before = width
        return shapes | {"head": (self.classes, before), "head.shift": (self.classes,)}

    def initial(self, generator: torch.Generator) -> torch.Tensor:
        """(N,): normal, as wide as He et al. (arXiv 1502.01852) have it; scales are ones, shifts zeros."""
        flat = []
        for name, shape in self.shapes().items():
            if len(shape) == 1:
                flat.append(torch.ones(shape) if name.endswith(".scale") else torch.zeros(shape))
            else:
                flat.append(math.sqrt(2 / math.prod(shape[1:])) * torch.randn(shape, generator=generator))
        return torch.cat([each.flatten() for each in flat])

    def logits(self, parameters: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        """(B, classes): of images, (B, 3, 32, 32), by one replica's parameters, (N,)."""
        shapes = self.shapes()
        pieces = torch.split(parameters, [math.prod(shape) for shape in shapes.values()])
        of = {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces)}

        def convolved(x, name, stride=1):
            return functional.conv2d(x, of[name], stride=stride, padding=of[name].shape[2] // 2)

        def normed(x, name):
            return functional.group_norm(x, GROUPS, of[f"{name}.scale"], of[f"{name}.shift"])

        x = functional.relu(normed(convolved(images, "stem", 2), "stem"))
        for block in range(len(self.widths)):
            stride = 2 if block else 1
            inner = functional.relu(normed(convolved(x, f"{block}.first", stride), f"{block}.first"))
            inner = normed(convolved(inner, f"{block}.second"), f"{block}.second")
            x = functional.relu(inner + (convolved(x, f"{block}.shortcut", stride) if block else x))
        return functional.linear(x.mean((2, 3)), of["head"], of["head.shift"])
