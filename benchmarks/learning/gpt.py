# SPDX-License-Identifier: MIT
"""The transformer of nanoGPT (Karpathy, github.com/karpathy/nanoGPT, model.py) without biases and dropout, for R replicas at once:
parameters are (R, N), batches (R, B, T), and a product of matrices is one call for all replicas."""

import dataclasses
import math

import torch
from torch.nn import functional


@dataclasses.dataclass(frozen=True)
class Gpt:
    """The CPU setting of nanoGPT's README by default."""

    vocabulary: int = 65
    context: int = 64
    depth: int = 4
    heads: int = 4
    width: int = 128

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The layers, in the order in which they lie in the parameters. The embedding of tokens is the head as well."""
        shapes = {"tokens": (self.vocabulary, self.width), "positions": (self.context, self.width)}
        for block in range(self.depth):
            shapes |= {f"{block}.attention.norm": (self.width,),
                       f"{block}.attention.in": (3 * self.width, self.width),
                       f"{block}.attention.out": (self.width, self.width),
                       f"{block}.mlp.norm": (self.width,),
                       f"{block}.mlp.in": (4 * self.width, self.width),
                       f"{block}.mlp.out": (self.width, 4 * self.width)}
        return shapes | {"norm": (self.width,)}

    def initial(self, generator: torch.Generator) -> torch.Tensor:
        """(N,): normal with deviation 0.02, less by sqrt(2 depth) where a block ends; ones for the norms."""
        flat = []
        for name, shape in self.shapes().items():
            deviation = 0.02 / math.sqrt(2 * self.depth) if name.endswith(".out") else 0.02
            flat.append(torch.ones(shape) if len(shape) == 1 else deviation * torch.randn(shape, generator=generator))
        return torch.cat([each.flatten() for each in flat])

    def losses(self, parameters: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """(R,): the mean cross-entropy, in nats a token, of each replica's predictions of text[:, :, 1:]; text is (R, B, T + 1)."""
        logits = self.logits(parameters, text[:, :, :-1])
        each = functional.cross_entropy(logits.flatten(0, 1), text[:, :, 1:].flatten(), reduction="none")
        return each.view(text.shape[0], -1).mean(1)

    def logits(self, parameters: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """(R, B T, vocabulary): of what follows each token of text, (R, B, T)."""
        replicas, batch, length = text.shape
        shapes = self.shapes()
        pieces = torch.split(parameters, [math.prod(shape) for shape in shapes.values()], dim=1)
        of = {name: piece.view(replicas, *shape) for (name, shape), piece in zip(shapes.items(), pieces)}

        def linear(x, name):
            return torch.bmm(x, of[name].transpose(1, 2))

        def norm(x, name):
            return functional.layer_norm(x, (self.width,)) * of[name][:, None]

        # A head's rows of all replicas and texts side by side.
        def heads(x):
            return x.view(replicas * batch, length, self.heads, -1).transpose(1, 2).reshape(-1, length, self.width // self.heads)

        future = torch.full((length, length), -torch.inf).triu(1)

        def attention(x):
            query, key, value = (heads(each) for each in x.split(self.width, dim=2))
            scores = torch.baddbmm(future, query, key.transpose(1, 2), alpha=1 / math.sqrt(query.shape[2]))
            mixed = torch.bmm(scores.softmax(2), value)
            return mixed.view(-1, self.heads, length, mixed.shape[2]).transpose(1, 2).reshape(replicas, batch * length, self.width)

        offsets = torch.arange(replicas)[:, None, None] * self.vocabulary
        tokens = functional.embedding(text + offsets, of["tokens"].reshape(-1, self.width))
        x = (tokens + of["positions"][:, None, :length]).view(replicas, batch * length, self.width)
        for block in range(self.depth):
            x = x + linear(attention(linear(norm(x, f"{block}.attention.norm"), f"{block}.attention.in")), f"{block}.attention.out")
            x = x + linear(functional.gelu(linear(norm(x, f"{block}.mlp.norm"), f"{block}.mlp.in")), f"{block}.mlp.out")
        return linear(norm(x, "norm"), "tokens")
