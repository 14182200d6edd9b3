# SPDX-License-Identifier: MIT
"""Local updates in the place that torchtitan has for changes of its optimizers, the post_optimizer_build_fn of a model: ranks of a replica
shard the model by FSDP2, and replicas exchange, as in DiLoCo. What torchtitan gives to it is made by hand here, so that this runs without:

    torchrun --nproc-per-node 4 examples/pytorch/with_torchtitan.py
"""

import time
import types

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lamina.torch


def use_local_updates(optimizers, model_parts, parallel_dims):
    """The post_optimizer_build_fn. Its model is sharded over the mesh 'fsdp' only, and not replicated by HSDP."""
    group = parallel_dims.get_mesh("dp_replicate").get_group()
    optimizers.optimizers = [lamina.torch.LocalUpdates(each, process_group=group, send_budget=0.18, fragment_elements=4096)
                             for each in optimizers.optimizers]


def main():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "fsdp"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
    fully_shard(model, mesh=mesh["fsdp"])
    optimizers = types.SimpleNamespace(optimizers=[torch.optim.AdamW(model.parameters(), 0.003)])
    use_local_updates(optimizers, [model], types.SimpleNamespace(get_mesh=lambda name: mesh[name]))
    local, = optimizers.optimizers
    begin = time.perf_counter()
    for step in range(1, 129):
        inputs = torch.randn(32, 256, generator=torch.Generator().manual_seed(step * 4 + dist.get_rank()))
        local.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), inputs[:, :4].argmax(1))
        loss.backward()
        local.step()
        if step % 32 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}, {local.totals.sent_bytes} bytes, {100 * local.totals.ratio:.1f} % of HSDP's, "
                  f"{time.perf_counter() - begin:.2f} s", flush=True)
    local.finish()  # the replicas have one model from here on
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
