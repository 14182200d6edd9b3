# SPDX-License-Identifier: MIT
"""Layer dropping with Lightning, on two processes of this machine: python examples/pytorch/with_lightning.py"""

import time

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
        # Here DDP is there, and no backward pass has been. DDPStrategy(ddp_comm_hook=...) registers hooks on GPUs only.
        self.dropping = lamina.torch.register(self.trainer.strategy.model, drop_ratio=0.9, fragment_elements=4096)
        self.begin = time.perf_counter()

    def training_step(self, batch, _):
        inputs, labels = batch
        return torch.nn.functional.cross_entropy(self.net(inputs), labels)

    def on_train_batch_end(self, outputs, *_):
        if self.dropping.step % 32 == 0 and self.global_rank == 0:
            totals = self.dropping.totals
            print(f"step {totals.steps}: loss {outputs['loss'].item():.3f}, {totals.sent_bytes} bytes, {100 * totals.ratio:.1f} % of DDP's, "
                  f"{time.perf_counter() - self.begin:.2f} s", flush=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.3)


if __name__ == "__main__":
    inputs = torch.randn(2048, 32, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1))
    trainer = lightning.Trainer(accelerator="cpu", devices=2, max_epochs=4, enable_checkpointing=False, logger=False,
                                enable_progress_bar=False, enable_model_summary=False, strategy=DDPStrategy(process_group_backend="gloo"))
    trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=32))
