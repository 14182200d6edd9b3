# SPDX-License-Identifier: MIT
"""The task: CIFAR-10 (Krizhevsky 2009), all 50,000 images, shifted by up to four pixels and mirrored, by a small residual network."""

import dataclasses
import hashlib
import pathlib

import numpy as np
import torch
from torch.nn import functional

from resnet import ResNet
from task import Task

BATCH = 32  # of a worker
VALIDATION_IMAGES = 5000  # the last of those to train with
EVALUATED_AT_ONCE = 500
SIDE, MOST_SHIFT = 32, 4
RECORD_BYTES = 1 + 3 * SIDE * SIDE  # the label, then red, green and blue
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)  # of the images to train with


@dataclasses.dataclass
class Images:
    pixels: torch.Tensor  #: (n, 3, 32, 32) uint8
    labels: torch.Tensor  #: (n,)

    def __getitem__(self, which) -> "Images":
        return Images(self.pixels[which], self.labels[which])

    def __len__(self):
        return len(self.labels)

    def numbers(self) -> torch.Tensor:
        return (self.pixels / 255 - torch.tensor(MEAN)[:, None, None]) / torch.tensor(DEVIATION)[:, None, None]


def images_of(files: "list[pathlib.Path]") -> Images:
    """Of all of them, in order. ValueError, naming the file, for one that holds no whole images, or other labels than 0 to 9."""
    records = []
    for path in files:
        data = np.frombuffer(path.read_bytes(), np.uint8)
        if not len(data) or len(data) % RECORD_BYTES:
            raise ValueError(f"{path} has {len(data):,} bytes, which are no images of {RECORD_BYTES:,}")
        records.append(data.reshape(-1, RECORD_BYTES))
        if records[-1][:, 0].max() > 9:
            raise ValueError(f"{path} has the label {records[-1][:, 0].max()}: those of CIFAR-10 are 0 to 9")
    of_all = torch.from_numpy(np.concatenate(records))
    return Images(of_all[:, 1:].reshape(-1, 3, SIDE, SIDE), of_all[:, 0].long())


class Cifar(Task):
    name = "cifar"
    clip = None
    warm_up_steps = 100

    @staticmethod
    def read(directory: "pathlib.Path | None") -> tuple[Images, Images]:
        """The binary version of CIFAR-10: to train and to test with. ValueError for anything else."""
        if directory is None:
            raise ValueError("the task cifar needs --data DIRECTORY, with the binary version of CIFAR-10")
        training, test = sorted(directory.glob("data_batch_*.bin")), directory / "test_batch.bin"
        if not training or not test.exists():
            raise ValueError(f"{directory} has no data_batch_*.bin and test_batch.bin: it must be the binary version of CIFAR-10")
        return images_of(training), images_of([test])

    @staticmethod
    def data_of(data: tuple[Images, Images]) -> dict:
        digest = hashlib.sha256()
        for each in data:
            digest.update(each.pixels.numpy().tobytes() + each.labels.numpy().tobytes())
        return {"images": [len(each) for each in data], "sha256": digest.hexdigest()}

    def __init__(self, data: tuple[Images, Images], seed: int, workers: int, **model):
        """Of the model: what is not as by default. ValueError if there are no more images than those of validation."""
        training, self.test = data
        super().__init__(ResNet(**model), self.data_of(data), seed, workers)
        if len(training) <= VALIDATION_IMAGES:
            raise ValueError(f"{len(training):,} images are too few: more than {VALIDATION_IMAGES:,}, which are for validation")
        self.training, self.validation = training[:-VALIDATION_IMAGES], training[-VALIDATION_IMAGES:]

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(W BATCH, 3, 32, 32) and their labels, worker by worker."""
        generator = self.generator(step)
        drawn = self.training[torch.randint(len(self.training), (self.workers * BATCH,), generator=generator)]
        shifts = torch.randint(2 * MOST_SHIFT + 1, (2, len(drawn), 1), generator=generator)
        is_mirrored = torch.rand(len(drawn), 1, generator=generator) < 0.5
        along = torch.arange(SIDE)
        rows = shifts[0] + along
        columns = shifts[1] + torch.where(is_mirrored, along.flip(0), along)
        padded = functional.pad(drawn.numbers(), 4 * (MOST_SHIFT,))
        images = torch.arange(len(drawn))[:, None, None, None]
        return padded[images, torch.arange(3)[:, None, None], rows[:, None, :, None], columns[:, None, None, :]], drawn.labels

    def gradients(self, parameters: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses (R,) and gradients (R, N) of R replicas, with the images of W workers divided among them: R is W or 1."""
        replicas = len(parameters)
        images, labels = (each.chunk(replicas) for each in self.batch(step))
        losses, gradients = torch.empty(replicas), torch.empty(parameters.shape)
        for replica in range(replicas):
            leaf = parameters[replica].detach().clone().requires_grad_()
            loss = functional.cross_entropy(self.model.logits(leaf, images[replica]), labels[replica])
            losses[replica], gradients[replica] = loss.detach(), torch.autograd.grad(loss, leaf)[0]
        return losses, gradients

    @torch.no_grad()
    def scored(self, parameters: torch.Tensor, images: Images) -> tuple[float, float]:
        """The mean cross-entropy, in nats an image, and the share that is right."""
        loss = right = 0.0
        for begin in range(0, len(images), EVALUATED_AT_ONCE):
            some = images[begin:begin + EVALUATED_AT_ONCE]
            logits = self.model.logits(parameters, some.numbers())
            loss += float(functional.cross_entropy(logits, some.labels, reduction="sum"))
            right += int((logits.argmax(1) == some.labels).sum())
        return loss / len(images), right / len(images)

    def validation_loss(self, parameters: torch.Tensor, every: int = 1) -> float:
        """Nats an image; every=4 takes each fourth of them."""
        return self.scored(parameters, self.validation[::every])[0]

    def facts(self, parameters: torch.Tensor) -> dict:
        """Of the end of a run. Nothing is chosen by what the images to test with say."""
        return {"validation_top1": round(self.scored(parameters, self.validation)[1], 5),
                "test_top1": round(self.scored(parameters, self.test)[1], 5)}
