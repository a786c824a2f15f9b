"""Losses that look wrong and are not: blanks at first, weights that rise, a plateau, and noise that hides progress."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from sklearn.datasets import make_moons
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import digits, draws, mean_of_last
from scripts.fault_zoo.cases.stories.sound import Recognizer, collate, error_rate, speakers
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------ blanks at first


@case(source="https://github.com/cyprienruffino/CTCModel/issues/12", tags=("speech", "ctc", "odd"))
def blanks_at_first(attach: Attach) -> None:
    """A speech recognizer says nothing at all for the first hundred updates, and its loss stays where it is. The
    answer was that networks with a CTC loss do this, and begin to speak later.
    """
    torch.manual_seed(661)
    utterances = speakers(800, fast=0, seed=13)
    model = Recognizer()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    criterion = nn.CTCLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for i in draws(len(utterances), size=16, steps=400):
        frames, sounds, input_lengths, label_lengths = collate([utterances[j] for j in i.tolist()])
        loss = criterion(model(frames), sounds, input_lengths, label_lengths)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=frames)
    errors = error_rate(model, speakers(100, fast=0, seed=14))
    assert errors < 0.3, errors


# ------------------------------------------------------------------------------------ weights that rise


@case(source="https://github.com/levimcclenny/SA-PINNs/issues/5", tags=("physics", "minmax", "odd"))
def weights_that_learn_to_rise(attach: Attach) -> None:
    """A network solves u'' = -f on a line. Each point has a weight in the loss that is learned by ascent, so that the
    loss rises at first, from 47 to 158, while the solution gets better. The answer was that this belongs to the
    search for a saddle point.
    """
    torch.manual_seed(662)
    points = torch.linspace(0, 1, 64)[:, None].requires_grad_(True)
    force = math.pi**2 * torch.sin(math.pi * points.detach())
    ends = torch.tensor([[0.0], [1.0]])
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    weights = nn.ParameterDict({"inside": torch.ones(64, 1), "ends": torch.ones(2, 1)})
    down = torch.optim.Adam(model.parameters(), lr=3e-3)
    up = torch.optim.Adam(weights.parameters(), lr=0.3, maximize=True)
    monitor = attach(nn.ModuleDict({"solution": model, "weights": weights}), [down, up])
    for _ in range(400):
        u = model(points)
        slope = torch.autograd.grad(u.sum(), points, create_graph=True)[0]
        bend = torch.autograd.grad(slope.sum(), points, create_graph=True)[0]
        loss = (weights["inside"] * (bend + force) ** 2).mean() + (weights["ends"] * model(ends) ** 2).mean()
        down.zero_grad()
        up.zero_grad()
        loss.backward()
        down.step()
        up.step()
        monitor.step(loss)
    error = (model(points) - torch.sin(math.pi * points)).abs().max().item()
    assert error < 0.1, error


# ------------------------------------------------------------------------------------ a long plateau


@case(source="https://github.com/ChuhuaW/SGNet.pytorch/issues/14", tags=("mlp", "plateau", "odd"))
def plateau_and_then_a_drop(attach: Attach) -> None:
    """A network is to say whether an even number of three of 16 switches is off. No two of them tell anything, and
    the loss stays at log 2 for a hundred and fifty updates before it drops. The answer was that this happens, and to
    wait.
    """
    torch.manual_seed(663)
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.BCEWithLogitsLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    losses = []
    for _ in range(400):
        switches = torch.randint(0, 2, (64, 16), generator=generator) * 2.0 - 1
        even = (switches[:, 3] * switches[:, 7] * switches[:, 11] > 0).float()
        loss = criterion(model(switches).squeeze(1), even)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=switches)
        losses.append(loss.item())
    assert sum(losses[60:80]) / 20 > 0.6, losses[60:80]
    assert mean_of_last(losses) < 0.5, losses[-20:]


# ------------------------------------------------------------------------------------ noise that hides progress


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 96), nn.SiLU(), nn.Linear(96, 96), nn.SiLU(), nn.Linear(96, 2))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        when = torch.cat([time, (6 * time).sin(), (6 * time).cos(), (20 * time).sin()], 1)
        return self.layers(torch.cat([x, when], 1))


@case(source="https://github.com/xirongc/watermark-audio-diffusion/issues/1", tags=("diffusion", "plateau", "odd"))
def loss_of_noise_that_stays(attach: Attach) -> None:
    """A diffusion model of two moons. Its loss falls at once and then goes up and down in the same range, while its
    samples become better. The answer was that the loss stays in this range, and that the model works.
    """
    torch.manual_seed(664)
    moons = torch.tensor(make_moons(2000, noise=0.05, random_state=0)[0], dtype=torch.float32)
    moons = (moons - moons.mean(0)) / moons.std(0)
    kept = torch.linspace(0.9999, 0.9, 50).cumprod(0)
    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)

    def distance() -> float:
        x = torch.randn(300, 2)
        for t in range(49, -1, -1):
            rate = kept[t] / kept[t - 1] if t else kept[0]
            with torch.no_grad():
                noise = model(x, torch.full((300, 1), t / 50))
            x = (x - (1 - rate) / (1 - kept[t]).sqrt() * noise) / rate.sqrt()
            if t:
                x = x + (1 - rate).sqrt() * torch.randn_like(x)
        return torch.cdist(x, moons).amin(1).mean().item()

    before = distance()
    for i in draws(len(moons), size=64, steps=400):
        t = torch.randint(0, 50, (64,))
        noise = torch.randn(64, 2)
        noisy = kept[t, None].sqrt() * moons[i] + (1 - kept[t, None]).sqrt() * noise
        loss = F.mse_loss(model(noisy, t[:, None] / 50), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=moons[i])
    after = distance()
    assert after < 0.5 * before, (before, after)


# ------------------------------------------------------------------------------------ a generator that loses


@case(source="https://github.com/soumith/ganhacks/issues/14", tags=("gan", "odd"))
def generator_that_loses_and_learns(attach: Attach) -> None:
    """The loss of the generator of a GAN rises and that of the discriminator falls, while the pictures become better.
    The answer was that this is seen often, and that the quality goes up all the same.
    """
    torch.manual_seed(665)
    x, _, _, _ = digits()
    real = 2 * x.flatten(1) - 1
    generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())
    critic = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(64, 1))
    model = nn.ModuleDict({"generator": generator, "critic": critic})
    tuned = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    judging = torch.optim.Adam(critic.parameters(), lr=4e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    monitor = attach(model, [tuned, judging], loss_fn=criterion)

    def distance() -> float:
        with torch.no_grad():
            return torch.cdist(generator(torch.randn(300, 16)), real).amin(1).mean().item()

    before = distance()
    losses = []
    for i in draws(len(real), size=32, steps=400):
        forged = generator(torch.randn(32, 16))
        judged, doubted = critic(real[i]), critic(forged.detach())
        loss = criterion(judged, torch.ones_like(judged)) + criterion(doubted, torch.zeros_like(doubted))
        judging.zero_grad()
        loss.backward()
        judging.step()
        believed = critic(forged)
        loss_of_generator = criterion(believed, torch.ones_like(believed))
        tuned.zero_grad()
        loss_of_generator.backward()
        tuned.step()
        monitor.step(loss_of_generator, batch=real[i])
        losses.append(loss_of_generator.item())
    after = distance()
    assert mean_of_last(losses) > losses[0] + 0.3, losses[-20:]
    assert after < 0.75 * before, (before, after)
