"""Images, supervised. All of these runs are fine."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from scripts.fault_zoo.cases.healthy_data import (
    Classifier,
    ResNet,
    accuracy,
    digits,
    pretrained_backbone,
    shuffled,
    textures,
)
from scripts.fault_zoo.protocol import Attach, case


@case(source="PyTorch MNIST example, with BatchNorm", tags=("cnn", "batchnorm", "sgd"))
def cnn_digits_sgd(attach: Attach) -> None:
    """Small CNN with BatchNorm, SGD with momentum, MultiStepLR, validation loss every 30 steps."""
    torch.manual_seed(0)
    x, y, test_x, test_y = digits(size=16)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 16, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [120, 200], 0.1)
    loss_fn = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader = shuffled(len(x), 64)
    for step in range(240):
        idx = next(loader)
        loss = loss_fn(model(x[idx]), y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 30 == 29:
            model.eval()
            with torch.no_grad():
                val_loss = loss_fn(model(test_x), test_y)
            model.train()
            monitor.step(loss, batch=x[idx], val_loss=val_loss)
        else:
            monitor.step(loss, batch=x[idx])
    assert accuracy(model, test_x, test_y) > 0.97


@case(source="VGG with Kaiming initialisation, no normalisation", tags=("cnn", "relu", "natural-zeros"))
def plain_relu_cnn(attach: Attach) -> None:
    """Plain deep ReLU CNN: half to two thirds of the activations are zero and a few channels never fire, as usual. It
    learns.
    """
    torch.manual_seed(2)
    x, y, test_x, test_y = digits(size=16)
    layers: list[nn.Module] = []
    inner = 1
    plan: tuple[Any, ...] = (16, 16, "M", 32, 32, "M", 48)
    for outer in plan:
        if outer == "M":
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(inner, outer, 3, padding=1), nn.ReLU(inplace=True)]
        inner = outer
    model = nn.Sequential(
        *layers,
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * 48, 96),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(96, 10),
    )
    for m in model.modules():
        if isinstance(m, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(m.weight, nonlinearity="relu")
            if m.bias is not None:
                nn.init.zeros_(m.bias)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_fn = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader = shuffled(len(x), 32, seed=2)
    for _ in range(300):
        idx = next(loader)
        optimizer.zero_grad()
        loss = loss_fn(model(x[idx]), y[idx])
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[idx])
    assert accuracy(model, test_x, test_y) > 0.95


class ReZero(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.alpha = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.alpha * self.body(x)


@case(source="ReZero, Bachlechner et al. 2020", tags=("residual", "zero-init", "deep"))
def rezero_deep_mlp(attach: Attach) -> None:
    """Twenty-four residual blocks gated by a zero scalar: in step 0 no weight inside any block has a gradient, only the
    gates.
    """
    torch.manual_seed(4)
    x, y, test_x, test_y = digits()
    x, test_x = x.flatten(1), test_x.flatten(1)
    model = nn.Sequential(nn.Linear(64, 128), *[ReZero(128) for _ in range(24)], nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_fn = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader = shuffled(len(x), 96, seed=4)
    for _ in range(160):
        idx = next(loader)
        loss = loss_fn(model(x[idx]), y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[idx])
    assert accuracy(model, test_x, test_y) > 0.94


@case(source="mixup, Zhang et al. 2018", tags=("cnn", "mixup", "regularised"))
def mixup_high_training_loss(attach: Attach) -> None:
    """Mixup, dropout and smoothing: the training loss stays near 1 and the validation loss is far lower. That is
    expected.
    """
    torch.manual_seed(7)
    x, y, test_x, test_y = digits(size=16)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout2d(0.1),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(512, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.05)
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader, mix = shuffled(len(x), 64, seed=7), torch.distributions.Beta(1.0, 1.0)
    for step in range(280):
        idx = next(loader)
        other, share = idx[torch.randperm(64)], mix.sample()
        mixed = share * x[idx] + (1 - share) * x[other]
        logits = model(mixed)
        loss = share * loss_fn(logits, y[idx]) + (1 - share) * loss_fn(logits, y[other])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        context = {}
        if step % 40 == 39:
            model.eval()
            with torch.no_grad():
                context["val_loss"] = F.cross_entropy(model(test_x), test_y)
            model.train()
        monitor.step(loss, batch=mixed, **context)
    assert accuracy(model, test_x, test_y) > 0.95


@case(
    source="PyTorch transfer-learning tutorial: ConvNet as fixed feature extractor",
    tags=("transfer", "frozen", "linear-probe"),
)
def linear_probe_frozen_backbone(attach: Attach) -> None:
    """The backbone is frozen with requires_grad=False and kept in eval mode; only the new head trains. On purpose."""
    backbone = pretrained_backbone(10)
    torch.manual_seed(10)
    x, y, test_x, test_y = digits(size=16)
    for p in backbone.parameters():
        p.requires_grad = False
    model = Classifier(backbone, 128)
    optimizer = torch.optim.SGD(model.fc.parameters(), lr=0.05, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader = shuffled(len(x), 64, seed=10)
    for _ in range(300):
        model.train()
        model.backbone.eval()
        idx = next(loader)
        loss = loss_fn(model(x[idx]), y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[idx])
    assert accuracy(model, test_x, test_y) > 0.9


@case(source="domain adaptation by careful fine-tuning, lr 3e-5", tags=("transfer", "small-lr"))
def finetune_tiny_rate(attach: Attach) -> None:
    """A tiny rate on a trained model: each update is well under a thousandth of the weights, and the loss still halves.
    Slow on purpose.
    """
    torch.manual_seed(13)
    x, y, test_x, test_y = digits(size=16)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 10),
    )
    warm = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = shuffled(len(x), 64, seed=13)
    for _ in range(120):
        idx = next(loader)
        warm.zero_grad()
        F.cross_entropy(model(x[idx]), y[idx]).backward()
        warm.step()
    shifted, test_shifted = 0.5 * x.roll(2, 3) + 0.3, 0.5 * test_x.roll(2, 3) + 0.3  # new camera: paler, two pixels off
    with torch.no_grad():
        before = F.cross_entropy(model(test_shifted), test_y)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-5)
    monitor = attach(model, optimizer, loss_fn=F.cross_entropy)
    for _ in range(400):
        idx = next(loader)
        loss = F.cross_entropy(model(shifted[idx]), y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=shifted[idx])
    with torch.no_grad():
        assert F.cross_entropy(model(test_shifted), test_y) < 0.5 * before


@case(
    source="gradual magnitude pruning, Zhu & Gupta 2017; torch.nn.utils.prune",
    tags=("pruning", "masked", "natural-zeros"),
    tolerate=("rising-sparsity",),
)
def gradual_magnitude_pruning(attach: Attach) -> None:
    """Weights are masked away on a schedule up to 80%: the zero share of weights and gradients rises because it is told
    to.
    """
    torch.manual_seed(16)
    import torch.nn.utils.prune as prune

    x, y, test_x, test_y = digits()
    x, test_x = x.flatten(1), test_x.flatten(1)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    for p in (model[0], model[2]):
        prune.identity(p, "weight")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    monitor = attach(model, optimizer, loss_fn=F.cross_entropy)
    loader = shuffled(len(x), 96, seed=16)
    for step in range(360):
        if step in (120, 160, 200, 240):
            for m in (model[0], model[2]):
                prune.l1_unstructured(m, "weight", amount=0.333)
        idx = next(loader)
        loss = F.cross_entropy(model(x[idx]), y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[idx])
    pruned: Any = model[2]
    assert (pruned.weight == 0).float().mean() > 0.75
    assert accuracy(model, test_x, test_y) > 0.94


@case(
    source="weight normalisation, Salimans & Kingma 2016; torch parametrizations",
    tags=("cnn", "weight-norm", "parametrization"),
)
def weight_norm_cnn(attach: Attach) -> None:
    """Weight normalisation through torch parametrizations: the parameters are called original0 and original1 and have
    very different scales.
    """
    torch.manual_seed(18)
    from torch.nn.utils.parametrizations import weight_norm

    x, y, test_x, test_y = digits(size=16)
    model = nn.Sequential(
        weight_norm(nn.Conv2d(1, 24, 3, padding=1)),
        nn.ELU(),
        nn.MaxPool2d(2),
        weight_norm(nn.Conv2d(24, 32, 3, padding=1)),
        nn.ELU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        weight_norm(nn.Linear(512, 10)),
    )
    optimizer = torch.optim.Adamax(model.parameters(), lr=4e-3)
    loss_fn = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader = shuffled(len(x), 64, seed=18)
    for _ in range(240):
        idx = next(loader)
        loss = loss_fn(model(x[idx]), y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[idx])
    assert accuracy(model, test_x, test_y) > 0.95


@case(source="mean teacher / EMA evaluation weights", tags=("resnet", "ema", "accumulation"))
def gradient_accumulation_with_ema(attach: Attach) -> None:
    """Four micro-batches per update (loss divided by four), and an exponential moving average of the weights for
    evaluation.
    """
    torch.manual_seed(20)
    x, y = textures(2000, seed=20)
    model = ResNet(width=8, zero_init=False)
    ema = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    loss_fn = nn.CrossEntropyLoss()
    accumulate = 4
    monitor = attach(model, optimizer, accumulate=accumulate, loss_fn=loss_fn)
    loader = shuffled(1700, 8, seed=20)
    for _step in range(110):
        total = 0.0
        optimizer.zero_grad()
        for _ in range(accumulate):
            idx = next(loader)
            loss = loss_fn(model(x[idx]), y[idx]) / accumulate
            loss.backward()
            total += loss.item()
        optimizer.step()
        with torch.no_grad():
            for a, b in zip(ema.state_dict().values(), model.state_dict().values(), strict=False):
                a.copy_(b) if not a.is_floating_point() else a.lerp_(b, 0.05)
        monitor.step(total, batch=x[idx])
    assert accuracy(ema, x[1700:], y[1700:]) > 0.8
