# SPDX-License-Identifier: MIT
"""Layer dropping between two replicas of a model that FSDP2 shards over two ranks each:

    torchrun --nproc-per-node 4 examples/pytorch/with_fsdp2.py
"""

import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lamina.torch


def main():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()) for _ in range(3)), torch.nn.Linear(256, 4))
    for block in model[:3]:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    dropping = lamina.torch.replicate(model, mesh.get_group("replicate"), drop_ratio=0.8)
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    begin = time.perf_counter()
    for step in range(1, 129):
        inputs = torch.randn(32, 256, generator=torch.Generator().manual_seed(step * 4 + dist.get_rank()))
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), inputs[:, :4].argmax(1))
        loss.backward()
        optimizer.step()
        if step % 32 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}, {dropping.totals.sent_bytes} bytes, {100 * dropping.totals.ratio:.1f} % of HSDP's, "
                  f"{time.perf_counter() - begin:.2f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
