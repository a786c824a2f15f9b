"""Half precision."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.reports.material import accuracy, digits, indices
from scripts.fault_zoo.protocol import Attach, case

# --------------------------------------------------------------------------------------- Adam on parameters in fp16


def train_half(attach: Attach, *, repaired: bool) -> float:
    """Return the accuracy on test digits."""
    torch.manual_seed(0)
    x, y, test_x, test_y = digits()
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10)).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4 if repaired else 1e-8)
    monitor = attach(model, optimizer)
    chosen = indices(len(x), 64)
    for _ in range(300):
        i = next(chosen)
        rows = x[i].half()
        loss = F.cross_entropy(model(rows).float(), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=rows)
    return accuracy(model, test_x.half(), test_y)


@case(
    fault="non-finite",
    also=("fp16-underflow",),
    onset=0,
    source="https://github.com/afiaka87/glide-finetune/issues/5",
    tags=("fp16", "digits"),
)
def adam_in_half_precision(attach: Attach) -> None:
    """The parameters are in fp16, where Adam's eps of 1e-8 and the squares of small gradients are zero. The first step
    divides by zero. Reported in https://github.com/afiaka87/glide-finetune/issues/5.
    """
    train_half(attach, repaired=False)


@case(source="the repaired twin of `adam_in_half_precision`: eps is 1e-4", tags=("fp16", "digits"))
def adam_in_half_precision_with_large_eps(attach: Attach) -> None:
    """All parameters are in fp16 and Adam has an eps that fp16 can hold."""
    assert train_half(attach, repaired=True) > 0.9


# ------------------------------------------------------------------------------------------- a norm taken in fp16


class CosineClassifier(nn.Module):
    """Features are scaled to length one, then compared with one direction per class."""

    def __init__(self, *, norm_in_float: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 128)
        self.body = nn.Linear(128, 64)
        self.directions = nn.Linear(64, 10, bias=False)
        self.norm_in_float = norm_in_float
        for layer in (self.stem, self.body):
            nn.init.kaiming_normal_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(F.relu(self.stem(x)))
        if self.norm_in_float:
            h = h.float()
        h = h / (h * h).sum(1, keepdim=True).sqrt()
        return 8 * self.directions(h)


def train_cosine(attach: Attach, *, repaired: bool) -> float:
    """Return the accuracy on test digits."""
    torch.manual_seed(1)
    x, y, test_x, test_y = digits(raw=True)
    model = CosineClassifier(norm_in_float=repaired)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    monitor = attach(model, optimizer, scaler=scaler)
    chosen = indices(len(x), 64)
    for _ in range(400):
        i = next(chosen)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x[i]).float(), y[i])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        monitor.step(loss, batch=x[i])
    return accuracy(model, test_x, test_y)


@case(
    fault="no-gradient",
    also=("non-finite", "loss-scale-collapse"),
    onset=0,
    tolerate=("loss-plateau",),
    source="https://github.com/NVIDIA/apex/issues/834",
    tags=("fp16", "amp", "digits"),
)
def norm_that_overflows(attach: Attach) -> None:
    """The inputs are pixels in 0..255 and the length of the features is computed in fp16, where their squares are
    infinite. So each feature is divided by infinity: all outputs and all gradients are 0. Reported in
    https://github.com/NVIDIA/apex/issues/834, where the scale of the loss fell to 0.
    """
    train_cosine(attach, repaired=False)
