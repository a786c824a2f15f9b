"""What single units do: silent, dying, saturated."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from scripts.fault_zoo.cases.faulty_data import batches, digits, houses, setup, standardize
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------------------- rising-sparsity


class TileCoder(nn.Module):
    """4x4 tiles of an image, each coded as the nearest of a few hundred codewords."""

    def __init__(self, codes: int = 256, dim: int = 12) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, dim))
        self.codebook = nn.Embedding(codes, dim)
        self.decoder = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, tiles: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(tiles)
        with torch.no_grad():
            index = torch.cdist(z, self.codebook.weight).argmin(1)
        q = self.codebook(index)
        commit = F.mse_loss(z, q.detach())
        move = F.mse_loss(q, z.detach())
        return self.decoder(z + (q - z).detach()), move + 0.25 * commit


@case(
    fault="rising-sparsity",
    layers=("codebook",),
    onset=25,
    tolerate=("dead-layer",),
    tags=("embedding",),
    source=(
        "lucidrains/vector-quantize-pytorch#170, hiwonjoon/tf-vqvae#2, EdoardoBotta/RQ-VAE-Recommender#65: codebook "
        "collapse"
    ),
)
def digits_tile_codes(attach: Attach) -> None:
    """A vector-quantised autoencoder without restarts or EMA: ever fewer codewords are chosen, the others never get a
    gradient again.
    """
    setup(120)
    x, _ = digits()
    tiles = F.unfold(x, 4, stride=2).transpose(1, 2).reshape(-1, 16)
    model = TileCoder()
    with torch.no_grad():
        model.codebook.weight.copy_(model.encoder(tiles[torch.randperm(len(tiles))[:256]]))
    optimizer = torch.optim.Adam(model.parameters(), lr=1.2e-4)
    monitor = attach(model, optimizer)
    for (tile,) in batches(tiles, size=512, steps=320):
        rebuilt, quantization = model(tile)
        loss = F.mse_loss(rebuilt, tile) + quantization
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=tile)


class PrunableNet(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.fc1 = nn.Linear(width * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = F.max_pool2d(torch.relu(self.conv2(x)), 2)
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))


@case(
    fault="rising-sparsity",
    layers=("conv2", "fc1"),
    onset=60,
    tolerate=("dead-layer", "dead-relu", "loss-plateau", "layer-imbalance"),
    tags=("mid-run",),
    source=(
        "own construction: torch.nn.utils.prune called in the step loop; its amounts compound, as its documentation "
        "says"
    ),
)
def digits_iterative_pruning(attach: Attach) -> None:
    """From the second epoch on, 8% of the remaining weights are pruned: meant once per epoch, done at every fourth
    batch.
    """
    setup(121)
    x, y = digits()
    model = PrunableNet()
    for layer in (model.conv2, model.fc1):
        prune.identity(layer, "weight")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for step, (images, labels) in enumerate(batches(x, y, size=64, steps=280)):
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        if step >= 56 and step % 4 == 0:
            for layer in (model.conv2, model.fc1):
                prune.ln_structured(layer, "weight", amount=0.08, n=2, dim=0)
        monitor.step(loss, batch=images)


# ------------------------------------------------------------------------------------------------------- dead-relu


@case(
    fault="dead-relu",
    layers=("1", "2", "3", "4", "5", "6"),
    onset=152,
    also=("learning-rate-too-high", "dead-layer"),
    tolerate=(
        "loss-plateau",
        "gradient-spike",
        "exploding-gradient",
        "no-gradient",
        "vanishing-gradient",
        "rising-sparsity",
    ),
    tags=("mid-run",),
    source=(
        "keras-team/keras#7057, #3425 (a too-high rate kills ReLUs for good); own variant: a mistyped peak at an SGDR "
        "restart"
    ),
)
def digits_warm_restart(attach: Attach) -> None:
    """At the restart the rate is set to 1.0 where 0.1 was meant; within a few updates whole layers never fire again."""
    setup(122)
    x, y = digits()
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    peak = {0: 0.03, 150: 1.0, 156: 0.03}
    for step, (images, labels) in enumerate(batches(x, y, size=64, steps=300)):
        if step in peak:
            for group in optimizer.param_groups:
                group["lr"] = peak[step]
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=images)


class NightNet(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(dim, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh())
        self.temperature = nn.Linear(128, 1)
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.temperature(self.hidden(x))).squeeze(1)


@case(
    fault="dead-relu",
    layers=("temperature", "activation"),
    onset=3,
    also=("no-gradient", "dead-layer"),
    tolerate=("loss-plateau", "vanishing-gradient"),
    source=(
        "StackOverflow 48251943 (DeepFD benchmark): a ReLU on the output unit of a regression; "
        "jvargasmu/population_estimation#68"
    ),
)
def station_night_frost(attach: Attach) -> None:
    """The output unit is a ReLU, the targets (tens of degrees Celsius at night) are mostly negative; soon it is 0 for
    every sample and nothing moves.
    """
    setup(123)
    x = torch.randn(4000, 12)
    y = torch.tanh(x @ torch.randn(12) / 3) - 1.1 + 0.2 * torch.randn(4000)
    model = NightNet(12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)
    for xb, yb in batches(x, y, size=128, steps=300):
        optimizer.zero_grad()
        loss = F.mse_loss(model(xb), yb)
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=xb)


# -------------------------------------------------------------------------------------------- saturated-activation


@case(
    fault="saturated-activation",
    layers=("4", "5"),
    onset=36,
    also=("vanishing-gradient",),
    tolerate=("dead-layer", "rising-sparsity", "dead-relu", "learning-rate-too-high"),
    tags=("mid-run", "rl"),
    source=(
        "rmst/ddpg#10, floodsung/DDPG#6, ZhihanLee/DDPG_Learning#2 (the actor's tanh goes to its bounds and stays; "
        "states not normalised)"
    ),
)
def rover_actor(attach: Attach) -> None:
    """A deterministic policy sees the odometer unscaled; as it counts up, the tanh outputs run to +-1 and have no
    gradient to come back with.
    """
    setup(124)
    actor = nn.Sequential(nn.Linear(7, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2), nn.Tanh())
    critic = nn.Sequential(nn.Linear(9, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
    best = 0.3 * torch.randn(6, 2)
    opt_actor = torch.optim.Adam(actor.parameters(), lr=1e-3)
    opt_critic = torch.optim.Adam(critic.parameters(), lr=2e-3)
    monitor = attach(actor, opt_actor)
    for step in range(300):
        pose = torch.randn(128, 6)
        odometer = 0.3 * step * (0.5 + torch.rand(128, 1))
        state = torch.cat([pose, odometer], 1)
        with torch.no_grad():
            action = (actor(state) + 0.3 * torch.randn(128, 2)).clamp(-1, 1)
        reward = -((action - 0.6 * torch.tanh(pose @ best)) ** 2).sum(1)
        loss_critic = F.mse_loss(critic(torch.cat([state, action], 1)).squeeze(1), reward)
        opt_critic.zero_grad()
        loss_critic.backward()
        opt_critic.step()
        loss_actor = -critic(torch.cat([state, actor(state)], 1)).mean()
        opt_actor.zero_grad()
        loss_actor.backward()
        opt_actor.step()
        monitor.step(loss_actor, batch=state)


class GatedMixture(nn.Module):
    def __init__(self, dim: int, parts: int = 5, hidden: int = 48) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, parts))
        self.choose = nn.Softmax(dim=1)
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, 1)) for _ in range(parts)
        )
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        w = self.choose(self.gate(x) / self.temperature)
        return (w * torch.cat([part(x) for part in self.parts], 1)).sum(1)


@case(
    fault="saturated-activation",
    layers=("choose", "gate"),
    onset=60,
    also=("dead-layer",),
    tolerate=("vanishing-gradient", "layer-imbalance", "rising-sparsity", "gradient-spike", "oscillating-gradient"),
    tags=("mid-run",),
    source="own construction: temperature annealing (Jang et al. 2017) per update instead of per epoch",
)
def house_prices_mixture(attach: Attach) -> None:
    """The gate's temperature is multiplied by 0.96 at every update (it should be every epoch); after a hundred updates
    the softmax is a hard switch.
    """
    setup(126)
    x, price = houses()
    x, y = standardize(x), (price - price.mean()) / price.std()
    model = GatedMixture(x.shape[1])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.MSELoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for xb, yb in batches(x, y, size=128, steps=300):
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        model.temperature *= 0.96
        monitor.step(loss, batch=xb)
