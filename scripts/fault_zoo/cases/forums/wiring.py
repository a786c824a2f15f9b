"""What is trained and what is kept: adapters, task weights, frozen parts, and tensors that outlive their step."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.faulty_data import batches, digits, setup, shapes, split
from scripts.fault_zoo.protocol import Attach, case


class Adapter(nn.Module):
    """A change of low rank to a frozen layer (LoRA)."""

    def __init__(self, base: nn.Linear, draw: bool, rank: int = 8) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(rank, base.in_features))
        if draw:
            nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.a.T @ self.b.T


class Adapted(nn.Module):
    """A frozen perceptron with an adapter next to each layer."""

    def __init__(self, layers: list[nn.Linear], draw: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers).requires_grad_(False)
        self.adapters = nn.ModuleList(Adapter(layer, draw) for layer in layers)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for i, (layer, adapter) in enumerate(zip(self.layers, self.adapters, strict=True)):
            x = layer(x) + adapter(x)
            x = torch.relu(x) if i < len(self.layers) - 1 else x
        return x


def train_adapters(attach: Attach, *, draw: bool) -> float:
    """Learn digits upright, then adapt to digits on their side. Return the mean loss of the last 20 steps."""
    setup(41)
    x, y = digits()
    layers = [nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, 10)]
    base = nn.Sequential(nn.Flatten(), layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    first = torch.optim.Adam(base.parameters(), lr=2e-3)
    for images, labels in batches(x, y, size=64, steps=200, seed=1):
        first.zero_grad()
        F.cross_entropy(base(images), labels).backward()
        first.step()
    model = Adapted(layers, draw)
    optimizer = torch.optim.AdamW(model.adapters.parameters(), lr=5e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    losses = []
    for images, labels in batches(x.rot90(1, (2, 3)), y, size=64, steps=250):
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=images)
        losses.append(loss.item())
    return sum(losses[-20:]) / 20


@case(
    fault="no-gradient",
    also=("dead-layer", "poor-initialization", "loss-plateau"),
    layers=("adapters",),
    onset=0,
    source="https://github.com/Lightning-AI/litgpt/issues/1229, https://github.com/Guitaricet/relora/issues/18",
    tags=("lora",),
)
def lora_both_factors_zero(attach: Attach) -> None:
    """Both factors of the adapters start at zero, and each is the factor of the other's gradient."""
    train_adapters(attach, draw=False)


@case(source="https://github.com/Lightning-AI/litgpt/issues/1229", tags=("lora", "twin"))
def lora_both_factors_zero_fixed(attach: Attach) -> None:
    """The first factor is drawn, the second starts at zero."""
    assert train_adapters(attach, draw=True) < 0.5


class TwoTasks(nn.Module):
    """Name a digit and estimate its ink; each task has a learnable weight (Kendall et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.name = nn.Linear(64, 10)
        self.ink = nn.Linear(64, 1)
        self.weighting = nn.ParameterDict({"name": nn.Parameter(torch.zeros(())), "ink": nn.Parameter(torch.zeros(()))})

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return self.name(h), self.ink(h).squeeze(1)

    def weigh(self, name_error: Tensor, ink_error: Tensor) -> Tensor:
        """Return the sum of the errors, each divided by its variance."""
        name, ink = self.weighting["name"], self.weighting["ink"]
        return name_error * (-name).exp() + name + 0.5 * ink_error * (-ink).exp() + 0.5 * ink


@case(
    fault="not-optimized",
    layers=("weighting",),
    onset=0,
    tolerate=("missing-zero-grad", "loss-plateau"),
    source="https://github.com/ifzhang/FairMOT/issues/19",
    tags=("multi-task",),
)
def task_weights_left_out(attach: Attach) -> None:
    """The optimizer is given the body and the heads; the task weights get gradients and stay at zero."""
    setup(42)
    x, y = digits()
    ink = 16 * x.flatten(1).sum(1) + 40 * torch.randn(len(x))  # as the scale reads it, 0 to 500
    model = TwoTasks()
    parts = (model.body, model.name, model.ink)
    optimizer = torch.optim.Adam(itertools.chain(*(part.parameters() for part in parts)), lr=2e-3)
    monitor = attach(model, optimizer)
    for images, labels, amount in batches(x, y, ink, size=64, steps=300):
        names, amounts = model(images)
        loss = model.weigh(F.cross_entropy(names, labels), F.mse_loss(amounts, amount))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=images)


@case(
    fault="not-optimized",
    also=("loss-plateau",),
    layers=("1", "3"),
    onset=0,
    tolerate=("missing-zero-grad",),
    source="https://github.com/microsoft/nni/issues/4521 (the layers are replaced, the optimizer keeps the old ones)",
    tags=("pruning",),
)
def pruned_layers_old_optimizer(attach: Attach) -> None:
    """Nine of ten units are removed by replacing the layers, and the fine-tuning goes on with the old optimizer."""
    setup(47)
    x, y = digits()
    wide, exit_layer = nn.Linear(64, 128), nn.Linear(128, 10)
    model = nn.Sequential(nn.Flatten(), wide, nn.ReLU(), exit_layer)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()
    for images, labels in batches(x, y, size=64, steps=120, seed=1):
        optimizer.zero_grad()
        criterion(model(images), labels).backward()
        optimizer.step()
    kept = wide.weight.detach().norm(dim=1).topk(12).indices
    first, last = nn.Linear(64, 12), nn.Linear(12, 10)
    with torch.no_grad():
        first.weight.copy_(wide.weight[kept])
        first.bias.copy_(wide.bias[kept])
        last.weight.copy_(exit_layer.weight[:, kept])
        last.bias.copy_(exit_layer.bias)
    model[1], model[3] = first, last
    monitor = attach(model, optimizer, loss_fn=criterion)
    for images, labels in batches(x, y, size=64, steps=250):
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=images)


def train_with_average(attach: Attach, *, detach: bool) -> float:
    """Log running averages of the loss and of the confidence. Return the last average of the loss."""
    setup(43)
    x, y = digits()
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    average_loss = average_confidence = torch.zeros(())
    for images, labels in batches(x, y, size=128, steps=250):
        logits = model(images)
        loss = criterion(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        confidence = logits.softmax(1).amax(1).mean()
        if detach:
            average_loss = 0.95 * average_loss + 0.05 * loss.detach()
            average_confidence = 0.95 * average_confidence + 0.05 * confidence.detach()
        else:
            average_loss = 0.95 * average_loss + 0.05 * loss
            average_confidence = 0.95 * average_confidence + 0.05 * confidence
        monitor.step(loss, batch=images)
    assert average_confidence > 0
    return float(average_loss)


@case(
    fault="graph-leak",
    also=("memory-growth",),
    onset=1,
    source="https://github.com/alexhernandezgarcia/gflownet/pull/133, https://github.com/bayesiains/nflows/pull/11",
    tags=("memory",),
)
def running_average_with_graph(attach: Attach) -> None:
    """The running averages for the log are computed from tensors with their graphs, so each step's graph is kept."""
    train_with_average(attach, detach=False)


