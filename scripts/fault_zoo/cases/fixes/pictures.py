"""Pictures: a smoothing that starts at once, copies that are never drawn, and features that are not left alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import digits, draws
from scripts.fault_zoo.protocol import Attach, case


def convolutions(width: int = 16) -> nn.Sequential:
    """Return a network from pictures of 8 x 8 pixels to `4 * width` features."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * width, 4 * width),
        nn.ReLU(),
    )


def share_right(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the accuracy in evaluation mode."""
    model.eval()
    with torch.no_grad():
        right = (model(x).argmax(1) == y).float().mean().item()
    model.train()
    return right


# ------------------------------------------------------------------------------------ a smoothing that starts at once


class LabelSmoothing(nn.Module):
    """Cross entropy with smoothed labels. A negative factor pushes the other classes away."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, scores: Tensor, label: Tensor) -> Tensor:
        log_p = F.log_softmax(scores, 1)
        return (1 - self.factor) * F.nll_loss(log_p, label) - self.factor * log_p.mean()


class SmoothingScheduler:
    """Hold the factor at 0 for some epochs, then lower it to its final value in equal steps."""

    def __init__(self, criterion: LabelSmoothing, *, factor: float, hold: int, fall: int) -> None:
        self.criterion, self.factor, self.hold, self.fall = criterion, factor, hold, fall

    def step(self, epoch: int) -> None:
        """Set the factor of an epoch."""
        self.criterion.factor = self.factor * min(max((epoch - self.hold) / self.fall, 0.0), 1.0)


def train_smoothed(attach: Attach, *, scheduled: bool) -> float:
    """Return the accuracy on new pictures."""
    torch.manual_seed(341)
    x, y, new_x, new_y = digits()
    model = nn.Sequential(convolutions(), nn.Linear(64, 10))
    criterion = LabelSmoothing(-0.05)
    scheduler = SmoothingScheduler(criterion, factor=-0.05, hold=5, fall=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    monitor = attach(model, optimizer, loss_fn=criterion)
    for step, i in enumerate(draws(len(x), size=64, steps=300)):
        if scheduled:
            scheduler.step(step // 21)
        loss = criterion(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    return share_right(model, new_x, new_y)


@case(
    fault="exploding-gradient",
    also=("learning-rate-too-high", "unstable-formula"),
    tolerate=("gradient-spike", "oscillating-gradient", "loss-plateau"),
    onset=40,
    source="https://github.com/LukasStruppek/Plug-and-Play-Attacks/pull/14",
    tags=("convolution", "schedule"),
)
def smoothing_without_its_schedule(attach: Attach) -> None:
    """The labels are smoothed by a negative factor. A schedule that begins with plain labels exists, and is never
    called. The loss has no lower bound, and the network is pushed away from classes before it knows any: 89 % of the
    new pictures are right, and 97 % in the twin.
    """
    train_smoothed(attach, scheduled=False)


@case(source="the repaired twin of `smoothing_without_its_schedule`", tags=("convolution", "schedule", "twin"))
def smoothing_on_schedule(attach: Attach) -> None:
    """The factor is 0 for 5 epochs, and falls to -0.05 in 8 more."""
    assert train_smoothed(attach, scheduled=True) > 0.95


# ------------------------------------------------------------------------------------ copies that are never drawn


class PlateGenerator:
    """Pictures and labels, epoch after epoch, in random order."""

    def __init__(self, pictures: Tensor, labels: Tensor, *, batch: int, seed: int) -> None:
        self.pictures, self.labels, self.batch = pictures, labels, batch
        self.generator = torch.Generator().manual_seed(seed)
        self.count = len(pictures)
        self.order = torch.randperm(self.count, generator=self.generator)
        self.at = 0

    def augment(self, copies: int) -> None:
        """Append shifted and noisy copies of the pictures."""
        pictures, labels = self.pictures, self.labels
        for _ in range(copies):
            right, down = torch.randint(-1, 2, (2,), generator=self.generator).tolist()
            moved = pictures.roll((down, right), (2, 3))
            noise = 0.1 * torch.randn(moved.shape, generator=self.generator)
            self.pictures = torch.cat([self.pictures, moved + noise])
            self.labels = torch.cat([self.labels, labels])

    def recount(self) -> None:
        """Draw from all the pictures that there are now."""
        self.count = len(self.pictures)
        self.order = torch.randperm(self.count, generator=self.generator)
        self.at = 0

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Return the next pictures and labels."""
        if self.at + self.batch > self.count:
            self.order = torch.randperm(self.count, generator=self.generator)
            self.at = 0
        picked = self.order[self.at : self.at + self.batch]
        self.at += self.batch
        return self.pictures[picked], self.labels[picked]


def moved_digits(x: Tensor, seed: int) -> Tensor:
    """Return the pictures with noise, each moved by up to 1 pixel."""
    generator = torch.Generator().manual_seed(seed)
    right, down = torch.randint(-1, 2, (2, len(x)), generator=generator)
    moved = torch.stack([p.roll((int(d), int(r)), (1, 2)) for p, d, r in zip(x, down, right, strict=True)])
    return moved + 0.1 * torch.randn(x.shape, generator=generator)


def train_plates(attach: Attach, *, recounted: bool) -> float:
    """Return the accuracy on moved pictures."""
    torch.manual_seed(342)
    x, y, new_x, new_y = digits()
    new_x = moved_digits(new_x, seed=5)
    plates = PlateGenerator(x[:200], y[:200], batch=40, seed=6)
    plates.augment(copies=12)
    if recounted:
        plates.recount()
    model = nn.Sequential(convolutions(), nn.Linear(64, 10))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer, loss_fn=criterion)
    for step in range(300):
        pictures, labels = plates.next_batch()
        loss = criterion(model(pictures), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            model.eval()
            with torch.no_grad():
                val_loss = criterion(model(new_x), new_y).item()
            model.train()
            monitor.step(loss, batch=pictures, val_loss=val_loss)
        else:
            monitor.step(loss, batch=pictures)
    return share_right(model, new_x, new_y)


@case(
    fault="overfitting",
    onset=60,
    source="https://github.com/ria-com/nomeroff-net/pull/71",
    tags=("convolution", "data"),
)
def copies_never_drawn(attach: Attach) -> None:
    """Copies of 200 pictures, moved and noisy, are appended to the data. The count and the order from which batches are
    drawn are those of before, so that no copy is ever seen. The loss falls to 0; on moved pictures it stays above 1.3,
    and 57 % of them are read (89 % in the twin).
    """
    train_plates(attach, recounted=False)


@case(source="the repaired twin of `copies_never_drawn`", tags=("convolution", "data", "twin"))
def copies_that_are_drawn(attach: Attach) -> None:
    """The count and the order are made again after the copies."""
    assert train_plates(attach, recounted=True) > 0.8


# ------------------------------------------------------------------------------------ one recording too few


class Recordings:
    """Recordings of a camera that reports changes: the pixels that change while a picture moves by one pixel."""

    def __init__(self, pictures: Tensor, labels: Tensor) -> None:
        self.pictures, self.labels = pictures, labels

    def __len__(self) -> int:
        return len(self.pictures) - 1

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        picture = self.pictures[i]
        frames = torch.stack([picture.roll(shift, 2) for shift in range(4)])
        return (frames[1:] - frames[:-1]).sign().mean(0), self.labels[i]


def train_events(attach: Attach) -> tuple[int, int]:
    """Return the number of recordings, and of those that were seen."""
    torch.manual_seed(343)
    x, y, _, _ = digits()
    recordings = Recordings(x[:600], y[:600])
    model = nn.Sequential(convolutions(), nn.Linear(64, 10))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer, loss_fn=criterion)
    seen: set[int] = set()
    for i in draws(len(recordings), size=32, steps=300):
        seen.update(i.tolist())
        pictures, labels = (torch.stack(part) for part in zip(*(recordings[int(j)] for j in i), strict=True))
        loss = criterion(model(pictures), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=pictures)
    return len(recordings.pictures), len(seen)


@case(
    fault="loss-plateau",
    onset=0,
    source="https://github.com/neuromorphs/tonic/pull/69",
    tags=("convolution", "data"),
)
def one_recording_too_few(attach: Attach) -> None:
    """The length of the data set is one too small: 599 of 600 recordings are ever seen. The network learns. No kind
    fits; the loss that is left is that of one recording.
    """
    train_events(attach)


# ------------------------------------------------------------------------------------ features that are not left alone


class Matcher(nn.Module):
    """Find for each picture of one set the picture of the other set that shows the same thing."""

    def __init__(self, extractor: nn.Module) -> None:
        super().__init__()
        self.extractor = extractor
        self.attention = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.project = nn.Linear(64, 64)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        count = len(left)
        found = self.extractor(torch.cat([left, right]))
        found = self.project(self.attention(found[None])[0])
        return found[:count] @ found[count:].T / 8


def pretrain_extractor() -> tuple[nn.Sequential, nn.Linear]:
    """Return features that were learned from labels, and the layer that reads the labels."""
    x, y, _, _ = digits()
    extractor, head = convolutions(), nn.Linear(64, 10)
    optimizer = torch.optim.Adam([*extractor.parameters(), *head.parameters()], lr=2e-3)
    for i in draws(len(x), size=64, steps=200, seed=3):
        loss = F.cross_entropy(head(extractor(x[i])), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return extractor.eval(), head


def train_matcher(attach: Attach, *, only_matcher: bool) -> tuple[float, float]:
    """Return how many labels the pretrained layer still reads right, and the share of right matches."""
    torch.manual_seed(344)
    x, _, new_x, new_y = digits()
    extractor, head = pretrain_extractor()
    model = Matcher(extractor)
    matching = [*model.attention.parameters(), *model.project.parameters()]
    optimizer = torch.optim.Adam(matching if only_matcher else model.parameters(), lr=1e-3)
    extractor.requires_grad_(not only_matcher)
    monitor = attach(model, optimizer, loss_fn=F.cross_entropy)
    generator = torch.Generator().manual_seed(4)

    def pairs(pictures: Tensor) -> tuple[Tensor, Tensor]:
        noise = 0.1 * torch.randn(2, *pictures.shape, generator=generator)
        return pictures + noise[0], pictures + noise[1]

    for i in draws(len(x), size=16, steps=300):
        left, right = pairs(x[i])
        loss = F.cross_entropy(model(left, right), torch.arange(16))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=left)
    with torch.no_grad():
        labels = (head(extractor(new_x)).argmax(1) == new_y).float().mean().item()
        matches = [(model(*pairs(part)).argmax(1) == torch.arange(16)).float().mean() for part in new_x[:384].split(16)]
    return labels, torch.stack(matches).mean().item()


@case(
    fault="learning-rate-too-high",
    layers=("extractor",),
    onset=0,
    source="https://github.com/ucuapps/OpenGlue/pull/14",
    tags=("transformer", "pretrained"),
)
def extractor_in_the_optimizer(attach: Attach) -> None:
    """The features are pretrained and to be left alone, but the optimizer holds all the weights. The matches are
    learned, and the features change: 83 % of the labels can be read from them, and 99 % before. No kind fits; the
    nearest is a rate that is too high for the extractor.
    """
    train_matcher(attach, only_matcher=False)


@case(source="the repaired twin of `extractor_in_the_optimizer`", tags=("transformer", "pretrained", "twin"))
def extractor_left_alone(attach: Attach) -> None:
    """The optimizer holds the weights of the matcher only."""
    labels, matches = train_matcher(attach, only_matcher=True)
    assert labels > 0.95, labels
    assert matches > 0.7, matches
