# SPDX-License-Identifier: MIT
"""Layer dropping with Lightning, on two processes of this machine: python examples/pytorch/with_lightning.py"""

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy

import lamina.torch


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU(),
                                       torch.nn.Linear(256, 4))

    def on_train_start(self):
        # Here DDP is there, and no backward pass has been. DDPStrategy(ddp_comm_hook=...) registers hooks on GPUs alone.
        self.dropping = lamina.torch.register(self.trainer.strategy.model, drop_ratio=0.9)

    def training_step(self, batch, _):
        inputs, labels = batch
        return torch.nn.functional.cross_entropy(self.net(inputs), labels)

    def on_train_end(self):
        print(f"rank {self.global_rank}: {self.dropping.step} steps, {100 * self.dropping.totals.ratio:.1f} % of DDP's bytes",
              flush=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


if __name__ == "__main__":
    inputs = torch.randn(1024, 32, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1))
    trainer = lightning.Trainer(accelerator="cpu", devices=2, max_epochs=2, enable_checkpointing=False, logger=False,
                                enable_progress_bar=False, enable_model_summary=False,
                                strategy=DDPStrategy(process_group_backend="gloo"))
    trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=32))
