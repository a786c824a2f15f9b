"""Images, supervised. All of these runs are fine."""

from __future__ import annotations

import math
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


@case(
    source="torchvision ResNet with zero_init_residual=True (Goyal et al. 2017)",
    tags=("resnet", "batchnorm", "zero-init", "sgd"),
)
def resnet_zero_init_residual(attach: Attach) -> None:
    """The last BatchNorm of each block starts at zero: in step 0 the convolutions inside the blocks get exactly no
    gradient.
    """
    torch.manual_seed(1)
    x, y = textures(2400, seed=1)
    model = ResNet()
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.SGD(
        [{"params": decay, "weight_decay": 5e-4}, {"params": rest, "weight_decay": 0.0}],
        lr=0.1,
        momentum=0.9,
        nesterov=True,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 150)
    loss_fn = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader = shuffled(2000, 32, seed=1)
    for _ in range(150):
        idx = next(loader)
        loss = loss_fn(model(x[idx]), y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        monitor.step(loss, batch=x[idx])
    assert accuracy(model, x[2000:], y[2000:]) > 0.85


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim: int, scale: float = 1e-6) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 5, padding=2, groups=dim)
        self.norm = nn.LayerNorm(dim)
        self.pwconv1 = nn.Linear(dim, 4 * dim)
        self.pwconv2 = nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(scale * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        h = self.dwconv(x).permute(0, 2, 3, 1)
        h = self.pwconv2(F.gelu(self.pwconv1(self.norm(h))))
        return x + (self.gamma * h).permute(0, 3, 1, 2)


@case(source="ConvNeXt, Liu et al. 2022: LayerScale starts at 1e-6", tags=("cnn", "layerscale", "adamw"))
def convnext_layerscale(attach: Attach) -> None:
    """LayerScale at 1e-6: for the first steps the gradients inside the blocks are a million times smaller than outside.
    By design.
    """
    torch.manual_seed(3)
    x, y = textures(2000, seed=3)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 2, stride=2),
        *[ConvNeXtBlock(32) for _ in range(4)],
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.LayerNorm(32),
        nn.Linear(32, 6),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05)
    warmup = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1, (s + 1) / 20) * 0.5 * (1 + math.cos(math.pi * s / 200))
    )
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader = shuffled(1700, 32, seed=3)
    for _ in range(200):
        idx = next(loader)
        loss = loss_fn(model(x[idx]), y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warmup.step()
        monitor.step(loss, batch=x[idx])
    assert accuracy(model, x[1700:], y[1700:]) > 0.8


class UNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()

        def double(a: Any, b: Any) -> Any:
            return nn.Sequential(
                nn.Conv2d(a, b, 3, padding=1),
                nn.GroupNorm(4, b),
                nn.ReLU(),
                nn.Conv2d(b, b, 3, padding=1),
                nn.GroupNorm(4, b),
                nn.ReLU(),
            )

        self.down1, self.down2, self.bottom = double(1, width), double(width, 2 * width), double(2 * width, 4 * width)
        self.up2, self.conv2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), double(4 * width, 2 * width)
        self.up1, self.conv1 = nn.ConvTranspose2d(2 * width, width, 2, 2), double(2 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Any) -> Any:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.bottom(F.max_pool2d(b, 2))
        b = self.conv2(torch.cat([self.up2(c), b], 1))
        a = self.conv1(torch.cat([self.up1(b), a], 1))
        return self.head(a)


@case(source="U-Net segmentation with BCE + soft Dice", tags=("unet", "segmentation", "imbalance"))
def unet_small_lesions(attach: Attach) -> None:
    """Segmentation where a few percent of the pixels are foreground; BCE plus Dice."""
    torch.manual_seed(5)
    size, n = 32, 600
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    centre, radius = torch.rand(n, 2, 1, 1) * 22 + 5, torch.rand(n, 1, 1) * 2.5 + 2
    mask = (((yy - centre[:, 0]) ** 2 + (xx - centre[:, 1]) ** 2) < radius**2).float()[:, None]
    image = mask * 1.0 + 0.7 * torch.randn(n, 1, size, size)
    model = UNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    monitor = attach(model, optimizer)
    loader = shuffled(540, 12, seed=5)
    for _ in range(200):
        idx = next(loader)
        logits = model(image[idx])
        p = torch.sigmoid(logits)
        dice = 1 - (2 * (p * mask[idx]).sum((1, 2, 3)) + 1) / (p.sum((1, 2, 3)) + mask[idx].sum((1, 2, 3)) + 1)
        loss = F.binary_cross_entropy_with_logits(logits, mask[idx]) + dice.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=image[idx])
    with torch.no_grad():
        p = (model(image[540:]) > 0).float()
        assert 2 * (p * mask[540:]).sum() / (p.sum() + mask[540:].sum()) > 0.75


