"""Runs that look odd and are fine: moving targets, two players, few data, changing models."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.reports.material import accuracy, digits, indices, table
from scripts.fault_zoo.protocol import Attach, case


def slide(place: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Move along eleven cells; the last one ends the episode with a reward of 1."""
    place = (place + 2 * action - 1).clamp(0, 10)
    done = (place == 10).float()
    return place, done, done


@case(source="Mnih et al. 2015: DQN with replay and a target network", tags=("rl", "moving-target"))
def values_of_a_corridor(attach: Attach) -> None:
    """Q-learning in a corridor. The targets move whenever the target network is renewed, and the loss goes up while
    the policy gets better.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(11, 48), nn.ReLU(), nn.Linear(48, 2))
    target = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor = attach(model, optimizer)
    for step in range(500):
        place, action = torch.randint(10, (64,)), torch.randint(2, (64,))
        after, reward, done = slide(place, action)
        state = F.one_hot(place, 11).float()
        with torch.no_grad():
            goal = reward + 0.9 * (1 - done) * target(F.one_hot(after, 11).float()).max(1).values
        value = model(state).gather(1, action[:, None]).squeeze(1)
        loss = F.smooth_l1_loss(value, goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 24:
            target.load_state_dict(model.state_dict())
        monitor.step(loss, batch=state)
    with torch.no_grad():
        best = model(torch.eye(11)[:10]).argmax(1)
    assert best.float().mean() > 0.9


@case(
    source="Mao et al. 2017: least-squares GAN; the critic is watched",
    tags=("gan", "two-optimizers"),
    tolerate=("loss-plateau",),
)
def critic_of_a_spiral(attach: Attach) -> None:
    """The critic of a GAN on a spiral. It is to be fooled: its loss goes up to that of a guess and stays there."""
    torch.manual_seed(1)
    generator = nn.Sequential(
        nn.Linear(4, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 2)
    )
    critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.99))
    monitor = attach(critic, optimizer)

    def spiral(n: int) -> Tensor:
        t = 1 + 4 * torch.rand(n)
        return torch.stack([t * t.cos(), t * t.sin()], 1) / 3 + 0.03 * torch.randn(n, 2)

    def distance() -> float:
        with torch.no_grad():
            real, false = spiral(500), generator(torch.randn(500, 4))
            return (
                torch.cdist(real, false).min(1).values.mean() + torch.cdist(false, real).min(1).values.mean()
            ).item()

    at_first = distance()
    for _ in range(700):
        real, false = spiral(128), generator(torch.randn(128, 4))
        loss = ((critic(real) - 1) ** 2).mean() / 2 + (critic(false.detach()) ** 2).mean() / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        generator_loss = ((critic(false) - 1) ** 2).mean() / 2
        generator_optimizer.zero_grad()
        generator_loss.backward()
        generator_optimizer.step()
        monitor.step(loss, batch=real)
    assert distance() < 0.4 * at_first


@case(source="few-shot fine-tuning with all examples in one batch", tags=("few-shot",), tolerate=("constant-batch",))
def thirty_examples_in_one_batch(attach: Attach) -> None:
    """A head is tuned on three examples of each digit, all of them in every step: the batch is the data set."""
    torch.manual_seed(0)
    x, y, test_x, test_y = digits()
    body = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 24), nn.Tanh())
    old = nn.Sequential(body, nn.Linear(24, 2))
    first = torch.optim.Adam(old.parameters(), lr=2e-3)
    chosen = indices(len(x), 64)
    for _ in range(300):
        i = next(chosen)
        first.zero_grad()
        F.cross_entropy(old(x[i]), y[i] % 2).backward()
        first.step()
    few = torch.cat([(y == c).nonzero().squeeze(1)[:3] for c in range(10)])
    model = nn.Sequential(body, nn.Linear(24, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    monitor = attach(model, optimizer)
    for _ in range(200):
        loss = F.cross_entropy(model(x[few]), y[few], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[few])
    assert accuracy(model, test_x, test_y) > 0.7


@case(source="Howard & Ruder 2018: gradual unfreezing, from the head down", tags=("freezing", "schedule"))
def thawed_from_the_head_down(attach: Attach) -> None:
    """At first only the head is trained; every 100 steps one more layer thaws and joins the optimizer."""
    torch.manual_seed(0)
    x, y, test_x, test_y = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    for place in (0, 2):
        model[place].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[4].parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    chosen = indices(len(x), 48)
    for step in range(360):
        if step in (100, 200):
            layer = model[2 if step == 100 else 0].requires_grad_(True)
            optimizer.add_param_group({"params": list(layer.parameters()), "lr": 1e-3})
        i = next(chosen)
        loss = F.cross_entropy(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    assert accuracy(model, test_x, test_y) > 0.93


@case(source="online learning: one record per step", tags=("batch-size-1", "tabular"))
def one_patient_at_a_time(attach: Attach) -> None:
    """Each step sees one record: the loss jumps by orders of magnitude from step to step."""
    torch.manual_seed(0)
    x, y, test_x, test_y = table("breast_cancer")
    model = nn.Sequential(nn.Linear(30, 24), nn.LayerNorm(24), nn.SiLU(), nn.Linear(24, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = attach(model, optimizer)
    chosen = indices(len(x), 1)
    for _ in range(800):
        i = next(chosen)
        loss = F.cross_entropy(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    assert accuracy(model, test_x, test_y) > 0.93


@case(source="Tarvainen & Valpola 2017: mean teacher", tags=("ema", "semi-supervised"))
def teacher_that_is_a_mean(attach: Attach) -> None:
    """A student follows 60 labels and the moving mean of itself; the weight of the second ramps up, and so does the
    loss.
    """
    torch.manual_seed(0)
    x, y, test_x, test_y = digits()
    student = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Dropout(0.2), nn.Linear(96, 10))
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
    monitor = attach(student, optimizer)
    chosen = indices(len(x), 64)
    for step in range(450):
        i, labelled = next(chosen), torch.randint(60, (20,))
        with torch.no_grad():
            goal = teacher(x[i] + 0.1 * torch.randn(64, 64)).softmax(1)
        consistency = F.mse_loss(student(x[i] + 0.1 * torch.randn(64, 64)).softmax(1), goal)
        ramp = math.exp(-5 * (1 - min(1, step / 250)) ** 2)
        loss = F.cross_entropy(student(x[labelled]), y[labelled]) + 20 * ramp * consistency
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mean, p in zip(teacher.parameters(), student.parameters(), strict=True):
                mean.lerp_(p, 0.02)
        monitor.step(loss, batch=x[i])
    assert accuracy(teacher, test_x, test_y) > 0.82