@case(source="https://github.com/alexhernandezgarcia/gflownet/pull/133", tags=("memory", "twin"))
def running_average_with_graph_fixed(attach: Attach) -> None:
    """The running averages are computed from detached tensors."""
    assert train_with_average(attach, detach=True) < 0.5


class MeanPrecision:
    """A metric that keeps all that it has seen, like the lists of torchmetrics."""

    def __init__(self) -> None:
        self.scores: list[Tensor] = []
        self.targets: list[Tensor] = []

    def update(self, scores: Tensor, targets: Tensor) -> None:
        self.scores.append(scores.detach().sigmoid())
        self.targets.append(targets.clone())

    def compute(self) -> float:
        """Return the share of true pixels among the predicted ones of the latest batches."""
        scores, targets = torch.cat(self.scores[-8:]), torch.cat(self.targets[-8:])
        return float(targets[scores > 0.5].mean())


@case(
    fault="memory-growth",
    onset=1,
    source=(
        "https://github.com/NRCan/geo-deep-learning/issues/582, "
        "https://github.com/Lightning-AI/torchmetrics/issues/1949 (a metric must be reset)"
    ),
    tags=("memory",),
)
def metric_never_reset(attach: Attach) -> None:
    """The metric keeps the predictions of all batches and is never reset; 1.2 MB more are in use after each step."""
    setup(44)
    x, masks = shapes(n=640, size=40)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.BCEWithLogitsLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    precision = MeanPrecision()
    for step, (images, wanted) in enumerate(batches(x, masks, size=96, steps=150)):
        logits = model(images)
        loss = criterion(logits, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        precision.update(logits, wanted)
        if step % 25 == 24:
            precision.compute()
        monitor.step(loss, batch=images)


@case(
    fault="evaluation-with-graph",
    also=("memory-growth",),
    onset=19,
    source="https://github.com/hszhao/semseg/issues/60, https://github.com/facebookresearch/votenet/issues/30",
    tags=("memory",),
)
def validation_without_no_grad(attach: Attach) -> None:
    """eval() is called before each validation, no_grad() is not, and the validation builds graphs for nothing."""
    setup(46)
    x, masks = shapes(n=640, size=24)
    (train_x, train_m), (val_x, val_m) = split(x, masks)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 5, padding=2),
        nn.ReLU(),
        nn.Conv2d(8, 1, 1),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.BCEWithLogitsLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for step, (images, wanted) in enumerate(batches(train_x, train_m, size=32, steps=200)):
        model.train()
        loss = criterion(model(images), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            model.eval()
            errors = [criterion(model(val_x[i : i + 32]), val_m[i : i + 32]) for i in range(0, len(val_x), 32)]
            monitor.step(loss, batch=images, val_loss=sum(errors).item() / len(errors))
        else:
            monitor.step(loss, batch=images)


@case(source="the transfer learning tutorial of PyTorch, part 2: a fixed feature extractor", tags=("frozen", "odd"))
def linear_probe_on_frozen_encoder(attach: Attach) -> None:
    """The encoder is frozen and in evaluation mode on purpose; only the last layer is in the optimizer."""
    setup(45)
    x, y = digits()
    (train_x, train_y), (test_x, test_y) = split(x, y)
    encoder = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 64)
    )
    task = nn.Sequential(encoder, nn.ReLU(), nn.Linear(64, 2))
    first = torch.optim.Adam(task.parameters(), lr=2e-3)
    for images, labels in batches(train_x, train_y % 2, size=64, steps=120, seed=1):
        first.zero_grad()
        F.cross_entropy(task(images), labels).backward()
        first.step()
    encoder.eval().requires_grad_(False)
    model = nn.Sequential(encoder, nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model[2].parameters(), lr=1e-2)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for images, labels in batches(train_x, train_y, size=64, steps=250):
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=images)
    with torch.no_grad():
        assert (model(test_x).argmax(1) == test_y).float().mean() > 0.8
