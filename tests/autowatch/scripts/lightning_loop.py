"""A Lightning module with clipping and accumulation."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(watch):
    import lightning

    losses = []

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))

        def training_step(self, batch, index):
            (inputs,) = batch
            loss = nn.functional.cross_entropy(self.net(inputs), inputs.argmax(1))
            losses.append(loss.item())
            return loss

        def validation_step(self, batch, index):
            losses.append(self.net(batch[0]).sum().item())

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(320, 8))
    trainer = lightning.Trainer(
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=watch.callbacks("lightning"),
    )
    trainer.fit(Classifier(), DataLoader(data, 16), DataLoader(TensorDataset(torch.randn(32, 8)), 16))
    return losses
