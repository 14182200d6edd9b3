#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Layer dropping in one sitting, by numpy: python3 examples/method.py

Data-parallel training with a parameter server, after Lee, Choi, Jeong, Noh and Shin, Communication Optimization Schemes for Accelerating
Distributed Deep Learning Systems (2020). In each step a worker sends the layers whose gradients matter most, whole. Of every other layer it
sends one bit, which the paper writes as the list [0]; its gradient stays in a residual until it is sent.

tests/python/test_method.py holds the library to this file, bitwise, and examples/quickstart is the same toy in C++.
"""

import numpy as np

LAYERS = {"embedding": 6144, "hidden1.weight": 4096, "hidden1.bias": 64, "hidden2.weight": 4096, "hidden2.bias": 64,
          "hidden3.weight": 4096, "hidden3.bias": 64, "norm": 64, "head.weight": 640, "head.bias": 10}
SIZES = list(LAYERS.values())
WORKERS, DROP_RATIO, RATE, STEPS = 2, 0.8, np.float32(0.25), 12


def zeros(sizes):
    return [np.zeros(n, np.float32) for n in sizes]


def representative_value(a):
    """q_l: the mean of |a_l|, one number for a layer.

    Any order of summation would do for learning. This one is bitwise identical on every machine: blocks of 4,096 elements, in each block 64
    sums of every 64th element, which are folded in half until one is left; the sums of blocks are added in double, in runs of 64.
    """
    totals = []
    for begin in range(0, a.size, 4096):
        block = np.abs(a[begin:begin + 4096])
        block = np.append(block, np.zeros(-block.size % 64, np.float32))
        lanes = np.cumsum(block.reshape(-1, 64), axis=0)[-1]  # cumsum adds one by one; sum() may not
        while lanes.size > 1:
            lanes = lanes[:lanes.size // 2] + lanes[lanes.size // 2:]
        totals.append(float(lanes[0]))
    while len(totals) > 1:
        totals = [float(np.cumsum(totals[run:run + 64])[-1]) for run in range(0, len(totals), 64)]
    return totals[0] / a.size


def search_threshold(values, sizes, drop_ratio):
    """Algorithm 1: add up the sizes of the layers, from the smallest value on, until they exceed the share R of all elements. The value of
    that layer is the threshold. What lies below it, and is dropped, has at most R of the elements."""
    elements = 0
    for q, n in sorted(zip(values, sizes)):
        elements += n
        if elements > drop_ratio * sum(sizes):
            return q
    return -1.0  # never reached: everything is sent


def frame_bytes(frame, sizes):
    """A frame is a dict: layer -> array. On the wire it has a header of 64 bytes, a bit for each layer, padding to a multiple of 64, and
    the layers that are in it, back to back."""
    head = 64 + (len(sizes) + 7) // 8
    return head + -head % 64 + sum(a.nbytes for a in frame.values())


class Worker:
    def __init__(self, sizes, drop_ratio):
        self.sizes, self.drop_ratio = sizes, drop_ratio
        self.parameters, self.residual = zeros(sizes), zeros(sizes)

    def frame(self, gradients):
        """The layers to send. Error feedback: what is dropped now is in the residual, and counts in the next step."""
        for a, g in zip(self.residual, gradients):
            a += g
        self.values = [representative_value(a) for a in self.residual]
        self.threshold = search_threshold(self.values, self.sizes, self.drop_ratio)
        return {l: self.residual[l].copy() for l, q in enumerate(self.values) if q >= self.threshold and q > 0}

    def commit(self, frame):
        """Only once the frame has arrived; a send that fails clears nothing."""
        for l in frame:
            self.residual[l].fill(0)

    def receive(self, reply):
        """Parameters that are not in the reply have not changed: the worker keeps its own."""
        for l, x in reply.items():
            self.parameters[l] = x


class Server:
    def __init__(self, parameters):
        self.parameters = parameters
        self.updated = range(len(parameters))  # the first reply holds every layer

    def update(self, frames):
        """Plain SGD on the mean over all workers, in which a dropped layer counts as zeros. A layer that no worker has sent is left as it
        is, and an optimizer with state would not touch its state either."""
        self.updated = sorted(set().union(*frames))
        for l in self.updated:
            mean = sum((frame[l] for frame in frames if l in frame), np.zeros_like(self.parameters[l])) / np.float32(len(frames))
            self.parameters[l] -= RATE * mean

    def reply(self):
        """The other direction drops layers as well: whatever this step did not update."""
        return {l: self.parameters[l].copy() for l in self.updated}


def optimum(layer, worker):
    """The toy: worker w wants parameters t_w, so that its gradient is x - t_w and all of them together want the mean of t_w."""
    i = np.arange(SIZES[layer])
    common = ((i * 7919 + layer * 104729) % 1021 - 510) / 512 / 2 ** (layer % 4)
    own = ((i * 31 + layer) % 17 - 8) / 128 * (-1) ** worker
    return (common + own).astype(np.float32)


def main():
    targets = [[optimum(l, w) for l in range(len(SIZES))] for w in range(WORKERS)]
    workers, server = [Worker(SIZES, DROP_RATIO) for _ in range(WORKERS)], Server(zeros(SIZES))
    times_sent = [0] * len(SIZES)
    print("step  threshold  layers sent  bytes up  bytes down  distance")
    for step in range(STEPS + 1):
        frames = []
        if step > 0:  # before the first step the server replies with all of its parameters
            for worker, target in zip(workers, targets):
                frame = worker.frame([x - t for x, t in zip(worker.parameters, target)])
                frames.append(frame)
                worker.commit(frame)
                for l in frame:
                    times_sent[l] += 1
            server.update(frames)
        reply = server.reply()
        for worker in workers:
            worker.receive({l: x.copy() for l, x in reply.items()})
        # How far the parameters are from where all workers together want them: the mean of |x - mean of t_w|.
        apart = [x - sum(target[l] for target in targets) / np.float32(WORKERS) for l, x in enumerate(server.parameters)]
        distance = sum(representative_value(d) * d.size for d in apart) / sum(SIZES)
        print(f"{step:4d}  {workers[0].threshold if frames else 0:9.6f}  {' and '.join(f'{len(frame):3d}' for frame in frames) or '-':>11}"
              f"  {sum(frame_bytes(frame, SIZES) for frame in frames):8d}  {WORKERS * frame_bytes(reply, SIZES):10d}  {distance:.6f}")
    print(f"dense: {WORKERS * frame_bytes(dict(enumerate(zeros(SIZES))), SIZES)} bytes a step and direction")
    for l, name in enumerate(LAYERS):
        print(f"{name:<15}sent {times_sent[l]:2d} times in {STEPS * WORKERS}, residual of worker 0 {representative_value(workers[0].residual[l]):.9g}")


if __name__ == "__main__":
    main()