class ViT(nn.Module):
    def __init__(self, dim: int = 64, depth: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, dim, 4, stride=4)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.position = nn.Parameter(0.2 * torch.randn(1, 17, dim))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 2 * dim, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Any) -> Any:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


@case(
    source="BEiT/MAE fine-tuning recipe: layer-wise learning-rate decay 0.65",
    tags=("vit", "pre-ln", "layer-decay", "warmup"),
)
def vit_layerwise_lr_decay(attach: Attach) -> None:
    """Every block has its own rate, the lowest a tenth of the head's: early layers move much less, as asked for."""
    torch.manual_seed(6)
    x, y, test_x, test_y = digits(size=16)
    model = ViT()
    stages: list[list[Any]] = [
        [model.patch, model.cls, model.position],
        *[[b] for b in model.blocks],
        [model.norm, model.head],
    ]
    groups = []
    for depth, stage in enumerate(stages):
        parameters = [p for m in stage for p in ([m] if isinstance(m, nn.Parameter) else m.parameters())]
        groups.append({"params": parameters, "lr": 2e-3 * 0.65 ** (len(stages) - 1 - depth)})
    optimizer = torch.optim.AdamW(groups, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1, (s + 1) / 25) * (0.5 + 0.5 * math.cos(math.pi * s / 220))
    )
    loss_fn = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader = shuffled(len(x), 32, seed=6)
    for _ in range(220):
        idx = next(loader)
        loss = loss_fn(model(x[idx]), y[idx])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        monitor.step(loss, batch=x[idx])
    assert accuracy(model, test_x, test_y) > 0.88


