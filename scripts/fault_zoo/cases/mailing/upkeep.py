"""What is kept next to the weights: averages, frozen parts, checkpoints, hooks."""

from __future__ import annotations

import copy
import io

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from scripts.fault_zoo.cases.mailing.material import digits, draws, mean_of_last
from scripts.fault_zoo.protocol import Attach, case


class Normalized(nn.Module):
    """Two convolutions with batch normalization, the trunk, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 24, 3, padding=1),
            nn.BatchNorm2d(24),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.head = nn.Linear(24 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


# ------------------------------------------------------------------------------------- an average without its buffers


def train_averaged(attach: Attach, *, repaired: bool) -> float:
    """Return the accuracy of the averaged model on test digits."""
    torch.manual_seed(901)
    x, y, test_x, test_y = digits()
    x, test_x = 16 * x, 16 * test_x  # as the scanner counts
    model = Normalized()
    average = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    accuracy = 0.0
    for step, i in enumerate(draws(len(x), size=48, steps=260)):
        loss = criterion(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mean, now in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(now, 0.05)
            if repaired:
                for kept, new in zip(average.buffers(), model.buffers(), strict=True):
                    kept.copy_(new)
        if step % 20 != 19:
            monitor.step(loss, batch=x[i])
            continue
        with torch.no_grad():
            logits = average(test_x)
        accuracy = (logits.argmax(1) == test_y).float().mean().item()
        monitor.step(loss, batch=x[i], val_loss=criterion(logits, test_y))
    return accuracy


@case(
    fault="train-eval-mismatch",
    also=("overfitting",),
    onset=39,
    source="https://github.com/CuriousAI/mean-teacher/issues/9",
    tags=("ema", "batch-norm"),
)
def average_without_statistics(attach: Attach) -> None:
    """The moving average follows the parameters and not the buffers, so that the averaged model normalizes with the
    statistics of an untrained one. Its validation loss is far above the training loss. Reported in
    https://github.com/CuriousAI/mean-teacher/issues/9, https://github.com/lucidrains/byol-pytorch/issues/73,
    https://github.com/lucidrains/ema-pytorch/issues/8 and https://github.com/LeeDoYup/FixMatch-pytorch/issues/10.
    """
    train_averaged(attach, repaired=False)


@case(source="the repaired twin of `average_without_statistics`: buffers are copied", tags=("ema", "twin"))
def average_with_statistics(attach: Attach) -> None:
    """The averaged model gets the running statistics, too."""
    assert train_averaged(attach, repaired=True) > 0.93


# ------------------------------------------------------------------------------------------ thawed and not optimized


def trained_upright() -> Normalized:
    """Return a model that knows upright digits."""
    x, y, _, _ = digits()
    model = Normalized()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for i in draws(len(x), size=64, steps=100, seed=9):
        optimizer.zero_grad()
        F.cross_entropy(model(x[i]), y[i]).backward()
        optimizer.step()
    return model


def train_thawed(attach: Attach, *, repaired: bool) -> float:
    """Tune for digits on their side, at first with a frozen trunk. Return the mean loss of the last 20 steps."""
    torch.manual_seed(902)
    x, y, _, _ = digits()
    x = x.rot90(1, (2, 3)) + 0.3 * torch.randn(x.shape)
    model = trained_upright()
    model.trunk.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.02, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    losses = []
    for step, i in enumerate(draws(len(x), size=64, steps=300)):
        if step == 100:
            model.trunk.requires_grad_(True)
            if repaired:
                optimizer.add_param_group({"params": list(model.trunk.parameters())})
        loss = criterion(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
        losses.append(loss.item())
    return mean_of_last(losses)


@case(
    fault="not-optimized",
    also=("missing-zero-grad",),
    layers=("trunk",),
    onset=100,
    source="https://github.com/fastai/fastai/issues/2133",
    tags=("fine-tuning", "frozen"),
)
def thawed_and_not_optimized(attach: Attach) -> None:
    """The optimizer is made with the parameters that need a gradient while the trunk is frozen. When it is thawed, it
    gets gradients, which nobody clears, and stays as it is. Why the optimizer must be made again is said in
    https://github.com/fastai/fastai/issues/2133; reported in https://github.com/deepspeedai/DeepSpeed/issues/1767.
    """
    train_thawed(attach, repaired=False)


# ----------------------------------------------------------------------------------------- a rate from a checkpoint


def train_resumed(attach: Attach, *, repaired: bool) -> float:
    """Tune a checkpoint for digits on their side with a new rate. Return the mean loss of the last 20 steps."""
    torch.manual_seed(903)
    x, y, _, _ = digits()
    model = Normalized()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = CosineAnnealingLR(optimizer, T_max=100, eta_min=1e-7)
    for i in draws(len(x), size=64, steps=100, seed=9):
        optimizer.zero_grad()
        F.cross_entropy(model(x[i]), y[i]).backward()
        optimizer.step()
        schedule.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)

    saved = torch.load(file, weights_only=True)
    model = Normalized()
    model.load_state_dict(saved["model"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    optimizer.load_state_dict(saved["optimizer"])
    if repaired:
        optimizer.param_groups[0]["lr"] = 0.02
    x = x.rot90(1, (2, 3))
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    losses = []
    for i in draws(len(x), size=64, steps=200):
        loss = criterion(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
        losses.append(loss.item())
    return mean_of_last(losses)


@case(
    fault="learning-rate-too-low",
    also=("loss-plateau", "not-optimized"),
    onset=0,
    source="https://github.com/pytorch/examples/issues/816",
    tags=("resume", "fine-tuning"),
)
def rate_from_the_checkpoint(attach: Attach) -> None:
    """A fine-tuning asks for a rate of 0.02 and loads the state of the optimizer, whose schedule ended at 1e-7; the old
    rate replaces the new one. Reported in https://github.com/pytorch/examples/issues/816,
    https://github.com/mapbox/robosat/issues/169 and https://github.com/facebookresearch/detr/issues/301.
    """
    train_resumed(attach, repaired=False)


# ------------------------------------------------------------------------------------------ a list that a hook fills


def train_hooked(attach: Attach, *, repaired: bool) -> int:
    """Learn digits and their features from a teacher. Return how many feature maps are held at the end."""
    torch.manual_seed(904)
    x, y, _, _ = digits()
    teacher = trained_upright().eval().requires_grad_(False)
    model = Normalized()
    features: list[Tensor] = []
    model.trunk.register_forward_hook(lambda _module, _args, output: features.append(output))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = attach(model, optimizer)
    for i in draws(len(x), size=128, steps=150):
        if repaired:
            features.clear()
        logits = model(x[i])
        with torch.no_grad():
            wanted = teacher.trunk(x[i])
        loss = F.cross_entropy(logits, y[i]) + F.mse_loss(features[-1], wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    return len(features)


@case(
    fault="graph-leak",
    also=("memory-growth",),
    onset=3,
    source="https://github.com/EleutherAI/bergson/pull/55",
    tags=("distillation", "memory", "hooks"),
)
def features_that_a_hook_collects(attach: Attach) -> None:
    """A forward hook appends the features to a list. Each step reads the last entry, and nothing clears the list, so
    all features stay in memory with their graphs. Lists of hooks that grow are reported in
    https://github.com/EleutherAI/bergson/pull/55, and graphs that hooks keep in
    https://github.com/utkuozbulak/pytorch-cnn-visualizations/issues/53.
    """
    train_hooked(attach, repaired=False)


@case(source="the repaired twin of `features_that_a_hook_collects`: cleared in each step", tags=("hooks", "twin"))
def features_that_a_hook_hands_over(attach: Attach) -> None:
    """The list that the hook appends to is cleared before each step."""
    assert train_hooked(attach, repaired=True) == 1


# ------------------------------------------------------------------------------------------------------- odd recipes


@case(source="Howard & Ruder 2018, ULMFiT, sec. 3.3: gradual unfreezing", tags=("fine-tuning", "frozen", "odd"))
def thawed_layer_by_layer(attach: Attach) -> None:
    """The head is tuned first; deeper layers join the optimizer at steps 80 and 160, each with a smaller rate. Until
    then they have no gradient.
    """
    torch.manual_seed(905)
    x, y, test_x, test_y = digits()
    x, test_x = x.rot90(1, (2, 3)), test_x.rot90(1, (2, 3))
    model = trained_upright()
    model.trunk.requires_grad_(False)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.02, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for step, i in enumerate(draws(len(x), size=64, steps=280)):
        if step in (80, 160):
            part = model.trunk[4:] if step == 80 else model.trunk[:4]
            part.requires_grad_(True)
            optimizer.add_param_group({"params": list(part.parameters()), "lr": 0.02 / 2.6 ** (step // 80)})
        loss = criterion(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    model.eval()
    with torch.no_grad():
        assert (model(test_x).argmax(1) == test_y).float().mean() > 0.93


@case(source="Foret et al. 2021, Sharpness-aware minimization, alg. 1", tags=("optimizer", "odd"))
def steps_from_the_edge(attach: Attach) -> None:
    """Two passes for each step: the weights climb along the gradient by 0.05, and the gradient there is used at the old
    place.
    """
    torch.manual_seed(906)
    x, y, test_x, test_y = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for i in draws(len(x), size=64, steps=250):
        loss = criterion(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        old = [p.detach().clone() for p in model.parameters()]
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.stack([g.norm() for g in grads]).norm()
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads, strict=True):
                p.add_(g, alpha=0.05 / (norm.item() + 1e-12))
        optimizer.zero_grad()
        criterion(model(x[i]), y[i]).backward()
        with torch.no_grad():
            for p, before in zip(model.parameters(), old, strict=True):
                p.copy_(before)
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        assert (model(test_x).argmax(1) == test_y).float().mean() > 0.93
