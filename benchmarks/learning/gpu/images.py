# SPDX-License-Identifier: MIT
"""The task of images: ResNet-9 (David Page, How to train your ResNet) on 10,000 images of CIFAR-10, shifted by up to four pixels and
mirrored. It has 6.6 million parameters."""

import dataclasses
import math
import pathlib

import torch
from torch.nn import functional

from cifar import MOST_SHIFT, SIDE, images_of
from gpu.layout import Layout

MEAN, DEVIATION = 0.4734, 0.2516
TEST_IMAGES, AT_ONCE = 2000, 1000


@dataclasses.dataclass(frozen=True)
class Sizes:
    widths: tuple[int, int, int, int] = (64, 128, 256, 512)
    batch: int = 64  #: images of a worker in a step
    warm_up_steps: int = 100


class Images:
    metric, digits, clip, weight_decay = "top1", 4, None, 5e-4
    hidden_matrices = ()
    TOY = Sizes(widths=(16, 32, 32, 64), batch=8, warm_up_steps=4)

    def __init__(self, path: pathlib.Path, seed: int, device: torch.device, sizes: Sizes = Sizes()):
        """Of data_batch_1.bin and test_batch.bin of the directory, CIFAR-10's binary version. ValueError for other files."""
        def normalized(name):
            images = images_of([path / name])
            return ((images.pixels.float() / 255 - MEAN) / DEVIATION).to(device), images.labels.to(device)

        images, self.labels = normalized("data_batch_1.bin")
        self.padded = functional.pad(images, 4 * (MOST_SHIFT,)).to(torch.bfloat16)
        self.test, self.test_labels = (each[:TEST_IMAGES] for each in normalized("test_batch.bin"))
        self.test = self.test.to(torch.bfloat16)
        self.sizes, self.seed, self.generator = sizes, seed, torch.Generator().manual_seed(seed)
        self.order, self.position = torch.empty(0, dtype=torch.long), 0
        a, b, c, d = sizes.widths
        shapes = {}
        for name, before, width in (("stem", 3, a), ("1", a, b), ("1.first", b, b), ("1.second", b, b),
                                    ("2", b, c), ("3", c, d), ("3.first", d, d), ("3.second", d, d)):
            shapes |= {name: (width, before, 3, 3), f"{name}.scale": (width,), f"{name}.shift": (width,)}
        self.layout = Layout(shapes | {"head": (10, d), "head.shift": (10,)}, device)

    def initial(self) -> torch.Tensor:
        """(N,): normal, as wide as He et al. (arXiv 1502.01852) have it, the head half as wide; ones for scales, zeros for shifts."""
        generator = torch.Generator().manual_seed(1000 + self.seed)
        layers = {}
        for name, shape in self.layout.shapes.items():
            deviation = math.sqrt(2 / math.prod(shape[1:]))
            layers[name] = (torch.randn(math.prod(shape), generator=generator) * deviation * (0.5 if name == "head" else 1)
                            if len(shape) > 1 else torch.full(shape, float(name.endswith(".scale"))))
        return self.layout.flat(layers)

    def batch(self, workers: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The next images, (W, batch, 3, 32, 32), and their labels, each epoch in a new order: the same for every scheme."""
        count, device = workers * self.sizes.batch, self.padded.device
        if self.position + count > len(self.order):
            self.order, self.position = torch.randperm(len(self.labels), generator=self.generator), 0
        drawn = self.order[self.position:self.position + count].to(device)
        self.position += count
        right, down = (torch.randint(2 * MOST_SHIFT + 1, (count,), generator=self.generator).to(device) for _ in range(2))
        is_mirrored = (torch.rand(count, generator=self.generator) < 0.5).to(device)
        along = torch.arange(SIDE, device=device)
        rows, columns = down[:, None] + along, right[:, None] + along
        columns = torch.where(is_mirrored[:, None], columns.flip(1), columns)
        images = self.padded[drawn[:, None, None, None], torch.arange(3, device=device)[:, None, None], rows[:, None, :, None],
                             columns[:, None, None, :]]
        return images.view(workers, -1, 3, SIDE, SIDE), self.labels[drawn].view(workers, -1)

    def logits(self, layers: dict[str, torch.Tensor], images: torch.Tensor) -> torch.Tensor:
        """(R, B, 10) of images (R, B, 3, 32, 32). A replica is a group of each convolution; each batch is normalized by itself."""
        replicas, batch = images.shape[:2]

        def convolved(x, name):
            weight = layers[name]
            x = functional.conv2d(x, weight.reshape(-1, *weight.shape[2:]), padding=1, groups=replicas)
            return torch.relu(functional.batch_norm(x, None, None, layers[f"{name}.scale"].reshape(-1), layers[f"{name}.shift"].reshape(-1),
                                                    training=True))

        x = images.transpose(0, 1).reshape(batch, replicas * 3, SIDE, SIDE).to(memory_format=torch.channels_last)
        x = functional.max_pool2d(convolved(convolved(x, "stem"), "1"), 2)
        x = x + convolved(convolved(x, "1.first"), "1.second")
        x = functional.max_pool2d(convolved(x, "2"), 2)
        x = functional.max_pool2d(convolved(x, "3"), 2)
        x = x + convolved(convolved(x, "3.first"), "3.second")
        x = x.amax((2, 3)).view(batch, replicas, -1).transpose(0, 1)
        return torch.bmm(x, layers["head"].transpose(1, 2)) * 0.125 + layers["head.shift"][:, None]

    def losses(self, layers: dict[str, torch.Tensor], images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """(R,): the mean cross-entropy of each replica, with smoothed labels."""
        logits = self.logits(layers, images)
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none",
                                        label_smoothing=0.1).view(labels.shape).mean(1)

    @torch.no_grad()
    def score(self, parameters: torch.Tensor, is_last: bool) -> float:
        """Top-1 of (N,) on the test images, in per cent."""
        layers = self.layout.views(parameters[None])
        with torch.autocast(parameters.device.type, dtype=torch.bfloat16):
            right = sum(int((self.logits(layers, images[None])[0].argmax(1) == labels).sum())
                        for images, labels in zip(self.test.split(AT_ONCE), self.test_labels.split(AT_ONCE)))
        return 100 * right / len(self.test)

    def rate_at(self, step: int, row) -> float:
        """Of step 1, 2, ...: grows, then falls to almost 0 on a line."""
        warm_up = self.sizes.warm_up_steps
        if step <= warm_up:
            return row.rate * step / warm_up
        return row.rate * max(0.0, 1 - (step - warm_up) / (row.steps - warm_up)) + 1e-6
