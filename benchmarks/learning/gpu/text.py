# SPDX-License-Identifier: MIT
"""The task of text: a GPT without biases that predicts the next byte of any file. It has 19 million parameters."""

import dataclasses
import math
import pathlib

import torch
from torch.nn import functional

from gpu.layout import Layout

BYTES = 256
VALIDATION_BYTES = 2_000_000  # the last of the file
CURVE_TEXTS, LAST_TEXTS, AT_ONCE = 128, 1024, 64  # of the validation


@dataclasses.dataclass(frozen=True)
class Sizes:
    width: int = 512
    depth: int = 6
    heads: int = 8
    context: int = 256
    batch: int = 8  #: texts of a worker in a step
    warm_up_steps: int = 100


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Of each token to those before it and itself; all are (..., length, width of a head)."""
    if hasattr(functional, "scaled_dot_product_attention"):  # not before PyTorch 2
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    future = torch.full((query.shape[-2],) * 2, -torch.inf, device=query.device).triu(1)
    return (query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1]) + future).softmax(-1).to(value.dtype) @ value


class Text:
    metric, digits, clip, weight_decay = "loss", 5, 1.0, 0.1
    TOY = Sizes(width=64, depth=2, heads=4, context=32, batch=4, warm_up_steps=4)

    def __init__(self, path: pathlib.Path, seed: int, device: torch.device, sizes: Sizes = Sizes()):
        """ValueError for a file that is too short."""
        data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).to(device)
        held_out = VALIDATION_BYTES if len(data) >= 2 * VALIDATION_BYTES else len(data) // 10
        if held_out < 2 * sizes.context:
            raise ValueError(f"{path} has {len(data):,} bytes: at least {20 * sizes.context:,} are needed")
        self.training, self.validation = data[:-held_out], data[-held_out:]
        self.sizes, self.seed, self.generator = sizes, seed, torch.Generator().manual_seed(seed)
        width = sizes.width
        shapes = {"tokens": (BYTES, width), "positions": (sizes.context, width)}
        for block in range(sizes.depth):
            shapes |= {f"{block}.attention.scale": (width,), f"{block}.attention.shift": (width,),
                       f"{block}.attention.in": (3 * width, width), f"{block}.attention.out": (width, width),
                       f"{block}.mlp.scale": (width,), f"{block}.mlp.shift": (width,),
                       f"{block}.mlp.in": (4 * width, width), f"{block}.mlp.out": (width, 4 * width)}
        self.layout = Layout(shapes | {"scale": (width,), "shift": (width,)}, device)
        self.hidden_matrices = [name for name, shape in shapes.items() if len(shape) == 2 and "." in name]

    def initial(self) -> torch.Tensor:
        """(N,): normal with deviation 0.02, less by sqrt(2 depth) for what a block adds; ones for scales, zeros for shifts."""
        generator = torch.Generator().manual_seed(1000 + self.seed)
        layers = {}
        for name, shape in self.layout.shapes.items():
            deviation = 0.02 / (math.sqrt(2 * self.sizes.depth) if name.endswith(".out") else 1)
            layers[name] = (torch.randn(math.prod(shape), generator=generator) * deviation if len(shape) == 2
                            else torch.full(shape, float(name.endswith("scale"))))
        return self.layout.flat(layers)

    def cut(self, text: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
        """(..., context + 1) bytes of the text from each of the begins, (..., 1)."""
        return text[begins.to(text.device) + torch.arange(self.sizes.context + 1, device=text.device)].long()

    def batch(self, workers: int) -> tuple[torch.Tensor]:
        """The next texts, (W, batch, context + 1): the same for every scheme."""
        begins = torch.randint(len(self.training) - self.sizes.context - 1, (workers, self.sizes.batch, 1), generator=self.generator)
        return (self.cut(self.training, begins),)

    def losses(self, layers: dict[str, torch.Tensor], texts: torch.Tensor) -> torch.Tensor:
        """(R,): the mean cross-entropy of each replica, in nats a byte; texts are (R, B, context + 1)."""
        replicas, batch, length = texts.shape[0], texts.shape[1], texts.shape[2] - 1
        width, heads = self.sizes.width, self.sizes.heads

        def norm(x, name):
            return functional.layer_norm(x, (width,)) * layers[f"{name}scale"][:, None] + layers[f"{name}shift"][:, None]

        def linear(x, name):
            return torch.bmm(x, layers[name].transpose(1, 2))

        offsets = torch.arange(replicas, device=texts.device)[:, None] * BYTES
        tokens = texts[:, :, :-1].reshape(replicas, batch * length)
        positions = layers["positions"][:, None, :length].expand(replicas, batch, length, width)
        x = functional.embedding(tokens + offsets, layers["tokens"].reshape(replicas * BYTES, width))
        x = x + positions.reshape(replicas, batch * length, width)
        for block in range(self.sizes.depth):
            projected = linear(norm(x, f"{block}.attention."), f"{block}.attention.in")
            query, key, value = projected.view(replicas * batch, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
            mixed = attention(query, key, value)
            x = x + linear(mixed.transpose(1, 2).reshape(replicas, batch * length, width), f"{block}.attention.out")
            x = x + linear(functional.gelu(linear(norm(x, f"{block}.mlp."), f"{block}.mlp.in")), f"{block}.mlp.out")
        logits = linear(norm(x, ""), "tokens")
        each = functional.cross_entropy(logits.reshape(-1, BYTES).float(), texts[:, :, 1:].reshape(-1), reduction="none")
        return each.view(replicas, -1).mean(1)

    @torch.no_grad()
    def score(self, parameters: torch.Tensor, is_last: bool) -> float:
        """The validation loss of (N,), in nats a byte; more texts count at the end of a run."""
        count = LAST_TEXTS if is_last else CURVE_TEXTS
        begins = torch.linspace(0, len(self.validation) - self.sizes.context - 2, count).long()[:, None]
        layers, total = self.layout.views(parameters[None]), 0.0
        with torch.autocast(parameters.device.type, dtype=torch.bfloat16):
            for some in begins.split(AT_ONCE):
                total += float(self.losses(layers, self.cut(self.validation, some)[None])[0]) * len(some)
        return total / count

    def rate_at(self, step: int, row) -> float:
        """Of step 1, 2, ...: grows, then falls as a cosine to a tenth."""
        warm_up = self.sizes.warm_up_steps
        if step <= warm_up:
            return row.rate * step / warm_up
        return row.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm_up) / (row.steps - warm_up))))
