# SPDX-License-Identifier: MIT
"""Layer dropping with the Hugging Face Trainer: torchrun --nproc-per-node 2 examples/pytorch/with_trainer.py"""

import tempfile
import time

import torch
import transformers

import lamina.torch


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU(),
                                       torch.nn.Linear(256, 4))

    def forward(self, inputs, labels):
        logits = self.net(inputs)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Dropping(transformers.TrainerCallback):
    def on_train_begin(self, arguments, state, control, **_):
        # Here the Trainer has made DDP. It clips after backward(), which would cut what the residual delivers: so it is told not to.
        self.dropping = lamina.torch.register(self.trainer.model_wrapped, drop_ratio=0.9, fragment_elements=4096, max_norm=1.0)
        self.begin = time.perf_counter()

    def on_log(self, arguments, state, control, logs=None, **_):
        if state.is_world_process_zero and "loss" in logs:
            totals = self.dropping.totals
            print(f"step {state.global_step}: loss {float(logs['loss']):.3f}, {totals.sent_bytes} bytes, {100 * totals.ratio:.1f} % of DDP's, "
                  f"{time.perf_counter() - self.begin:.2f} s", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    data = [{"inputs": each, "labels": each[:4].argmax()} for each in torch.randn(2048, 32)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(folder, use_cpu=True, ddp_backend="gloo", optim="sgd", learning_rate=0.3, max_grad_norm=0,
            per_device_train_batch_size=32, num_train_epochs=4, logging_steps=32, save_strategy="no", report_to=[], disable_tqdm=True)
        callback = Dropping()
        callback.trainer = transformers.Trainer(Classifier(), arguments, train_dataset=data, callbacks=[callback])
        callback.trainer.remove_callback(transformers.PrinterCallback)
        callback.trainer.train()
