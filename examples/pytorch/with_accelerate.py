# SPDX-License-Identifier: MIT
"""Layer dropping with accelerate: torchrun --nproc-per-node 2 examples/pytorch/with_accelerate.py"""

import time

import accelerate
import torch

import lamina.torch


def main():
    accelerator = accelerate.Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
    inputs = torch.randn(2048, 32)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1)), batch_size=32)
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.3), data)
    # What prepare() gives is DDP. Fragments, since one layer has most of this model's elements.
    state = lamina.torch.register(model, drop_ratio=0.9, fragment_elements=4096)
    begin = time.perf_counter()
    for _ in range(4):
        for batch, labels in data:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(batch), labels)
            accelerator.backward(loss)
            optimizer.step()
            if state.step % 32 == 0 and accelerator.is_main_process:
                print(f"step {state.step}: loss {loss.item():.3f}, {state.totals.sent_bytes} bytes, {100 * state.totals.ratio:.1f} % of DDP's, "
                      f"{time.perf_counter() - begin:.2f} s", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