@case(source="torch.optim.swa_utils, Izmailov et al. 2018", tags=("cnn", "swa", "schedule"))
def swa_with_constant_rate(attach: Attach) -> None:
    """Stochastic weight averaging: the rate goes up to a constant at two thirds and the loss of the raw weights bounces
    mildly.
    """
    torch.manual_seed(8)
    from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

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
        nn.Flatten(),
        nn.Linear(512, 10),
    )
    averaged = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 160)
    swa_schedule = SWALR(optimizer, swa_lr=0.03, anneal_epochs=5)
    loss_fn = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader = shuffled(len(x), 64, seed=8)
    for step in range(240):
        idx = next(loader)
        loss = loss_fn(model(x[idx] + 0.4 * torch.randn_like(x[idx])), y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step >= 160:
            averaged.update_parameters(model)
            if step % 4 == 0:
                swa_schedule.step()
        else:
            schedule.step()
        monitor.step(loss, batch=x[idx])
    update_bn(x.split(64), averaged)
    assert accuracy(averaged, test_x, test_y) > 0.96


@case(source="Hinton et al. 2015, temperature 4", tags=("distillation", "cnn"))
def knowledge_distillation(attach: Attach) -> None:
    """A student learns from a frozen teacher; the loss is scaled by T squared and ends at a floor above zero."""
    torch.manual_seed(9)
    x, y, test_x, test_y = digits(size=16)

    def net(width: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(32 * width, 10),
        )

    teacher, model = net(24), net(8)
    warm = torch.optim.Adam(teacher.parameters(), lr=2e-3)
    loader = shuffled(len(x), 64, seed=9)
    for _ in range(60):
        idx = next(loader)
        warm.zero_grad()
        F.cross_entropy(teacher(x[idx]), y[idx], label_smoothing=0.1).backward()
        warm.step()
    teacher.eval().requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    T = 4.0
    for _ in range(220):
        idx = next(loader)
        with torch.no_grad():
            target = F.log_softmax(teacher(x[idx]) / T, 1)
        logits = model(x[idx])
        soft = F.kl_div(F.log_softmax(logits / T, 1), target, log_target=True, reduction="batchmean") * T * T
        loss = 0.9 * soft + 0.1 * F.cross_entropy(logits, y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[idx])
    assert accuracy(model, test_x, test_y) > 0.95


@case(
    source="detectron2 / mmdetection: FrozenBatchNorm while fine-tuning with small batches",
    tags=("transfer", "batchnorm", "frozen"),
)
def finetune_frozen_batchnorm(attach: Attach) -> None:
    """Fine-tuning with BatchNorm held in eval mode and its affine frozen, the rest in train mode: standard for small
    batches.
    """
    backbone = pretrained_backbone(11)
    torch.manual_seed(11)
    x, y, test_x, test_y = digits(size=16)
    model = Classifier(backbone, 128)
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.weight.requires_grad_(False)
            m.bias.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader = shuffled(len(x), 8, seed=11)
    for _ in range(400):
        model.train()
        for m in model.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.eval()
        idx = next(loader)
        loss = loss_fn(model(x[idx]), y[idx])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        monitor.step(loss, batch=x[idx])
    assert accuracy(model, test_x, test_y) > 0.93


@case(
    source="ULMFiT, Howard & Ruder 2018: gradual unfreezing with add_param_group",
    tags=("transfer", "frozen", "schedule"),
)
def gradual_unfreezing(attach: Attach) -> None:
    """Layers join the training one after the other (requires_grad and add_param_group): no gradient at first, then
    there is.
    """
    backbone = pretrained_backbone(12)
    torch.manual_seed(12)
    x, y, test_x, test_y = digits(size=16)
    model = Classifier(backbone, 128)
    for p in model.backbone.parameters():
        p.requires_grad = False
    optimizer = torch.optim.AdamW(model.fc.parameters(), lr=2e-3)
    loss_fn = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader = shuffled(len(x), 48, seed=12)
    unfreeze = {70: (8, 9), 130: (4, 5), 190: (0, 1)}
    for step in range(260):
        for i in unfreeze.get(step, ()):
            parameters = list(model.backbone[i].parameters())
            for p in parameters:
                p.requires_grad = True
            optimizer.add_param_group({"params": parameters, "lr": 5e-4})
        idx = next(loader)
        loss = loss_fn(model(x[idx]), y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[idx])
    assert accuracy(model, test_x, test_y) > 0.95


@case(source="stochastic depth, Huang et al. 2016", tags=("resnet", "natural-zeros", "regularised"))
def stochastic_depth(attach: Attach) -> None:
    """Whole blocks are skipped at random: a skipped block has no gradient (None) in that step."""
    torch.manual_seed(14)

    class Block(nn.Module):
        def __init__(self, width: int, survive: float) -> None:
            super().__init__()
            self.survive = survive
            self.norm, self.fc1, self.fc2 = (
                nn.LayerNorm(width),
                nn.Linear(width, 2 * width),
                nn.Linear(2 * width, width),
            )

        def forward(self, x: Tensor) -> Tensor:
            if self.training and torch.rand(()) > self.survive:
                return x
            h = self.fc2(F.gelu(self.fc1(self.norm(x))))
            return x + (h if self.training else self.survive * h)

    x, y, test_x, test_y = digits()
    x, test_x = x.flatten(1), test_x.flatten(1)
    model = nn.Sequential(
        nn.Linear(64, 160), *[Block(160, 1 - 0.4 * i / 7) for i in range(8)], nn.LayerNorm(160), nn.Linear(160, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_fn = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader = shuffled(len(x), 64, seed=14)
    for _ in range(260):
        idx = next(loader)
        loss = loss_fn(model(x[idx]), y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[idx])
    assert accuracy(model, test_x, test_y) > 0.94


class Quantise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, levels: int) -> Tensor:
        ctx.save_for_backward(w)
        scale = w.abs().max() / levels
        return torch.round(w / scale) * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class QuantisedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, Quantise.apply(self.weight, 7), self.bias)


@case(source="straight-through estimator, Bengio et al. 2013; 4-bit weights", tags=("quantisation", "ste"))
def quantisation_aware_4bit(attach: Attach) -> None:
    """Quantisation-aware training: the forward pass sees rounded weights, so small updates change nothing at first."""
    torch.manual_seed(15)
    x, y, test_x, test_y = digits()
    x, test_x = x.flatten(1), test_x.flatten(1)
    model = nn.Sequential(
        QuantisedLinear(64, 384),
        nn.BatchNorm1d(384),
        nn.Hardtanh(),
        QuantisedLinear(384, 384),
        nn.BatchNorm1d(384),
        nn.Hardtanh(),
        nn.Linear(384, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_fn = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader = shuffled(len(x), 96, seed=15)
    for _ in range(350):
        idx = next(loader)
        loss = loss_fn(model(x[idx]), y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[idx])
    assert accuracy(model, test_x, test_y) > 0.94


@case(source="SAM, Foret et al. 2021: two backward passes per step", tags=("cnn", "sam", "two-backward"))
def sharpness_aware_minimisation(attach: Attach) -> None:
    """SAM: weights are moved to the worst point nearby, a second backward pass is made there, and they are put back
    before the step.
    """
    torch.manual_seed(17)
    x, y, test_x, test_y = digits(size=16)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    loss_fn = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader = shuffled(len(x), 48, seed=17)
    for _ in range(180):
        idx = next(loader)
        loss = loss_fn(model(x[idx]), y[idx])
        loss.backward()
        with torch.no_grad():
            grads: list[Any] = [p.grad for p in model.parameters()]
            norm = torch.sqrt(sum(g.pow(2).sum() for g in grads))
            moves = [0.05 * g / (norm + 1e-12) for g in grads]
            for p, e in zip(model.parameters(), moves, strict=False):
                p.add_(e)
        optimizer.zero_grad()
        loss_fn(model(x[idx]), y[idx]).backward()
        with torch.no_grad():
            for p, e in zip(model.parameters(), moves, strict=False):
                p.sub_(e)
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss, batch=x[idx])
    assert accuracy(model, test_x, test_y) > 0.96


@case(
    source="feature extractor left with its old head, as with timm/torchvision models",
    tags=("transfer", "unused-head"),
    tolerate=("no-gradient",),
)
def old_head_left_in_place(attach: Attach) -> None:
    """The pretrained model's old classifier stays in the module tree unused; a note would be fair, nothing is wrong
    with the run.
    """
    torch.manual_seed(19)
    x, y, test_x, test_y = digits(size=16)

    class Pretrained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = pretrained_backbone(19)
            self.old_classifier = nn.Linear(128, 1000)

        def forward_features(self, x: Tensor) -> Tensor:
            return self.features(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Pretrained()
            self.head = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encoder.forward_features(x))

    model = Model()
    optimizer = torch.optim.AdamW(
        [{"params": model.encoder.parameters(), "lr": 3e-4}, {"params": model.head.parameters(), "lr": 3e-3}]
    )
    loss_fn = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader = shuffled(len(x), 48, seed=19)
    for _ in range(200):
        idx = next(loader)
        loss = loss_fn(model(x[idx]), y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[idx])
    assert accuracy(model, test_x, test_y) > 0.95


@case(
    source="Smith & Topin 2018, super-convergence: rates near 1 with BatchNorm",
    tags=("resnet", "batchnorm", "large-rate", "schedule"),
)
def large_rate_with_batchnorm(attach: Attach) -> None:
    """A peak rate of 0.8: with BatchNorm the weights' scale does not matter, updates are several percent of the
    weights, and it converges.
    """
    torch.manual_seed(21)
    x, y = textures(2400, seed=21)
    model = ResNet(width=8, zero_init=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.8, total_steps=160, pct_start=0.3, div_factor=10)
    loss_fn = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader = shuffled(2000, 48, seed=21)
    for _ in range(160):
        idx = next(loader)
        loss = loss_fn(model(x[idx]), y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        monitor.step(loss, batch=x[idx])
    assert accuracy(model, x[2000:], y[2000:]) > 0.85
