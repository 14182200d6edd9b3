# SPDX-License-Identifier: MIT
"""The task of images: what is read, drawn, learned and scored."""

import numpy as np
import pytest
import torch

import cifar
import study
import training
from cifar import Cifar
from resnet import ResNet
from rows import parsed

SMALL = {"widths": (8, 16)}


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Images of which the label decides how many stripes they have, in files as CIFAR-10's."""
    monkeypatch.setattr(cifar, "VALIDATION_IMAGES", 100)
    generator = np.random.default_rng(1)
    for name, images in (("data_batch_1", 300), ("data_batch_2", 200), ("test_batch", 150)):
        labels = generator.integers(10, size=images)
        pixels = generator.integers(100, size=(images, 3, 32, 32))
        pixels += np.where(np.arange(32) * (1 + labels[:, None]) // 16 % 2, 150, 0)[:, None, None]
        np.concatenate([labels[:, None], pixels.reshape(images, -1)], axis=1).astype(np.uint8).tofile(tmp_path / f"{name}.bin")
    return tmp_path


def task(directory, workers=4, seed=0):
    return Cifar(Cifar.read(directory), seed, workers, **SMALL)


def test_the_network():
    model = ResNet()
    assert sum(torch.Size(shape).numel() for shape in model.shapes().values()) == 309_802
    parameters = model.initial(torch.Generator().manual_seed(1))
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    together = model.logits(parameters, images)
    assert together.shape == (4, 10) and not torch.allclose(together[0], together[1], atol=1e-3)
    assert torch.allclose(together[2:3], model.logits(parameters, images[2:3]), atol=1e-5)  # an image depends on no other


def test_files_are_read_as_cifar10_has_them(directory):
    training_images, test_images = Cifar.read(directory)
    raw = np.fromfile(directory / "data_batch_2.bin", np.uint8).reshape(200, 3073)
    assert (len(training_images), len(test_images)) == (500, 150)
    assert training_images.labels[300:].tolist() == raw[:, 0].tolist()
    assert training_images.pixels[307, 2, 5, 9] == raw[7, 1 + 2 * 1024 + 5 * 32 + 9]
    assert Cifar.data_of((training_images, test_images))["images"] == [500, 150]
    assert Cifar.data_of((training_images, test_images)) != Cifar.data_of((training_images[1:], test_images))


def test_images_are_shifted_and_mirrored(directory):
    of = task(directory)
    images, labels = of.batch(3)
    assert images.shape == (4 * cifar.BATCH, 3, 32, 32) and labels.shape == (4 * cifar.BATCH,)
    assert torch.equal(images, of.batch(3)[0])
    assert not torch.equal(images, of.batch(4)[0]) and not torch.equal(images, task(directory, seed=1).batch(3)[0])
    found = set()
    padded = torch.nn.functional.pad(of.training.numbers(), (4, 4, 4, 4))
    for image, label in zip(images[:20], labels):
        windows = ((row, column, is_mirrored) for row in range(9) for column in range(9) for is_mirrored in (False, True))
        found.add(next(of_window for of_window in windows for row, column, is_mirrored in [of_window]
                       for window in [padded[of.training.labels == label, :, row:row + 32, column:column + 32]]
                       if (window.flip(3) if is_mirrored else window).eq(image).flatten(1).all(1).any()))
    assert len(found) > 10 and {is_mirrored for _, _, is_mirrored in found} == {False, True}


def test_nothing_of_validation_is_trained_with(directory):
    of = task(directory)
    assert (len(of.training), len(of.validation), len(of.test)) == (400, 100, 150)
    before = [of.batch(step)[0] for step in range(1, 6)]
    of.validation.pixels[:] = 0
    assert all(torch.equal(images, of.batch(step)[0]) for step, images in zip(range(1, 6), before))


def test_the_dense_gradient_is_the_mean_of_the_workers(directory):
    of = task(directory)
    begin = of.initial()
    losses, apart = of.gradients(begin.expand(4, -1), 7)
    loss, together = of.gradients(begin[None], 7)
    assert losses.shape == (4,) and torch.allclose(losses.mean(), loss[0], atol=1e-5)
    assert torch.allclose(together[0], apart.mean(0), atol=1e-5)
    assert not torch.allclose(apart[0], apart[1], atol=1e-3)


def test_it_learns_and_says_how_much_is_right(directory, tmp_path):
    row = parsed("steps=40 workers=2 optimizer=nesterov rate=0.05")
    of = task(directory, workers=2)
    result = training.train(of, study.scheme_of(of, row), row, tmp_path / "none")
    assert result["validation_loss"] < result["curve"][0]["validation_loss"]
    assert result["test_top1"] > 0.3 and result["validation_top1"] > 0.3
    assert of.scored(of.initial(), of.test)[1] < 0.3
