"""Losses that look wrong and are not: negative ones, rising ones, and one that stays at the margin."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import digits, draws, mean_of_last
from scripts.fault_zoo.protocol import Attach, case


def convnet(outputs: int, width: int = 16) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * width, outputs),
    )


def views(pictures: Tensor) -> Tensor:
    """Return pictures that are shifted by up to one pixel, with noise."""
    return pictures.roll(torch.randint(-1, 2, (2,)).tolist(), (2, 3)) + 0.1 * torch.randn_like(pictures)


# ------------------------------------------------------------------------------------ a negative log likelihood


class Coupling(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask
        self.net = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU())
        self.out = nn.Linear(96, 128)
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a normal distribution shall explain, and the log determinant."""
        shift, log_scale = (part * (1 - self.mask) for part in self.out(self.net(x * self.mask)).chunk(2, 1))
        log_scale = 2 * torch.tanh(log_scale)
        return (x - shift) * (-log_scale).exp(), -log_scale.sum(1)


@case(source="https://github.com/google-deepmind/distrax/issues/202", tags=("flow", "density", "odd"))
def flow_with_a_negative_loss(attach: Attach) -> None:
    """The loss of a normalizing flow is the negative log likelihood of pictures. It falls below 0 and goes on to fall.
    The answer was that this is expected, because a density can be greater than 1.
    """
    torch.manual_seed(571)
    x, _, x_test, _ = digits()
    x, x_test = x.flatten(1), x_test.flatten(1)
    checkers = (torch.arange(64) // 8 + torch.arange(64)) % 2
    model = nn.ModuleList(Coupling((checkers if k % 2 else 1 - checkers).float()) for k in range(4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = attach(model, optimizer)

    def surprise(pictures: Tensor) -> Tensor:
        z, volume = pictures + torch.rand_like(pictures) / 17, torch.zeros(len(pictures))
        for layer in model:
            z, change = layer(z)
            volume = volume + change
        return (0.5 * z.square() + 0.5 * math.log(2 * math.pi)).sum(1).mean() - volume.mean()

    losses = []
    for i in draws(len(x), size=64, steps=300):
        loss = surprise(x[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
        losses.append(loss.item())
    with torch.no_grad():
        new = surprise(x_test).item()
    assert losses[0] > 0 > mean_of_last(losses), losses
    assert new < 0, new


# ------------------------------------------------------------------------------------ a critic with clipped weights


@case(source="https://github.com/igul222/improved_wgan_training/issues/44", tags=("gan", "clipping", "odd"))
def critic_that_is_negative_first(attach: Attach) -> None:
    """A generator learns 8 points on a ring from a critic whose weights are clipped after each of its 5 steps per step
    of the generator. The loss of the critic falls to a negative value at first and rises towards 0 later. The answer
    was that both are wanted.
    """
    torch.manual_seed(572)

    def ring(count: int) -> Tensor:
        angle = torch.randint(0, 8, (count,)) * (math.pi / 4)
        return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(count, 2)

    def net(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(inputs, 64),
            nn.ReLU(),
            nn.Linear(64, 64),
            nn.ReLU(),
            nn.Linear(64, 64),
            nn.ReLU(),
            nn.Linear(64, outputs),
        )

    model = nn.ModuleDict({"generator": net(8, 2), "critic": net(2, 1)})
    makes = torch.optim.RMSprop(model["generator"].parameters(), lr=5e-4)
    judges = torch.optim.RMSprop(model["critic"].parameters(), lr=1e-3)
    monitor = attach(model, [makes, judges])
    courses = []
    for _ in range(400):
        for _ in range(5):
            made = model["generator"](torch.randn(128, 8)).detach()
            critic_loss = model["critic"](made).mean() - model["critic"](ring(128)).mean()
            judges.zero_grad()
            critic_loss.backward()
            judges.step()
            with torch.no_grad():
                for weight in model["critic"].parameters():
                    weight.clamp_(-0.1, 0.1)
        made = model["generator"](torch.randn(128, 8))
        loss = -model["critic"](made).mean()
        makes.zero_grad()
        loss.backward()
        makes.step()
        monitor.step(critic_loss)
        courses.append(critic_loss.item())
    with torch.no_grad():
        made = model["generator"](torch.randn(1000, 8))
    corners = (torch.atan2(made[:, 1], made[:, 0]) / (math.pi / 4)).round().long() % 8
    assert min(courses) < 1.5 * mean_of_last(courses) < 0, courses
    assert corners.bincount(minlength=8).min() > 50
    assert (made.norm(dim=1) - 1).abs().mean() < 0.25


# ------------------------------------------------------------------------------------ the end of a warm-up


@case(source="https://github.com/ultralytics/yolov5/issues/10209", tags=("cnn", "schedule", "odd"))
def bump_at_the_end_of_the_warm_up(attach: Attach) -> None:
    """The learning rate rises for 120 steps and falls after them. The loss falls at first, rises where the rate is at
    its top, and falls for good later. The answer was that this is normal, and to train for longer.
    """
    torch.manual_seed(573)
    x, y, x_test, y_test = digits()
    model = convnet(10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.15, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.15, total_steps=400, pct_start=0.3, anneal_strategy="linear", cycle_momentum=False, div_factor=60
    )
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
    monitor = attach(model, optimizer, loss_fn=criterion)
    losses = []
    for i in draws(len(x), size=32, steps=400):
        pictures = views(x[i])
        loss = criterion(model(pictures), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        monitor.step(loss, batch=pictures)
        losses.append(loss.item())
    with torch.no_grad():
        right = (model(x_test).argmax(1) == y_test).float().mean().item()
    means = [sum(losses[k : k + 20]) / 20 for k in range(0, 400, 20)]
    assert max(means[5:10]) > min(means[:6]) + 0.1, means
    assert right > 0.92, right


# ------------------------------------------------------------------------------------ a line search


@case(source="https://arxiv.org/abs/1711.10561", tags=("physics", "closure", "odd"))
def line_search_that_has_arrived(attach: Attach) -> None:
    """A network solves a differential equation with L-BFGS, which evaluates the loss several times per step. The loss
    falls by a factor of 10,000 in 40 steps, and hardly changes after that. The solution is exact to 0.1 %.
    """
    torch.manual_seed(574)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=5, line_search_fn="strong_wolfe")
    monitor = attach(model, optimizer)
    place = torch.linspace(-1, 1, 64)[:, None].requires_grad_()
    ends = torch.tensor([[-1.0], [1.0]])

    def residual() -> Tensor:
        value = model(place)
        slope = torch.autograd.grad(value.sum(), place, create_graph=True)[0]
        bend = torch.autograd.grad(slope.sum(), place, create_graph=True)[0]
        force = -(math.pi**2) * torch.sin(math.pi * place)
        return (bend - force).square().mean() + 10 * model(ends).square().mean()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = residual()
        loss.backward()
        return loss

    for _ in range(120):
        loss = optimizer.step(closure)
        monitor.step(loss)
    with torch.no_grad():
        error = (model(place) - torch.sin(math.pi * place)).abs().max().item()
    assert error < 1e-2, error


# ------------------------------------------------------------------------------------ a mean of what is hard


@case(source="https://github.com/omoindrot/tensorflow-triplet-loss/issues/6", tags=("triplet", "odd"))
def triplets_that_stay_at_the_margin(attach: Attach) -> None:
    """The triplet loss is averaged over the triplets that are not solved yet, and hardly falls. The answer was that
    this is normal: the triplets that are left are the hard ones, and their number falls.
    """
    torch.manual_seed(575)
    x, y, *_ = digits()
    model = convnet(16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = attach(model, optimizer)
    losses, shares = [], []
    for i in draws(len(x), size=48, steps=250):
        embedded = F.normalize(model(views(x[i])), dim=1)
        squares = (2 - 2 * embedded @ embedded.T).clamp(min=0)
        same = y[i][:, None] == y[i]
        is_positive = same & ~torch.eye(len(i), dtype=torch.bool)
        is_triplet = is_positive[:, :, None] & ~same[:, None, :]
        hinges = (squares[:, :, None] - squares[:, None, :] + 0.5).clamp(min=0) * is_triplet
        unsolved = hinges > 1e-16
        loss = hinges.sum() / (unsolved.sum() + 1e-16)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
        losses.append(loss.item())
        shares.append((unsolved.sum() / is_triplet.sum()).item())
    assert mean_of_last(losses) > 0.5 * losses[0], losses
    assert mean_of_last(shares) < 0.25 * shares[0], shares
