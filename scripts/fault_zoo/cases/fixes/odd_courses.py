"""Courses that look odd: weights that go back, workers that meet, batches that come again, and tasks that change."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.fixes.pictures import convolutions, share_right
from scripts.fault_zoo.cases.mailing.material import digits, draws, mean_of_last
from scripts.fault_zoo.protocol import Attach, case


@case(source="https://github.com/facebookresearch/open_lth", tags=("pruning", "rewind"))
def weights_that_go_back(attach: Attach) -> None:
    """Lottery tickets: every 100 steps half of the weights that are left are set to 0 for good, the others go back to
    their values after 20 steps, and the training begins again. Three times the loss jumps back up.
    """
    torch.manual_seed(431)
    x, y, new_x, new_y = (part.flatten(1) if part.ndim > 1 else part for part in digits())
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    monitor = attach(model, optimizer, loss_fn=criterion)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    masks = [torch.ones_like(p) for p in matrices]
    early: dict[str, Tensor] = {}
    for step, i in enumerate(draws(len(x), size=64, steps=400)):
        if step == 20:
            early = copy.deepcopy(model.state_dict())
        if step in (100, 200, 300):
            for p, mask in zip(matrices, masks, strict=True):
                left = p[mask > 0].abs()
                mask.mul_((p.abs() > left.median()).float())
            model.load_state_dict(early)
            optimizer.state.clear()
        with torch.no_grad():
            for p, mask in zip(matrices, masks, strict=True):
                p.mul_(mask)
        loss = criterion(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        for p, mask in zip(matrices, masks, strict=True):
            p.mul_(mask)
    assert share_right(model, new_x, new_y) > 0.9


@case(source="https://github.com/AshwinRJ/Federated-Learning-PyTorch", tags=("federated", "average"))
def workers_that_meet(attach: Attach) -> None:
    """Federated averaging: each of five workers has four digits only. One after another starts from the common weights
    and makes 8 steps on its own; then the weights are averaged. The loss is small at the end of each part and jumps up
    where the next worker begins.
    """
    torch.manual_seed(432)
    x, y, new_x, new_y = (part.flatten(1) if part.ndim > 1 else part for part in digits())
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    monitor = attach(model, optimizer, loss_fn=criterion)
    generator = torch.Generator().manual_seed(19)
    owned = [torch.where((y - 2 * worker) % 10 < 4)[0] for worker in range(5)]
    common = copy.deepcopy(model.state_dict())
    for _ in range(10):
        states = []
        for mine in owned:
            model.load_state_dict(common)
            for _ in range(8):
                i = mine[torch.randint(0, len(mine), (32,), generator=generator)]
                loss = criterion(model(x[i]), y[i])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                monitor.step(loss, batch=x[i])
            states.append(copy.deepcopy(model.state_dict()))
        common = {name: torch.stack([state[name] for state in states]).mean(0) for name in common}
    model.load_state_dict(common)
    assert share_right(model, new_x, new_y) > 0.8


@case(source="https://arxiv.org/abs/1907.05550", tags=("convolution", "data"))
def batches_that_come_again(attach: Attach) -> None:
    """Data echoing: reading is slow, so that each batch is used for four steps before the next one arrives. The loss
    falls three times and jumps up at the fourth.
    """
    torch.manual_seed(433)
    x, y, new_x, new_y = digits()
    model = nn.Sequential(convolutions(), nn.Linear(64, 10))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = attach(model, optimizer, loss_fn=criterion)
    for i in draws(len(x), size=64, steps=75):
        for _ in range(4):
            loss = criterion(model(x[i]), y[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss, batch=x[i])
    assert share_right(model, new_x, new_y) > 0.95


@case(source="https://github.com/openai/supervised-reptile", tags=("meta-learning", "perceptron"))
def tasks_that_change(attach: Attach) -> None:
    """Reptile: ten steps on one sine, then the weights go a quarter of the way from where they began to where they are,
    and the next sine comes. The loss is a saw. At the end ten steps are enough for a new sine.
    """
    torch.manual_seed(434)
    generator = torch.Generator().manual_seed(20)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)
    points = torch.linspace(-5, 5, 50)[:, None]

    def learn(*, observed: bool) -> tuple[float, float]:
        height, turn = torch.rand(2, generator=generator)
        values = (0.5 + height) * torch.sin(points + math.pi * turn)
        losses = []
        for _ in range(10):
            loss = F.mse_loss(model(points), values)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if observed:
                monitor.step(loss, batch=values)
        return losses[0], F.mse_loss(model(points), values).item()

    for _ in range(40):
        before = [p.detach().clone() for p in model.parameters()]
        learn(observed=True)
        with torch.no_grad():
            for p, old in zip(model.parameters(), before, strict=True):
                p.copy_(old + 0.25 * (p - old))
    meta = copy.deepcopy(model.state_dict())
    after = []
    for _ in range(10):
        model.load_state_dict(meta)
        after.append(learn(observed=False)[1])
    assert mean_of_last(after, 10) < 0.3, mean_of_last(after, 10)
