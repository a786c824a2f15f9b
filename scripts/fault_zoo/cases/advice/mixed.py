"""A critic of pictures that is too sure, boxes without a width, a graph of all pairs, and a loader that starts anew."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import digits, draws, excerpts, letters
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------ a critic that is too sure


@case(
    fault="saturated-activation",
    also=("vanishing-gradient", "no-gradient", "dead-layer", "loss-plateau", "learning-rate-too-high"),
    tolerate=("layer-imbalance", "gradient-spike", "rising-sparsity", "oscillating-gradient"),
    onset=0,
    source="https://github.com/soumith/ganhacks/issues/67",
    tags=("gan", "loss"),
)
def critic_that_ends_in_a_sigmoid(attach: Attach) -> None:
    """The discriminator of a GAN ends in a sigmoid before a loss of probabilities. Its output is soon exactly 0 for
    every picture, its loss stays at 100, and the generator gets a gradient of 1e-14 and less. With logits, both
    learn.
    """
    torch.manual_seed(641)
    x, _, _, _ = digits()
    real = 2 * x.flatten(1) - 1
    generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())
    critic = nn.Sequential(
        nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1), nn.Sigmoid()
    )
    model = nn.ModuleDict({"generator": generator, "critic": critic})
    tuned = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    judging = torch.optim.Adam(critic.parameters(), lr=0.05, betas=(0.5, 0.999))
    criterion = nn.BCELoss()
    monitor = attach(model, [tuned, judging], loss_fn=criterion)
    for i in draws(len(real), size=32, steps=300):
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


# ------------------------------------------------------------------------------------ boxes without a width


def plates(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return pictures (N, 1, 16, 16) with one plate, and its corners in whole pixels, each of them included."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.randint(1, 8, (count, 2), generator=generator)
    low = (torch.rand(count, 2, generator=generator) * (17 - size)).long()
    pixel = torch.arange(16)
    inside = [(pixel >= low[:, k : k + 1]) & (pixel < (low + size)[:, k : k + 1]) for k in (0, 1)]
    pictures = (inside[1][:, :, None] & inside[0][:, None]).float()[:, None]
    pictures += 0.1 * torch.randn(pictures.shape, generator=generator)
    return pictures, torch.cat([low, low + size - 1], 1).float()


@case(
    fault="non-finite",
    also=("unstable-formula",),
    onset=0,
    source="https://github.com/dusty-nv/jetson-inference/issues/1010",
    tags=("detection", "data"),
)
def plates_of_one_pixel(attach: Attach) -> None:
    """A detector learns the logarithm of the width and height of a plate. The width is taken as the right column
    minus the left one, which is 0 for a plate of one pixel. The loss is infinite, and the weights are NaN after the
    first step.
    """
    torch.manual_seed(642)
    x, corners = plates(1200, seed=1)
    middle, size = (corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]
    target = torch.cat([(middle - 8) / 4, torch.log(size / 4)], 1)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 4),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.MSELoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for i in draws(len(x), size=16, steps=250):
        loss = criterion(model(x[i]), target[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])


# ------------------------------------------------------------------------------------ a graph of all pairs


def towns(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return towns of 40 houses (N, 40, 2), which houses are near each other, and which have more than 5 near ones."""
    centers = torch.rand(count, 4, 2, generator=generator)
    home = torch.randint(0, 4, (count, 20), generator=generator)
    dense = centers[torch.arange(count)[:, None], home] + 0.06 * torch.randn(count, 20, 2, generator=generator)
    houses = torch.cat([dense, torch.rand(count, 20, 2, generator=generator)], 1)
    near = (torch.cdist(houses, houses) < 0.15).float()
    return houses, near, (near.sum(2) > 6).long()


class HouseNet(nn.Module):
    """Three graph convolutions: each house takes the mean of its neighbours (Kipf and Welling 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 32), nn.Linear(32, 32), nn.Linear(32, 32)])
        self.out = nn.Linear(32, 2)

    def forward(self, houses: Tensor, links: Tensor) -> Tensor:
        degree = links.sum(2, keepdim=True)
        x = torch.cat([houses, degree / 10], 2)
        for layer in self.layers:
            x = torch.relu(layer((links @ x) / degree))
        return self.out(x)


def train_on_towns(attach: Attach, *, all_pairs: bool) -> float:
    """Return the accuracy on new towns, as the mean of those in the two kinds of houses."""
    torch.manual_seed(643)
    generator = torch.Generator().manual_seed(8)
    model = HouseNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)

    def said_and_true(count: int) -> tuple[Tensor, Tensor, Tensor]:
        houses, near, is_dense = towns(count, generator)
        links = torch.ones_like(near) if all_pairs else near
        return model(houses, links).flatten(0, 1), is_dense.flatten(), houses

    for _ in range(250):
        logits, is_dense, houses = said_and_true(8)
        loss = criterion(logits, is_dense)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=houses)
    with torch.no_grad():
        logits, is_dense, _ = said_and_true(50)
    right = (logits.argmax(1) == is_dense).float()
    return (right[is_dense == 1].mean() + right[is_dense == 0].mean()).item() / 2


@case(
    fault="loss-plateau",
    also=("poor-initialization", "vanishing-gradient"),
    onset=0,
    source="https://github.com/FluxML/GeometricFlux.jl/issues/154",
    tags=("graph", "data"),
)
def houses_all_linked(attach: Attach) -> None:
    """A graph network says which houses of a town stand close to others. Its graph links each house with all others,
    so that the mean over the neighbours is the same for all of them, and the network cannot tell them apart.
    """
    train_on_towns(attach, all_pairs=True)


@case(source="the repaired twin of `houses_all_linked`", tags=("graph", "data", "twin"))
def houses_linked_if_near(attach: Attach) -> None:
    """Only near houses are linked, and 85 % of both kinds are right."""
    assert train_on_towns(attach, all_pairs=False) > 0.85


# ------------------------------------------------------------------------------------ a loader that starts anew


@case(
    fault="overfitting",
    onset=0,
    source="https://github.com/PrimeIntellect-ai/prime-diloco/issues/97",
    tags=("text", "resume", "data"),
)
def shards_read_from_the_first(attach: Attach) -> None:
    """A run over ten shards of text is interrupted after every two. Weights, moments and rate are restored, but not
    the place in the data, so that each run reads the first two shards again. The monitor sees the last run. The loss
    on new text is 2.36, and 1.94 if all shards are read.
    """
    torch.manual_seed(644)
    ids, alphabet = letters()
    shards = ids[:140_000].split(14_000)

    def start() -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
        model = nn.ModuleDict(
            {"letters": nn.Embedding(alphabet, 48), "lstm": nn.LSTM(48, 128), "out": nn.Linear(128, alphabet)}
        )
        return model, torch.optim.AdamW(model.parameters(), lr=4e-3)

    model, optimizer = start()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    for run in range(5):
        model, optimizer = start()
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        monitor = attach(model, optimizer, loss_fn=F.cross_entropy) if run == 4 else None
        for shard in shards[:2]:
            generator = torch.Generator().manual_seed(9)
            for _ in range(60):
                text = excerpts(shard, length=33, count=16, generator=generator).T
                states, _ = model["lstm"](model["letters"](text[:-1]))
                loss = F.cross_entropy(model["out"](states).flatten(0, 1), text[1:].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if monitor is not None:
                    monitor.step(loss, batch=text)
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
