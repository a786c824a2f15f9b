"""The loop around the network: a loss of one batch, a count that starts again, and steps at the wrong batches."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import cells, draws, waves
from scripts.fault_zoo.protocol import Attach, case


class WaveReader(nn.Module):
    """Tell the shape of a wave from its values."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, width, 5, padding=2), nn.ReLU(), nn.Conv1d(width, width, 5, padding=2), nn.ReLU()
        )
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x.transpose(1, 2)).amax(2))


# ------------------------------------------------------------------------------------ a loss of one batch


def train_reported(attach: Attach) -> list[tuple[float, float]]:
    """Return for each epoch the loss that is reported, and the mean loss of its batches."""
    torch.manual_seed(351)
    x, kind = waves(330, 32, seed=31)
    model = WaveReader()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer, loss_fn=criterion)
    generator = torch.Generator().manual_seed(1)
    epochs = []
    for _ in range(30):
        losses = []
        for i in torch.randperm(len(x), generator=generator).split(32):
            loss = criterion(model(x[i]), kind[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss, batch=x[i])
            losses.append(loss.item())
        epochs.append((losses[-1], sum(losses) / len(losses)))
    return epochs


@case(
    fault="loss-plateau",
    onset=10,
    source="https://github.com/nntrainer/nntrainer/pull/435",
    tags=("convolution", "report"),
)
def loss_of_the_last_batch(attach: Attach) -> None:
    """The loss that is reported for an epoch is that of its last batch, which here has 10 examples of 330. The network
    learns. No kind fits; the nearest is a report that does not fall from one epoch to the next.
    """
    train_reported(attach)


# ------------------------------------------------------------------------------------ a count that starts again


class Run:
    """A training that can be interrupted. Checkpoints are kept by the number of the iteration."""

    def __init__(self, folder: dict[int, dict[str, Any]]) -> None:
        torch.manual_seed(352)
        self.folder = folder
        self.model = WaveReader()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        if folder:
            latest = folder[max(folder)]
            self.model.load_state_dict(latest["model"])
            self.optimizer.load_state_dict(latest["optimizer"])

    def save(self, iteration: int, trained: int) -> None:
        """Keep the state under the number of an iteration."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "trained": trained}
        self.folder[iteration] = copy.deepcopy(state)


def resume_twice(attach: Attach) -> tuple[int, int]:
    """Return how many steps were made before the last interruption, and how many of them its checkpoint has."""
    x, kind = waves(1200, 32, seed=32)
    folder: dict[int, dict[str, Any]] = {}
    trained = 0
    monitor = None
    for leg in range(3):
        run = Run(folder)
        kept = folder[max(folder)]["trained"] if folder else 0
        if leg == 2:
            return trained, kept
        if leg == 1:
            monitor = attach(run.model, run.optimizer, loss_fn=F.cross_entropy)
        for iteration, i in enumerate(draws(len(x), size=32, steps=250 if leg == 0 else 200, seed=leg)):
            loss = F.cross_entropy(run.model(x[i]), kind[i])
            run.optimizer.zero_grad()
            loss.backward()
            run.optimizer.step()
            trained += 1
            if (iteration + 1) % 50 == 0:
                run.save(iteration + 1, trained)
            if monitor is not None:
                monitor.step(loss, batch=x[i])
    raise AssertionError("the last leg returns")


@case(
    fault="loss-plateau",
    onset=50,
    source="https://github.com/ZettaAI/zetta_utils/issues/1025",
    tags=("convolution", "resume"),
)
def count_that_starts_again(attach: Attach) -> None:
    """A run goes on from a checkpoint and counts its iterations from 0, so that it overwrites the checkpoints of the
    first part one by one. After the next interruption the latest number is still that of the first part, and 200 of 450
    steps are lost. No kind fits; the nearest is a loss that does not go on falling.
    """
    resume_twice(attach)


# ------------------------------------------------------------------------------------ steps at the wrong batches


class CellFinder(nn.Module):
    """Tell where the one cell of a picture is, and how large."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.box = nn.Linear(512, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.box(self.layers(x))


def boxes(masks: Tensor) -> Tensor:
    """Return middle, width and height of each mask, as shares of the picture, (N, 4)."""
    rows, columns = masks[:, 0].amax(2), masks[:, 0].amax(1)
    place = torch.arange(16.0) / 16
    sides = [(line * place).sum(1) / line.sum(1) for line in (rows, columns)]
    return torch.stack([*sides, rows.mean(1), columns.mean(1)], 1)


def train_finder(attach: Attach, *, at_the_end: bool) -> tuple[int, float]:
    """Return the number of updates and the mean error of the boxes, as a share of the picture."""
    torch.manual_seed(353)
    x, masks = cells(800, seed=33)
    wanted = boxes(masks)
    model = CellFinder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    accumulations = 4
    monitor = attach(model, optimizer, accumulate=accumulations, loss_fn=F.mse_loss)
    updates = 0
    for done, i in enumerate(draws(len(x), size=8, steps=800)):
        loss = F.mse_loss(model(x[i]), wanted[i])
        loss.backward()
        due = (done + 1) % accumulations == 0 if at_the_end else done % accumulations != 0
        if due:
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
            monitor.step(loss, batch=x[i])
    pictures, new_masks = cells(200, seed=34)
    with torch.no_grad():
        return updates, (model(pictures) - boxes(new_masks)).abs().mean().item()


@case(
    fault="oscillating-gradient",
    also=("missing-zero-grad",),
    onset=3,
    source="https://github.com/eriklindernoren/PyTorch-YOLOv3/pull/313",
    tags=("detection", "accumulation"),
)
def steps_at_all_but_the_fourth(attach: Attach) -> None:
    """Gradients of four batches shall be added up. The condition is true at three batches out of four: there are 600
    updates instead of 200, and every third one has the gradients of two batches. The boxes are learned.
    """
    train_finder(attach, at_the_end=False)


@case(source="the repaired twin of `steps_at_all_but_the_fourth`", tags=("detection", "accumulation", "twin"))
def steps_at_the_fourth(attach: Attach) -> None:
    """An update is made after every fourth batch."""
    updates, error = train_finder(attach, at_the_end=True)
    assert updates == 200, updates
    assert error < 0.1, error
