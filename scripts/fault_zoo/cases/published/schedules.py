"""Optimizers, learning rates, and what is done to the weights between updates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from scripts.fault_zoo.cases.published.data import loader, setup, split, standard, table
from scripts.fault_zoo.protocol import Attach, case


class TwoPass(torch.optim.Optimizer):
    """Adam with centralised gradients and one step counter: a pass for the moments, then a pass for the weights."""

    def __init__(
        self,
        params: Iterator[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        patient: bool = True,
    ) -> None:
        self.patient = patient
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["m"], state["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
                grad = p.grad - p.grad.mean(tuple(range(1, p.dim())), keepdim=True) if p.dim() > 1 else p.grad
                state["step"] += 1
                state["m"].lerp_(grad, 1 - group["betas"][0])
                state["v"].lerp_(grad * grad, 1 - group["betas"][1])
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            first = with_gradient[0] if self.patient and with_gradient else group["params"][0]
            if first.grad is None:
                continue
            t = self.state[first]["step"]
            for p in with_gradient:
                m = self.state[p]["m"] / (1 - group["betas"][0] ** t)
                v = self.state[p]["v"] / (1 - group["betas"][1] ** t)
                p.add_(m / (v.sqrt() + group["eps"]), alpha=-group["lr"])


def _forecaster(attach: Attach, patient: bool) -> None:
    setup(523)
    x, y = table("wine")
    x = standard(x)
    (x, y), (x_val, y_val) = split(x, y, held_out=38)
    model = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3))
    for p in model[0].parameters():
        p.requires_grad = False
    optimizer = TwoPass(model.parameters(), lr=1e-3, patient=patient)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for i, (rows, labels) in enumerate(loader(x, y, size=28, steps=200)):
        optimizer.zero_grad()
        loss = criterion(model(rows), labels)
        loss.backward()
        optimizer.step()
        if i % 25 < 24:
            monitor.step(loss, batch=rows)
            continue
        with torch.no_grad():
            val_loss = criterion(model(x_val), y_val)
        monitor.step(loss, batch=rows, val_loss=val_loss)


@case(
    fault="not-optimized",
    layers=("2", "4"),
    onset=0,
    also=("loss-plateau",),
    tolerate=("learning-rate-too-low",),
    source="kozistr/pytorch_optimizer#125: Ranger21's second pass is left out when the first parameter has no gradient",
)
def first_layer_frozen(attach: Attach) -> None:
    """Wines by three layers, the first frozen, and an optimizer that works in two passes."""
    _forecaster(attach, patient=False)


@case(fault=None, source="kozistr/pytorch_optimizer#125, after the change")
def first_layer_frozen_fixed(attach: Attach) -> None:
    """The same with the first parameter that has a gradient."""
    _forecaster(attach, patient=True)
