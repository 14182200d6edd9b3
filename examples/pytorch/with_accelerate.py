# SPDX-License-Identifier: MIT
"""Layer dropping with accelerate: torchrun --nproc-per-node 2 examples/pytorch/with_accelerate.py"""

import accelerate
import torch

import lamina.torch


def main():
    accelerator = accelerate.Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU(),
                                torch.nn.Linear(256, 4))
    inputs = torch.randn(1024, 32)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1)), batch_size=32)
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.05), data)
    state = lamina.torch.register(model, drop_ratio=0.9)  # what prepare() gives is DDP
    for _ in range(2):
        for batch, labels in data:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.cross_entropy(model(batch), labels))
            optimizer.step()
    print(f"rank {accelerator.process_index}: {state.step} steps, {100 * state.totals.ratio:.1f} % of DDP's bytes", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
