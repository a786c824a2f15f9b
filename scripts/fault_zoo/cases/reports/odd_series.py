"""Runs that look odd and are fine: sequences, equations, latent variables, many small tasks."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.reports.material import characters, digits, indices, words
from scripts.fault_zoo.protocol import Attach, case


@case(source="Zaremba & Sutskever 2014: sequences get longer as training goes on", tags=("curriculum", "gru"))
def longer_sums(attach: Attach) -> None:
    """A GRU adds numbers; the sequences get longer, and the loss jumps up each time."""
    torch.manual_seed(0)
    gru, head = nn.GRU(1, 24, batch_first=True), nn.Linear(24, 1)
    model = nn.ModuleDict({"gru": gru, "head": head})
    optimizer = torch.optim.Adam(model.parameters(), lr=6e-3)
    monitor = attach(model, optimizer)
    recent = []
    for step in range(600):
        length = 3 + 3 * (step // 150)
        x = torch.rand(64, length, 1)
        loss = F.mse_loss(head(gru(x)[0][:, -1]), x.sum(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)
        recent.append(loss.item())
    assert sum(recent[-30:]) / 30 < 0.1  # the variance of a sum of twelve numbers is 1


@case(source="Mikolov et al. 2013: skip-gram with sampled negatives and sparse gradients", tags=("sparse", "embedding"))
def words_and_their_neighbours(attach: Attach) -> None:
    """Sparse gradients: most rows of both embeddings get none in a given step."""
    torch.manual_seed(0)
    text = words(20_000, 1500)
    centre = nn.Embedding(1500, 32, sparse=True)
    around = nn.Embedding(1500, 32, sparse=True)
    nn.init.zeros_(around.weight)
    nn.init.uniform_(centre.weight, -0.5 / 32, 0.5 / 32)
    model = nn.ModuleDict({"centre": centre, "around": around})
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=5e-3)
    monitor = attach(model, optimizer)
    losses = []
    for _ in range(500):
        place = torch.randint(2, len(text) - 2, (256,))
        word, near = text[place], text[place + torch.tensor([-2, -1, 1, 2])[torch.randint(4, (256,))]]
        false = text[torch.randint(len(text), (256, 5))]
        vector = centre(word)
        right = (vector * around(near)).sum(1)
        wrong = (around(false) @ vector[:, :, None]).squeeze(2)
        loss = -(F.logsigmoid(right) + F.logsigmoid(-wrong).sum(1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=word)
        losses.append(loss.item())
    assert sum(losses[-50:]) / 50 < 0.8 * losses[0]


@case(source="Raissi et al. 2019: a physics-informed network for a damped oscillator", tags=("pinn",))
def oscillator_from_its_equation(attach: Attach) -> None:
    """No data: the loss is the residual of an equation at random times, through second derivatives, and the start."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor = attach(model, optimizer)

    def motion(t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        t = t.requires_grad_(True)
        u = model(t)
        (v,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        (a,) = torch.autograd.grad(v.sum(), t, create_graph=True)
        return u, v, a

    for _ in range(800):
        t = 3 * torch.rand(64, 1)
        u, v, a = motion(t)
        residual = a + 0.4 * v + 4 * u
        u0, v0, _ = motion(torch.zeros(1, 1))
        loss = (residual**2).mean() + 20 * ((u0 - 1) ** 2 + v0**2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=t.detach())
    t = torch.linspace(0, 3, 50)[:, None]
    w = math.sqrt(4 - 0.04)
    exact = torch.exp(-0.2 * t) * (torch.cos(w * t) + 0.2 / w * torch.sin(w * t))
    with torch.no_grad():
        assert F.mse_loss(model(t), exact) < 0.1 * exact.var()


class Variational(nn.Module):
    """A variational autoencoder for digits."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 96), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(96, 8), nn.Linear(96, 8)
        self.decoder = nn.Sequential(nn.Linear(8, 96), nn.ReLU(), nn.Linear(96, 64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.encoder(x)
        mean, log_variance = self.mean(h), self.log_variance(h)
        z = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(1)
        return self.decoder(z), divergence.mean()


@case(
    source="Bowman et al. 2016: the weight of the divergence of a VAE is annealed in cycles", tags=("vae", "schedule")
)
def digits_with_a_cyclic_divergence(attach: Attach) -> None:
    """The weight of the divergence goes up and drops back to zero in cycles, and the loss with it."""
    torch.manual_seed(0)
    x, _, test_x, _ = digits()
    model = Variational()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    chosen = indices(len(x), 64)
    for step in range(600):
        i = next(chosen)
        out, divergence = model(x[i])
        weight = min(1.0, (step % 200) / 100)
        loss = 20 * F.mse_loss(out, x[i], reduction="sum") / len(i) / 4 + weight * divergence
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        assert F.mse_loss(model(test_x)[0], test_x) < 0.6 * F.mse_loss(x.mean(0).expand_as(test_x), test_x)


class Stateful(nn.Module):
    """An LSTM that is given its last state."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 32)
        self.lstm = nn.LSTM(32, 64, batch_first=True)
        self.head = nn.Linear(64, vocabulary)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        out, state = self.lstm(self.embed(x), state)
        return self.head(out), state


@case(source="Mikolov et al. 2010: truncated backpropagation, the state is kept and detached", tags=("text", "lstm"))
def text_in_order(attach: Attach) -> None:
    """The text is read in order; the state goes on from step to step without its history."""
    torch.manual_seed(0)
    tokens, vocabulary = characters(72_000)
    rows = tokens[: 16 * (len(tokens) // 16)].view(16, -1)
    model = Stateful(vocabulary)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    monitor = attach(model, optimizer)
    state, losses = None, []
    for step in range(270):
        x, y = rows[:, 16 * step : 16 * step + 16], rows[:, 16 * step + 1 : 16 * step + 17]
        out, (h, c) = model(x, state)
        state = h.detach(), c.detach()
        loss = F.cross_entropy(out.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        monitor.step(loss, batch=x)
        losses.append(loss.item())
    assert sum(losses[-30:]) / 30 < 2.4


@case(
    source="Nichol et al. 2018: Reptile on sine waves; the optimizer steps towards the adapted weights", tags=("meta",)
)
def waves_by_reptile(attach: Attach) -> None:
    """Meta-learning: gradients are written by hand as the way to weights that were adapted to one more wave."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    monitor = attach(model, optimizer)

    def wave() -> tuple[Tensor, Tensor]:
        x = 10 * torch.rand(40, 1) - 5
        return x, (0.5 + 3 * torch.rand(1)) * torch.sin(x + math.pi * torch.rand(1))

    def adapt(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for _ in range(8):
            weights = {name: w.detach().requires_grad_(True) for name, w in weights.items()}
            loss = F.mse_loss(torch.func.functional_call(model, weights, (x,)), y)
            grads = torch.autograd.grad(loss, list(weights.values()))
            weights = {name: w - 0.02 * g for (name, w), g in zip(weights.items(), grads, strict=True)}
        return {name: w.detach() for name, w in weights.items()}

    def error(rounds: int) -> float:
        total = 0.0
        for _ in range(rounds):
            x, y = wave()
            weights = adapt({n: p.detach() for n, p in model.named_parameters()}, x[:10], y[:10])
            total += F.mse_loss(torch.func.functional_call(model, weights, (x[10:],)), y[10:]).item()
        return total / rounds

    at_first = error(60)
    for _ in range(500):
        x, y = wave()
        weights = adapt({n: p.detach() for n, p in model.named_parameters()}, x, y)
        optimizer.zero_grad()
        for name, p in model.named_parameters():
            p.grad = p.detach() - weights[name]
        optimizer.step()
        with torch.no_grad():
            loss = F.mse_loss(torch.func.functional_call(model, weights, (x,)), y)
        monitor.step(loss, batch=x)
    assert error(60) < 0.85 * at_first
