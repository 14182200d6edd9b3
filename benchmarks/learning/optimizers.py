# SPDX-License-Identifier: MIT
"""What makes a step of a gradient."""

import math

import torch

BETAS, EPSILON = (0.9, 0.99), 1e-8  # of AdamW


class AdamWOfMean(torch.optim.Optimizer):
    """AdamW for one of W workers whose steps are averaged: it divides by about the root of the second moment that the mean of their W
    gradients would have.

    A worker's own gradient has W times the variance of that mean. With m and v, AdamW's moments after the correction of their bias, a
    worker tells signal from noise, and divides by the root of m^2 + max(v - m^2, 0) / W. m^2 keeps a nineteenth of the noise: where there
    is only noise, what stands under the root is too large by a sixth with 4 workers, and nearly twice too large with 16. Without weight
    decay no step is longer than the learning rate. With one worker it is AdamW, but for elements whose v is less than m^2, which can be
    as the two have memories of different lengths. State: as AdamW has."""

    def __init__(self, params, workers: int):
        super().__init__(params, {"lr": 0.0, "weight_decay": 0.0})
        self.workers = workers

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.move(parameter, parameter.grad, group["lr"], group["weight_decay"])

    def move(self, parameter, gradient, rate, decay):
        state = self.state[parameter]
        if not state:
            state.update(step=0, mean=torch.zeros_like(parameter), square=torch.zeros_like(parameter))
        state["step"] += 1
        state["mean"].lerp_(gradient, 1 - BETAS[0])
        state["square"].mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        mean, square = (state[name] / (1 - beta ** state["step"]) for name, beta in zip(("mean", "square"), BETAS))
        signal = mean.square()
        noise = square.sub_(signal).clamp_(min=0)
        parameter.mul_(1 - rate * decay)
        parameter.addcdiv_(mean, signal.add_(noise, alpha=1 / self.workers).sqrt_().add_(EPSILON), value=-rate)


def orthogonalized(matrices: torch.Tensor) -> torch.Tensor:
    """Five Newton-Schulz iterations on (R, m, n) with the coefficients of Muon (Jordan et al., github.com/KellerJordan/Muon); in bfloat16
    on a GPU."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.transpose(-1, -2)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        product = x @ x.transpose(-1, -2)
        x = 3.4445 * x + (-4.7750 * product + 2.0315 * product @ product) @ x
    return (x.transpose(-1, -2) if is_tall else x).float()


class Muon(torch.optim.AdamW):
    """Muon with Nesterov's momentum of 0.95 on the hidden matrices, its updates as large as AdamW's (Liu et al., arXiv 2502.16982); AdamW
    on all other layers. A group's "hidden" is (m, n) for parameters (R, m n) that are hidden matrices, and None for others. ValueError
    where none is."""

    MOMENTUM = 0.95

    def __init__(self, groups):
        if not any(group["hidden"] for group in groups):
            raise ValueError("optimizer=muon is for whole hidden matrices: of the task char-gpt, and not with held_back=nothing")
        super().__init__(groups, lr=0.0, betas=BETAS, eps=EPSILON, foreach=False)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            parameter = group["params"][0]
            if not group["hidden"] or parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state.update(step=torch.zeros(()), momentum=torch.zeros_like(parameter))  # AdamW loads no state without a step
            momentum = state["momentum"].lerp_(parameter.grad, 1 - self.MOMENTUM)
            direction = orthogonalized(parameter.grad.lerp(momentum, self.MOMENTUM).view(-1, *group["hidden"]))
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(direction.flatten(1), alpha=-0.2 * math.sqrt(max(group["hidden"])) * group["lr"])
            parameter.grad = None
        super().step()


OPTIMIZERS = {  # of the groups of parameters, and of the workers whose steps are averaged
    "adamw": lambda groups, workers: torch.optim.AdamW(groups, lr=0.0, betas=BETAS, eps=EPSILON, foreach=False),
    "adamw_of_mean": AdamWOfMean,
    "muon": lambda groups, workers: Muon(groups),
    "sgd": lambda groups, workers: torch.optim.SGD(groups, lr=0.0),
    "nesterov": lambda groups, workers: torch.optim.SGD(groups, lr=0.0, momentum=0.9, nesterov=True),
}
# AdamW's is apart from the gradient, that of SGD is added to it.
WEIGHT_DECAY = {"adamw": 0.1, "adamw_of_mean": 0.1, "muon": 0.1, "sgd": 5e-4, "nesterov": 5e-4}


def adamw_decay(task) -> torch.Tensor:
    """(N,): of each element, for optimizers that the study has itself."""
    return torch.cat([torch.full((math.prod(shape),), WEIGHT_DECAY["adamw"] * task.is_decayed(name)) for name, shape in task.shapes().items()])
