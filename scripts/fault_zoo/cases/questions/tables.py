"""Tables: gradients cleared too early, patients by heart, assays without labels, and two tasks that disagree."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine
from sklearn.preprocessing import PolynomialFeatures
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from scripts.fault_zoo.cases.mailing.material import draws
from scripts.fault_zoo.protocol import Attach, case


def standardized(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / x.std(0).clamp(min=1e-6)


# ------------------------------------------------------------------------------------ cleared between the two calls


def train_tumours(attach: Attach, *, repaired: bool) -> float:
    """Return the accuracy on 169 tumours for testing."""
    torch.manual_seed(81)
    data = load_breast_cancer()
    x, y = standardized(torch.tensor(data.data, dtype=torch.float32)), torch.tensor(data.target).float()
    order = torch.randperm(len(x))
    x, y = x[order], y[order]
    loader = DataLoader(TensorDataset(x[:400], y[:400]), batch_size=20, shuffle=True)
    model = nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.BCEWithLogitsLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for _ in range(15):
        model.train()
        for inputs, labels in loader:
            if repaired:
                optimizer.zero_grad()
            loss = criterion(model(inputs).squeeze(1), labels)
            loss.backward()
            if not repaired:
                optimizer.zero_grad()
            optimizer.step()
            monitor.step(loss, batch=inputs)
    model.eval()
    with torch.no_grad():
        return ((model(x[400:]).squeeze(1) > 0) == (y[400:] > 0.5)).float().mean().item()


@case(
    fault="not-optimized",
    also=("no-gradient", "loss-plateau"),
    onset=0,
    source="https://github.com/patrickloeber/pytorchTutorial/issues/19",
    tags=("mlp", "zero-grad"),
)
def cleared_before_they_are_used(attach: Attach) -> None:
    """`zero_grad` stands between `backward` and `step`: the gradients are gone when the optimizer comes, and no
    parameter ever moves. Asked in https://github.com/patrickloeber/pytorchTutorial/issues/19 and
    https://github.com/yunjey/pytorch-tutorial/issues/238; "wrong order of calls" in Humbatova et al. 2020, Taxonomy
    of Real Faults in Deep Learning Systems.
    """
    train_tumours(attach, repaired=False)


@case(source="the repaired twin of `cleared_before_they_are_used`: cleared before `backward`", tags=("mlp", "twin"))
def cleared_after_they_are_used(attach: Attach) -> None:
    """The gradients of the last step are cleared before the next ones are computed."""
    assert train_tumours(attach, repaired=True) > 0.93


# ------------------------------------------------------------------------------------ patients by heart


def train_patients(attach: Attach, *, careful: bool) -> tuple[float, float]:
    """Return the lowest and the last squared error on patients for validation, in units of their variance."""
    torch.manual_seed(82)
    data = load_diabetes()
    features = PolynomialFeatures(2, include_bias=False).fit_transform(data.data / data.data.std(0))
    x, y = standardized(torch.tensor(features, dtype=torch.float32)), standardized(torch.tensor(data.target[:, None]))
    y = y.float()
    order = torch.randperm(len(x))
    train, check = order[:300], order[300:]
    model = nn.Sequential(nn.Linear(65, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    decay = 3.0 if careful else 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4 if careful else 1e-3, weight_decay=decay)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)
    errors = []
    for step, i in enumerate(draws(300, size=30, steps=150 if careful else 600)):
        loss = F.mse_loss(model(x[train[i]]), y[train[i]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            with torch.no_grad():
                errors.append(F.mse_loss(model(x[check]), y[check]).item())
            monitor.step(loss, batch=x[train[i]], val_loss=errors[-1])
        else:
            monitor.step(loss, batch=x[train[i]])
    return min(errors), errors[-1]


@case(
    fault="overfitting",
    onset=40,
    source="https://github.com/MIC-DKFZ/nnUNet/issues/757",
    tags=("mlp", "validation"),
)
def patients_by_heart(attach: Attach) -> None:
    """300 patients, 65 columns made of ten, and a network of 80,000 parameters that trains on for 60 epochs: the error
    of the patients for validation is lowest in the fourth epoch. "Why does my validation loss rise" is asked in
    https://github.com/MIC-DKFZ/nnUNet/issues/757, https://github.com/moein-shariatnia/OpenAI-CLIP/issues/9 and
    https://github.com/codetiger/ThiruvalluvarGPT/issues/4; "missing regularization" in Humbatova et al. 2020.
    """
    train_patients(attach, careful=False)


# ------------------------------------------------------------------------------------ a root at zero


def train_assays(attach: Attach, *, epsilon: float) -> float:
    """Return the mean error of all assays at the end, in standard deviations.

    Each wine is measured by some of five assays; one of them is expensive, and three wines in 100 have it.
    """
    torch.manual_seed(83)
    data = standardized(torch.tensor(load_wine().data, dtype=torch.float32))
    x, y = data[:, :8], data[:, 8:]
    x = x.repeat(6, 1) + 0.1 * torch.randn(len(x) * 6, 8)
    y = y.repeat(6, 1)
    measured = torch.rand(len(x), 5) < torch.tensor([0.9, 0.8, 0.8, 0.5, 0.03])
    model = nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)

    def rmse(predicted: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        """Return the root of the mean squared error of each assay, over the wines that have it."""
        squares = mask * (predicted - target) ** 2
        return torch.sqrt(squares.sum(0) / mask.sum(0).clamp(min=1) + epsilon)

    for i in draws(len(x), size=128, steps=300):
        loss = rmse(model(x[i]), y[i], measured[i]).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        return (model(x) - y)[:, :4].square().mean().sqrt().item()


@case(
    fault="non-finite",
    also=("unstable-formula",),
    onset=10,
    source="https://github.com/mpariente/pytorch_stoi/pull/14",
    tags=("multi-task", "loss"),
)
def root_of_no_errors(attach: Attach) -> None:
    """The loss is the root of the mean squared error of each assay. In one batch no wine has the rare assay, so that
    its mean is zero; the root has an infinite slope there, and infinity times zero is NaN. Reported in
    https://github.com/mpariente/pytorch_stoi/pull/14,
    https://github.com/ZFTurbo/Music-Source-Separation-Training/pull/200 and
    https://github.com/matterport/Mask_RCNN/issues/458.
    """
    train_assays(attach, epsilon=0.0)


@case(source="the repaired twin of `root_of_no_errors`: 1e-8 below the root", tags=("multi-task", "loss", "twin"))
def root_of_a_little_more(attach: Attach) -> None:
    """A small number is added below the root."""
    assert train_assays(attach, epsilon=1e-8) < 0.6


# ------------------------------------------------------------------------------------ an odd recipe


@case(source="Yu et al. 2020, Gradient Surgery for Multi-Task Learning, alg. 1", tags=("multi-task", "odd"))
def tasks_that_disagree(attach: Attach) -> None:
    """Two tasks share a body. When their gradients point against each other, each loses the part that hurts the other,
    and the sum is written into `grad` by hand.
    """
    torch.manual_seed(84)
    data = standardized(torch.tensor(load_wine().data, dtype=torch.float32))
    label = torch.tensor(load_wine().target)
    x, wanted = data[:, :11], data[:, 11:]
    model = nn.ModuleDict(
        {
            "body": nn.Sequential(nn.Linear(11, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh()),
            "sort": nn.Linear(24, 3),
            "measure": nn.Linear(24, 2),
        }
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    monitor = attach(model, optimizer)
    shared = list(model["body"].parameters())
    first = copy.deepcopy(model)
    for i in draws(len(x), size=32, steps=300):
        hidden = model["body"](x[i])
        losses = F.cross_entropy(model["sort"](hidden), label[i]), F.mse_loss(model["measure"](hidden), wanted[i])
        optimizer.zero_grad()
        parts = []
        for loss, head in zip(losses, ("sort", "measure"), strict=True):
            own = list(model[head].parameters())
            grads = torch.autograd.grad(loss, shared + own, retain_graph=True)
            for parameter, grad in zip(own, grads[len(shared) :], strict=True):
                parameter.grad = grad
            parts.append(torch.cat([grad.flatten() for grad in grads[: len(shared)]]))
        a, b = parts
        dot = torch.dot(a, b)
        total = a + b
        if dot < 0:
            total = total - dot / b.dot(b) * b - dot / a.dot(a) * a
        for parameter, grad in zip(shared, total.split([p.numel() for p in shared]), strict=True):
            parameter.grad = grad.view_as(parameter).clone()
        optimizer.step()
        monitor.step(losses[0] + losses[1], batch=x[i])
    with torch.no_grad():
        early, late = (F.mse_loss(m["measure"](m["body"](x)), wanted).item() for m in (first, model))
        assert (model["sort"](model["body"](x)).argmax(1) == label).float().mean() > 0.97
    assert late < 0.4 * early
