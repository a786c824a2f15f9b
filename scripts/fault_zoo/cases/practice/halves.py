"""Half precision and its loss scale."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.reports.material import digits, indices
from scripts.fault_zoo.protocol import Attach, case

# ----------------------------------------------------------------------------------- an epsilon that is zero in fp16


def attributes(y: Tensor) -> Tensor:
    """Return four properties of each number: even, above four, without a straight line, divisible by three."""
    return torch.stack([y % 2 == 0, y > 4, (y == 0) | (y == 6) | (y > 7), y % 3 == 0], 1).float()


def train_attributes(attach: Attach, *, repaired: bool) -> float:
    """Return how many of the attributes of test digits are predicted."""
    torch.manual_seed(0)
    x, y, test_x, test_y = digits()
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    monitor = attach(model, optimizer, scaler=scaler)
    chosen = indices(len(x), 64)
    for _ in range(300):
        i = next(chosen)
        wanted = attributes(y[i])
        with torch.autocast("cpu", torch.float16):
            logits = model(x[i])
            if repaired:
                loss = F.binary_cross_entropy_with_logits(logits, wanted)
            else:
                p = logits.sigmoid()
                loss = -(wanted * (p + 1e-15).log() + (1 - wanted) * (1 - p + 1e-15).log()).mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        return ((model(test_x) > 0) == (attributes(test_y) > 0)).float().mean().item()


@case(
    fault="loss-scale-collapse",
    also=("non-finite", "unstable-formula"),
    onset=0,
    source="https://github.com/pyg-team/pytorch_geometric/pull/2106",
    tags=("fp16", "amp", "multi-label", "digits"),
)
def epsilon_that_fp16_drops(attach: Attach) -> None:
    """The loss is the logarithm of a probability plus 1e-15, which is zero in fp16. As soon as a probability is rounded
    to 1, there is no finite gradient, and the scaler skips the update. An epsilon of the kind that is mended in
    https://github.com/pyg-team/pytorch_geometric/pull/2106.
    """
    train_attributes(attach, repaired=False)


# ---------------------------------------------------------------------------------------- clipped while still scaled


def train_clipped(attach: Attach, *, repaired: bool) -> float:
    """Return the squared error of restored digits, as a fraction of their variance."""
    torch.manual_seed(0)
    x, _, test_x, _ = digits()
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    monitor = attach(model, optimizer, scaler=scaler)
    chosen = indices(len(x), 48)
    for _ in range(300):
        i = next(chosen)
        noisy = x[i] + 0.4 * torch.randn_like(x[i])
        with torch.autocast("cpu", torch.float16):
            out = model(noisy)
        loss = F.mse_loss(out.float(), x[i])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if repaired:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        monitor.step(loss, batch=noisy)
    with torch.no_grad():
        restored = model(test_x + 0.4 * torch.randn_like(test_x))
    return (F.mse_loss(restored, test_x) / test_x.var()).item()


@case(
    fault="learning-rate-too-low",
    also=("loss-plateau",),
    onset=0,
    source="https://github.com/milesial/Pytorch-UNet/issues/468",
    tags=("fp16", "amp", "digits"),
)
def clipped_while_scaled(attach: Attach) -> None:
    """The gradients are clipped to a norm of 1 while they are still multiplied by 65,536, so that the updates are far
    too small. Reported in https://github.com/milesial/Pytorch-UNet/issues/468.
    """
    train_clipped(attach, repaired=False)


@case(
    source="the repaired twin of `clipped_while_scaled`: the gradients are unscaled first",
    tags=("fp16", "amp", "digits"),
)
def clipped_after_unscaling(attach: Attach) -> None:
    """Gradients are scaled, unscaled and clipped."""
    assert train_clipped(attach, repaired=True) < 0.6
