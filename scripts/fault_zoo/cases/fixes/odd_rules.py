"""Other ways to a gradient: two of them in a step, layers apart, a network at rest, and no derivative at all."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.fixes.pictures import convolutions, share_right
from scripts.fault_zoo.cases.mailing.material import digits, draws, mean_of_last
from scripts.fault_zoo.protocol import Attach, case


@case(source="https://github.com/davda54/sam", tags=("convolution", "sharpness"))
def climb_before_each_step(attach: Attach) -> None:
    """Sharpness-aware minimization: the weights climb along the gradient, the gradient is taken there, and the step is
    made from where they were. Each step has two backward passes, and the second has the larger gradients.
    """
    torch.manual_seed(411)
    x, y, new_x, new_y = digits()
    model = nn.Sequential(convolutions(), nn.Linear(64, 10))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    monitor = attach(model, optimizer, loss_fn=criterion)
    for i in draws(len(x), size=64, steps=200):
        loss = criterion(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm() + 1e-12
        with torch.no_grad():
            for p, g in zip(model.parameters(), gradients, strict=True):
                p.add_(g, alpha=(0.05 / norm).item())
        optimizer.zero_grad()
        criterion(model(x[i]), y[i]).backward()
        with torch.no_grad():
            for p, g in zip(model.parameters(), gradients, strict=True):
                p.sub_(g, alpha=(0.05 / norm).item())
        optimizer.step()
        monitor.step(loss, batch=x[i])
    assert share_right(model, new_x, new_y) > 0.95


class GoodnessLayer(nn.Module):
    """A layer whose goodness is the mean square of its outputs. It learns from that alone."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inner, outer)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x / ((x**2).mean(1, keepdim=True).sqrt() + 1e-4)))


def labeled(x: Tensor, y: Tensor) -> Tensor:
    """Return pictures with their labels, (N, 74)."""
    return torch.cat([x.flatten(1), F.one_hot(y, 10).float()], 1)


def goodness(layers: nn.ModuleList, x: Tensor) -> list[Tensor]:
    """Return the goodness of each layer. No gradient passes from one layer to another."""
    found = []
    for layer in layers:
        x = layer(x.detach())
        found.append((x**2).mean(1))
    return found


@case(source="https://github.com/mpezeshki/pytorch_forward_forward", tags=("perceptron", "local"))
def layers_that_learn_apart(attach: Attach) -> None:
    """The forward-forward algorithm: each layer is to be active for right labels and quiet for wrong ones, and no
    gradient passes between layers. The loss is the sum of three losses that begin near log 2 and fall slowly.
    """
    torch.manual_seed(412)
    x, y, new_x, new_y = digits()
    layers = nn.ModuleList([GoodnessLayer(74, 200), GoodnessLayer(200, 200), GoodnessLayer(200, 200)])
    optimizer = torch.optim.Adam(layers.parameters(), lr=5e-3)
    monitor = attach(layers, optimizer)
    for i in draws(len(x), size=128, steps=400):
        wrong = (y[i] + torch.randint(1, 10, (len(i),))) % 10
        good, bad = goodness(layers, labeled(x[i], y[i])), goodness(layers, labeled(x[i], wrong))
        losses = [F.softplus(torch.cat([1 - g, b - 1])).mean() for g, b in zip(good, bad, strict=True)]
        loss = torch.stack(losses).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        scores = [sum(goodness(layers, labeled(new_x, torch.full_like(new_y, label)))) for label in range(10)]
    right = (torch.stack([torch.as_tensor(score) for score in scores], 1).argmax(1) == new_y).float().mean().item()
    assert right > 0.8, right


class Settling(nn.Module):
    """Units that settle into a state of least energy, given a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 96)
        self.outer = nn.Linear(96, 10)

    def energy(self, x: Tensor, hidden: Tensor, out: Tensor) -> Tensor:
        """Return the energy of each example."""
        own = 0.5 * (hidden**2).sum(1) + 0.5 * (out**2).sum(1)
        return own - (hidden * self.inner(x)).sum(1) - (out * self.outer(hidden)).sum(1)

    def settle(
        self, x: Tensor, hidden: Tensor, out: Tensor, *, steps: int, beta: float = 0.0, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the state after some steps downhill. `beta` pulls the outputs to what is wanted."""
        for _ in range(steps):
            hidden, out = hidden.detach().requires_grad_(), out.detach().requires_grad_()
            energy = self.energy(x, hidden, out).sum()
            if wanted is not None:
                energy = energy + beta * 0.5 * ((out - wanted) ** 2).sum()
            slopes = torch.autograd.grad(energy, (hidden, out))
            hidden, out = hidden - 0.4 * slopes[0], out - 0.4 * slopes[1]
            hidden = hidden.clamp(0, 1)
        return hidden.detach(), out.detach()


@case(source="https://github.com/zeligism/eqprop", tags=("energy", "perceptron"))
def network_at_rest(attach: Attach) -> None:
    """Equilibrium propagation: a network settles freely, is pulled a little to the labels, and settles again. The
    gradient is the difference of the two energies. The loss that is reported was never differentiated.
    """
    torch.manual_seed(413)
    x, y, new_x, new_y = (part.flatten(1) if part.ndim > 1 else part for part in digits())
    model = Settling()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor = attach(model, optimizer)
    beta = 0.5
    for i in draws(len(x), size=32, steps=300):
        wanted = F.one_hot(y[i], 10).float()
        hidden, out = model.settle(x[i], torch.zeros(len(i), 96), torch.zeros(len(i), 10), steps=15)
        pulled = model.settle(x[i], hidden, out, steps=6, beta=beta, wanted=wanted)
        loss = 0.5 * ((out - wanted) ** 2).sum(1).mean()
        difference = (model.energy(x[i], *pulled) - model.energy(x[i], hidden, out)).mean() / beta
        optimizer.zero_grad()
        difference.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    _, out = model.settle(new_x, torch.zeros(len(new_x), 96), torch.zeros(len(new_x), 10), steps=15)
    right = (out.argmax(1) == new_y).float().mean().item()
    assert right > 0.85, right


@case(source="https://github.com/hardmaru/estool", tags=("perceptron", "evolution"))
def gradient_of_guesses(attach: Attach) -> None:
    """Evolution strategies: the gradient is an average of 10 pairs of random directions, weighted by their losses, and
    is written into `grad` by hand. It is mostly noise, and nothing is ever differentiated.
    """
    torch.manual_seed(414)
    generator = torch.Generator().manual_seed(18)
    points = torch.rand(256, 1, generator=generator) * 4 - 2
    values = torch.sin(2 * points) + 0.05 * torch.randn(256, 1, generator=generator)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)
    losses = []
    with torch.no_grad():
        for _ in range(300):
            weights = nn.utils.parameters_to_vector(model.parameters())
            gradient = torch.zeros_like(weights)
            for _ in range(10):
                direction = torch.randn(len(weights), generator=generator)
                for sign in (1.0, -1.0):
                    nn.utils.vector_to_parameters(weights + 0.05 * sign * direction, model.parameters())
                    gradient += sign * F.mse_loss(model(points), values) * direction / (0.1 * 10)
            nn.utils.vector_to_parameters(weights, model.parameters())
            loss = F.mse_loss(model(points), values)
            at = 0
            for p in model.parameters():
                p.grad = gradient[at : at + p.numel()].view_as(p).clone()
                at += p.numel()
            optimizer.step()
            monitor.step(loss, batch=points)
            losses.append(loss.item())
    assert mean_of_last(losses) < 0.1, losses[-1]
