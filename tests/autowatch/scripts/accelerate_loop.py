"""A loop of Accelerate with accumulation."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(watch):
    from accelerate import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    inputs = torch.randn(384, 8)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, parts, batch = [], [], []
    with watch(model, optimizer) as monitor:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                parts, batch = [*parts, loss / 2], [*batch, x]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    monitor.step(sum(parts), batch=batch)
                    parts, batch = [], []
                losses.append(loss.item())
    return losses
