# SPDX-License-Identifier: MIT
"""The task: nanoGPT's CPU setting (its README: train.py config/train_shakespeare_char.py with 4 layers, 4 heads, a width of 128, a
context of 64, batches of 12, 2,000 iterations, no dropout) on tiny Shakespeare or any other text."""

import hashlib
import math
import pathlib

import numpy as np
import torch

from gpt import Gpt
from task import Task

BATCH = 12  # of a worker
VALIDATION_SHARE = 0.1  # the last of the text
EVALUATED_AT_ONCE = 64
ROOT = pathlib.Path(__file__).resolve().parents[2]


class CharGpt(Task):
    name = "char-gpt"
    clip = 1.0  # norm of a gradient
    warm_up_steps = 100

    @staticmethod
    def read(path: "pathlib.Path | None") -> bytes:
        """The text; without a path the repository's own documentation."""
        if path is not None:
            return path.read_bytes()
        return b"".join(each.read_bytes() for each in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))])

    @staticmethod
    def data_of(text: bytes) -> dict:
        """By which a result says what was learned."""
        return {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}

    def __init__(self, text: bytes, seed: int, workers: int, **model):
        """Of the model: what is not as in nanoGPT's setting. ValueError if the text is too short for a context of validation."""
        letters, tokens = np.unique(np.frombuffer(text, np.uint8), return_inverse=True)
        tokens = torch.from_numpy(tokens.astype(np.int64))
        super().__init__(Gpt(vocabulary=len(letters), **model), self.data_of(text), seed, workers)
        split = len(tokens) - int(VALIDATION_SHARE * len(tokens))
        self.training, self.validation = tokens[:split], tokens[split:]
        if len(self.validation) <= self.model.context:
            least = math.ceil((self.model.context + 1) / VALIDATION_SHARE)
            raise ValueError(f"a text of {len(tokens)} bytes is too short: it has at least {least}")

    def is_hidden(self, layer: str) -> bool:
        return "." in layer and self.is_decayed(layer)

    def texts(self, step: int) -> torch.Tensor:
        """(W, BATCH, context + 1)"""
        begins = torch.randint(len(self.training) - self.model.context, (self.workers, BATCH, 1), generator=self.generator(step))
        return self.training[begins + torch.arange(self.model.context + 1)]

    def gradients(self, parameters: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses (R,) and gradients (R, N) of R replicas, with the texts of W workers divided among them: R is W or 1."""
        leaf = parameters.detach().requires_grad_()
        texts = self.texts(step)
        losses = self.model.losses(leaf, texts.view(leaf.shape[0], -1, texts.shape[2]))
        return losses.detach(), torch.autograd.grad(losses.sum(), leaf)[0]

    @torch.no_grad()
    def validation_loss(self, parameters: torch.Tensor, every: int = 1) -> float:
        """Nats a character, over contexts side by side; every=4 takes each fourth of them."""
        context = self.model.context
        begins = torch.arange(0, len(self.validation) - context, context)[::every]
        total = 0.0
        for some in begins.split(EVALUATED_AT_ONCE):
            texts = self.validation[some[:, None] + torch.arange(context + 1)]
            total += float(self.model.losses(parameters[None], texts[None])) * len(some)
        return total / len(begins)
