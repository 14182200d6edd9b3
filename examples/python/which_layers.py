# SPDX-License-Identifier: MIT
"""Trains a small network by numpy with layer dropping, one worker, and draws which layers were sent in which step:
python3 examples/python/which_layers.py [FILE.png]. Needs numpy and matplotlib."""

import sys

import matplotlib
import numpy as np

import lamina

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

STEPS, WIDTHS = 120, [20, 256, 128, 64, 32, 5]
draw = np.random.default_rng(0)
weights = [draw.standard_normal((i, o)).astype(np.float32) / np.sqrt(i) for i, o in zip(WIDTHS, WIDTHS[1:])]
layout = lamina.Layout({f"weight {l} {w.shape}": w.shape for l, w in enumerate(weights)})
teacher = draw.standard_normal((WIDTHS[0], WIDTHS[-1]))
worker = lamina.Worker(layout, send_budget=0.3)

sent_in, losses = np.zeros((len(layout), STEPS)), []
for number in range(STEPS):
    # Forward and backward through layers of tanh, towards a linear teacher.
    activations = [draw.standard_normal((64, WIDTHS[0])).astype(np.float32)]
    for weight in weights:
        activations.append(np.tanh(activations[-1] @ weight))
    error = activations[-1] - np.tanh(activations[0] @ teacher)
    losses.append(float((error**2).mean()))
    gradients, back = [], 2 * error / error.size
    for weight, inputs, outputs in zip(reversed(weights), reversed(activations[:-1]), reversed(activations[1:])):
        back = back * (1 - outputs**2)
        gradients.insert(0, np.ascontiguousarray(inputs.T @ back, dtype=np.float32))
        back = back @ weight.T

    step = worker.add(gradients)
    frame = lamina.decode(step.frame(), layout)  # what a server would get
    step.commit()
    for layer in frame.sent:
        mean = np.empty(weights[layer].size, np.float32)
        frame.restore(layer, mean)
        weights[layer] -= 2.0 * mean.reshape(weights[layer].shape)
        sent_in[layer, number] = 1

share = float((sent_in * np.array(layout.sizes)[:, None]).sum() / (layout.elements * STEPS))
figure, (above, below) = plt.subplots(2, sharex=True, figsize=(9, 5), height_ratios=[3, 2], layout="constrained")
for layer in range(len(layout)):
    above.eventplot(np.flatnonzero(sent_in[layer]) + 1, lineoffsets=layer, linelengths=0.7, color="C0")
above.set_yticks(range(len(layout)), layout.names)
above.set_title(f"Layers sent within a budget of 30 %: {100 * share:.0f} % of the elements")
below.plot(range(1, STEPS + 1), losses, color="C1")
below.set(xlabel="step", ylabel="squared error", ylim=(0, None))
name = sys.argv[1] if len(sys.argv) > 1 else "which_layers.png"
figure.savefig(name, dpi=100)
print(f"loss {losses[0]:.3f} at the beginning, {losses[-1]:.3f} after {STEPS} steps, with {100 * share:.0f} % of the elements sent: {name}")
