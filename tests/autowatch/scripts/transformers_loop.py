"""A training by the trainer of transformers, with clipping and accumulation."""

import tempfile

import torch
from torch import nn


class Regressor(nn.Module):
    def __init__(self, losses):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.losses = losses

    def forward(self, inputs, labels):
        loss = (self.net(inputs) - labels).square().mean()
        self.losses.append(loss.item())
        return {"loss": loss}


def main(watch):
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    losses = []
    inputs = torch.randn(256, 8)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=Regressor(losses),
            args=TrainingArguments(
                output_dir=folder,
                max_steps=20,
                per_device_train_batch_size=8,
                gradient_accumulation_steps=2,
                learning_rate=1e-2,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
            ),
            train_dataset=[{"inputs": x, "labels": x.sum(0, keepdim=True)} for x in inputs],
            callbacks=watch.callbacks("transformers"),
        )
        trainer.train()
    return losses
