# SPDX-License-Identifier: MIT
"""What makes a step of gradients (R, N) for all replicas y, (R, N), at once: step(gradients, rate)."""

import math

import torch

from optimizers import BETAS, EPSILON, AdamWOfMean, orthogonalized


class AdamW:
    """Decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101); PyTorch's fused kernel on CUDA."""

    def __init__(self, task, y: torch.Tensor):
        self.y, self.decay = y, task.layout.decay(task.weight_decay)
        self.mean, self.square, self.steps = torch.zeros_like(y), torch.zeros_like(y), torch.zeros((), device=y.device)

    @torch.no_grad()
    def step(self, gradients, rate):
        self.steps += 1
        self.y.mul_(1 - rate * self.decay)
        if self.y.is_cuda:
            torch._fused_adamw_([self.y], [gradients], [self.mean], [self.square], [], [self.steps], lr=rate, beta1=BETAS[0],
                                beta2=BETAS[1], weight_decay=0.0, eps=EPSILON, amsgrad=False, maximize=False)
            return
        self.mean.lerp_(gradients, 1 - BETAS[0])
        self.square.mul_(BETAS[1]).addcmul_(gradients, gradients, value=1 - BETAS[1])
        mean, square = (moment / (1 - beta ** float(self.steps)) for moment, beta in ((self.mean, BETAS[0]), (self.square, BETAS[1])))
        self.y.addcdiv_(mean, square.sqrt_().add_(EPSILON), value=-rate)


class OfMean:
    """AdamW that divides by the second moment that the mean of all workers' gradients would have."""

    def __init__(self, task, y):
        self.y, self.decay, self.optimizer = y, task.layout.decay(task.weight_decay), AdamWOfMean([y], len(y))

    @torch.no_grad()
    def step(self, gradients, rate):
        self.optimizer.move(self.y, gradients, rate, self.decay)


class Muon:
    """Muon with Nesterov's momentum of 0.95 on the hidden matrices, its updates as large as AdamW's (Liu et al., arXiv 2502.16982);
    AdamW on all other layers. ValueError for a task without hidden matrices."""

    MOMENTUM = 0.95

    def __init__(self, task, y):
        if not task.hidden_matrices:
            raise ValueError("opt=muon is for the task text")
        self.task, self.y, self.others, self.momentum = task, y, AdamW(task, y), torch.zeros_like(y)

    @torch.no_grad()
    def step(self, gradients, rate):
        self.momentum.lerp_(gradients, 1 - self.MOMENTUM)
        direction = self.task.layout.views(gradients.lerp(self.momentum, self.MOMENTUM))
        matrices = {name: self.task.layout.views(self.y)[name] for name in self.task.hidden_matrices}
        before = {name: matrix.clone() for name, matrix in matrices.items()}
        self.others.step(gradients, rate)
        for name, matrix in matrices.items():
            update = orthogonalized(direction[name]) * (0.2 * math.sqrt(max(matrix.shape[1:])))
            matrix.copy_(before[name] * (1 - rate * self.task.weight_decay) - rate * update)


class Sgd:
    """With Nesterov's momentum of 0.9. The weight decay is added to the gradient."""

    MOMENTUM = 0.9

    def __init__(self, task, y):
        self.y, self.decay, self.momentum = y, task.layout.decay(task.weight_decay), torch.zeros_like(y)

    @torch.no_grad()
    def step(self, gradients, rate):
        gradients.addcmul_(self.y, self.decay)
        self.momentum.mul_(self.MOMENTUM).add_(gradients)
        self.y.add_(gradients, alpha=-rate).add_(self.momentum, alpha=-self.MOMENTUM * rate)


OPTIMIZERS = {"adamw": AdamW, "of_mean": OfMean, "muon": Muon, "sgd": Sgd}
