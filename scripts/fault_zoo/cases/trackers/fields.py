"""Networks of a place or a time: an equation in seconds, a picture as a function, and two ways to make the weights."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from scripts.fault_zoo.cases.mailing.material import digits, draws, mean_of_last
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------------------ a cup of coffee


def train_cup(attach: Attach, *, scaled: bool) -> float:
    """Solve dT/dt = k (room - T) for a cup of 90 degrees. Return the mean error in degrees."""
    torch.manual_seed(81)
    rate, room, hot, span = 0.005, 20.0, 90.0, 1000.0
    model = nn.Sequential(
        nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)

    def temperature(t: Tensor) -> Tensor:
        return room + (hot - room) * model(t / span) if scaled else model(t)

    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        t = (span * torch.rand(128, 1, generator=generator)).requires_grad_(True)
        warmth = temperature(t)
        (slope,) = torch.autograd.grad(warmth.sum(), t, create_graph=True)
        residual = slope - rate * (room - warmth)
        start = temperature(torch.zeros(1, 1)) - hot
        if scaled:
            residual, start = residual * span / (hot - room), start / (hot - room)
        loss = residual.square().mean() + start.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=t.detach())
    t = torch.linspace(0, span, 200)[:, None]
    with torch.no_grad():
        return (temperature(t) - room - (hot - room) * torch.exp(-rate * t)).abs().mean().item()


@case(
    fault="saturated-activation",
    also=("vanishing-gradient", "loss-plateau", "poor-initialization", "dead-layer"),
    tolerate=("layer-imbalance", "learning-rate-too-low"),
    layers=("0", "1"),
    onset=0,
    source="https://github.com/lululxvi/deepxde/issues/794",
    tags=("physics",),
)
def seconds_into_tanh(attach: Attach) -> None:
    """A physics-informed network gets the time in seconds, up to 1000: the first tanh is at its end for all times but
    the first few seconds, the temperature is a constant, and the equation stays unsolved. Reported for domains larger
    than about 1 in https://github.com/lululxvi/deepxde/issues/794, https://github.com/lululxvi/deepxde/issues/257 and
    https://github.com/SciML/NeuralPDE.jl/issues/582 (meters and millimeters).
    """
    train_cup(attach, scaled=False)


# ------------------------------------------------------------------------------------------------------- odd recipes


@case(
    source="https://github.com/nerfstudio-project/nerfacc/issues/307: a loss that is scaled and never unscaled",
    tags=("field", "adam", "odd"),
)
def field_with_a_scaled_loss(attach: Attach) -> None:
    """A network learns a picture from its coordinates. The loss is multiplied by 1024 for the backward pass and the
    gradients are not divided by it, which Adam does not mind.
    """
    torch.manual_seed(82)
    x, _, _, _ = digits()
    picture = F.interpolate(x[:4].reshape(1, 1, 16, 16), size=(48, 48), mode="bicubic", align_corners=True).flatten()
    line = torch.linspace(0, 1, 48)
    place = torch.cartesian_prod(line, line)
    waves = 2 * math.pi * 4 * torch.randn(2, 32)
    features = torch.cat([torch.sin(place @ waves), torch.cos(place @ waves)], 1)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    losses = []
    for i in draws(48 * 48, size=256, steps=300):
        loss = F.mse_loss(model(features[i]).squeeze(1), picture[i])
        optimizer.zero_grad()
        (1024 * loss).backward()
        optimizer.step()
        monitor.step(loss, batch=features[i])
        losses.append(loss.item())
    assert mean_of_last(losses) < 0.01


@case(source="Ha et al. 2017, HyperNetworks, sec. 3.1", tags=("hypernetwork", "odd"))
def weights_from_a_network(attach: Attach) -> None:
    """The network that tells digits apart has no parameters: another one makes its weights from one learned vector for
    each layer.
    """
    torch.manual_seed(83)
    x, y, test_x, test_y = digits()
    x, test_x = x.flatten(1), test_x.flatten(1)
    body = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)).requires_grad_(False)
    shapes = {name: p.shape for name, p in body.named_parameters()}
    code, makers = nn.Embedding(len(shapes), 8), nn.ModuleList()
    for shape in shapes.values():
        last = nn.Linear(16, shape.numel())
        nn.init.normal_(last.weight, std=0.1 / math.sqrt(shape[-1]))
        makers.append(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), last))
    model = nn.ModuleDict({"code": code, "makers": makers})
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)

    def made() -> dict[str, Tensor]:
        return {
            name: maker(vector).view(shape)
            for (name, shape), maker, vector in zip(shapes.items(), makers, code.weight, strict=True)
        }

    for i in draws(len(x), size=64, steps=250):
        loss = criterion(functional_call(body, made(), (x[i],)), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        assert (functional_call(body, made(), (test_x,)).argmax(1) == test_y).float().mean() > 0.93


@case(source="Belilovsky et al. 2019, Greedy layerwise learning; Nokland & Eidnes 2019", tags=("local", "odd"))
def layers_that_learn_alone(attach: Attach) -> None:
    """Each of four layers has a small head and a loss of its own, and its input is detached: no gradient goes from one
    layer to the one before.
    """
    torch.manual_seed(84)
    x, y, test_x, test_y = digits()
    x, test_x = x.flatten(1), test_x.flatten(1)
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
    heads = nn.ModuleList(nn.Linear(64, 10) for _ in range(4))
    model = nn.ModuleDict({"layers": layers, "heads": heads})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer)

    def scores(h: Tensor) -> list[Tensor]:
        found = []
        for layer, head in zip(layers, heads, strict=True):
            h = torch.relu(layer(h.detach()))
            found.append(head(h))
        return found

    for i in draws(len(x), size=64, steps=250):
        loss = torch.stack([criterion(found, y[i]) for found in scores(x[i])]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        assert (scores(test_x)[-1].argmax(1) == test_y).float().mean() > 0.93


@case(
    source="McClenny & Braga-Neto 2020, Self-adaptive physics-informed networks; "
    "https://github.com/levimcclenny/SA-PINNs/issues/5: the loss increases all the time",
    tags=("physics", "minimax", "odd"),
)
def points_that_demand_attention(attach: Attach) -> None:
    """A boundary layer is solved by a physics-informed network, and each point has a weight of its own, which climbs
    where the equation is not met. The weighted loss rises for long while the solution gets better.
    """
    torch.manual_seed(85)
    place = torch.linspace(0, 1, 64)[:, None].requires_grad_(True)
    net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    demands = nn.Module()
    demands.inside, demands.ends = nn.Parameter(torch.ones(64, 1)), nn.Parameter(10 * torch.ones(2, 1))
    model = nn.ModuleDict({"net": net, "demands": demands})
    descends = torch.optim.Adam(net.parameters(), lr=5e-3)
    ascends = torch.optim.Adam(demands.parameters(), lr=5e-2, maximize=True)
    monitor = attach(model, [descends, ascends])
    ends, fixed = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [1.0]])
    for _ in range(400):
        u = net(place)
        (first,) = torch.autograd.grad(u.sum(), place, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), place, create_graph=True)
        residual = 0.2 * second + first
        loss = (demands.inside * residual).square().mean() + (demands.ends * (net(ends) - fixed)).square().mean()
        descends.zero_grad()
        ascends.zero_grad()
        loss.backward()
        descends.step()
        ascends.step()
        monitor.step(loss, batch=place.detach())
    with torch.no_grad():
        truth = (1 - torch.exp(-5 * place)) / (1 - math.exp(-5))
        assert (net(place) - truth).abs().mean() < 0.05
