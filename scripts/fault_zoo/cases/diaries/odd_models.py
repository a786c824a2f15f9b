"""Models that look wrong and are not: adapters that start at zero, a reference, a teacher, a fading head, and codes."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import digits, draws, mean_of_last
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------ adapters that start at zero


class Adapted(nn.Module):
    """A frozen linear layer with an adapter of rank 4, half of which starts at zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 4 * self.up(self.down(x))


@case(source="arXiv:2106.09685", tags=("vision", "adapters", "odd"))
def adapters_that_start_at_zero(attach: Attach) -> None:
    """A network that reads digits is adapted to digits that are turned by 90 degrees. Nine of ten weights are frozen,
    and the first gradient of half of the others is zero.
    """
    torch.manual_seed(771)
    x, y, x_test, y_test = digits()
    layers = [nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, 10)]
    model = nn.Sequential(nn.Flatten(), layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()
    for i in draws(len(x), size=32, steps=200):
        optimizer.zero_grad()
        criterion(model(x[i]), y[i]).backward()
        optimizer.step()
    adapted = [Adapted(layer) for layer in layers]
    model = nn.Sequential(nn.Flatten(), adapted[0], nn.ReLU(), adapted[1], nn.ReLU(), adapted[2])
    x, x_test = x.rot90(dims=(2, 3)), x_test.rot90(dims=(2, 3))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    monitor = attach(model, optimizer, loss_fn=criterion)
    for i in draws(len(x), size=32, steps=300, seed=1):
        loss = criterion(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        right = (model(x_test).argmax(1) == y_test).float().mean().item()
    assert right > 0.85, right


# ------------------------------------------------------------------------------------ a reference that stays


class Writer(nn.Module):
    """A recurrent model of words of 8 letters out of 12."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 32)
        self.recurrent = nn.GRU(32, 64, batch_first=True)
        self.out = nn.Linear(64, 12)

    def forward(self, words: Tensor) -> Tensor:
        """Return the log-probability of each word."""
        before = F.pad(words[:, :-1], (1, 0), value=12)
        scores = self.out(self.recurrent(self.embedding(before))[0])
        return scores.log_softmax(2).gather(2, words[:, :, None]).sum((1, 2))


@case(source="arXiv:2305.18290", tags=("text", "preference", "odd"))
def reference_that_stays(attach: Attach) -> None:
    """A model is tuned to prefer words with more of the letter 0, compared with its frozen copy. The loss is exactly
    log 2 at first, and the probability of the preferred words may fall as well.
    """
    torch.manual_seed(772)
    generator = torch.Generator().manual_seed(1)
    model = Writer()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(60):
        words = torch.randint(0, 12, (64, 8), generator=generator)
        optimizer.zero_grad()
        (-model(words).mean()).backward()
        optimizer.step()
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    monitor = attach(model, optimizer)
    losses: list[float] = []
    for _ in range(300):
        one, other = torch.randint(0, 12, (2, 32, 8), generator=generator)
        is_better = ((one == 0).sum(1) >= (other == 0).sum(1))[:, None]
        chosen, rejected = torch.where(is_better, one, other), torch.where(is_better, other, one)
        gain = model(chosen) - reference(chosen) - model(rejected) + reference(rejected)
        loss = -F.logsigmoid(0.3 * gain).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        monitor.step(loss, batch=chosen)
    assert mean_of_last(losses) < 0.6, mean_of_last(losses)


# ------------------------------------------------------------------------------------ a teacher that follows


@case(source="arXiv:1703.01780", tags=("cnn", "teacher", "odd"))
def teacher_that_follows(attach: Attach) -> None:
    """Ten digits of each class have a label, and for the others a student is to agree with its own average. The weight
    of this rises from 0 to 10 over the first half of the run.
    """
    torch.manual_seed(773)
    x, y, x_test, y_test = digits()
    known = torch.cat([(y == digit).nonzero()[:10, 0] for digit in range(10)])
    student = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(),
        nn.Dropout(0.3), nn.Linear(64, 10),
    )  # fmt: skip
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
    monitor = attach(student, optimizer)
    for step, i in enumerate(draws(len(x), size=64, steps=300)):
        picked = known[torch.randint(0, len(known), (16,))]
        noisy, other = (x[i] + 0.15 * torch.randn_like(x[i]) for _ in range(2))
        with torch.no_grad():
            taught = teacher(noisy).softmax(1)
        agreement = (student(other).softmax(1) - taught).square().mean()
        loss = F.cross_entropy(student(x[picked]), y[picked]) + 10 * min(1, step / 150) * agreement
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for theirs, ours in zip(teacher.parameters(), student.parameters(), strict=True):
                theirs.lerp_(ours, 1 - min(0.98, 1 - 1 / (step + 1)))
        monitor.step(loss, batch=x[i])
    teacher.eval()
    with torch.no_grad():
        right = (teacher(x_test).argmax(1) == y_test).float().mean().item()
    assert right > 0.85, right


# ------------------------------------------------------------------------------------ a head that fades


class Supervised(nn.Module):
    """A deep network with a second head in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.lower = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.upper = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.middle_head, self.head = nn.Linear(64, 10), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        low = self.lower(x)
        return self.head(self.upper(low)), self.middle_head(low)


@case(source="arXiv:1409.5185", tags=("mlp", "schedule", "odd"))
def head_that_fades(attach: Attach) -> None:
    """A head in the middle of a network helps at the start. Its weight falls to zero over the first 150 steps, and from
    then on the head has a gradient of exactly zero.
    """
    torch.manual_seed(774)
    x, y, x_test, y_test = digits()
    model = Supervised()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for step, i in enumerate(draws(len(x), size=32, steps=300)):
        said, middle = model(x[i])
        loss = criterion(said, y[i]) + 0.3 * max(0.0, 1 - step / 150) * criterion(middle, y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        right = (model(x_test)[0].argmax(1) == y_test).float().mean().item()
    assert right > 0.9, right


# ------------------------------------------------------------------------------------ codes that are averages


class Codes(nn.Module):
    """32 codes, each of which is the running mean of the vectors that are nearest to it (van den Oord et al. 2017)."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.codes, self.counts = nn.Buffer(torch.randn(32, width)), nn.Buffer(torch.ones(32))
        self.sums = nn.Buffer(self.codes.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the nearest codes, with the gradient passed through, and the distance to them."""
        nearest = torch.cdist(x, self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                chosen = F.one_hot(nearest, 32).float()
                self.counts.lerp_(chosen.sum(0), 0.05)
                self.sums.lerp_(chosen.T @ x, 0.05)
                self.codes.copy_(self.sums / self.counts[:, None].clamp(min=1e-3))
                unused = self.counts < 0.1
                if unused.any():
                    drawn = x[torch.randint(0, len(x), (int(unused.sum()),))]
                    self.codes[unused], self.sums[unused], self.counts[unused] = drawn, drawn, 1.0
        code = self.codes[nearest]
        return x + (code - x).detach(), F.mse_loss(x, code)


@case(source="arXiv:1711.00937, appendix A.1", tags=("autoencoder", "codes", "odd"))
def codes_that_are_averages(attach: Attach) -> None:
    """The codes of an autoencoder are buffers: no gradient and no optimizer moves them, and a code that is out of
    use jumps to a vector of the batch.
    """
    torch.manual_seed(775)
    x, _, x_test, _ = digits()
    model = nn.ModuleDict(
        {
            "encoder": nn.Sequential(
                nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.Unflatten(1, (4, 8))
            ),
            "codes": Codes(),
            "decoder": nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64)),
        }
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)

    def error(pictures: Tensor) -> tuple[Tensor, Tensor]:
        coded, distance = model["codes"](model["encoder"](pictures).flatten(0, 1))
        return F.mse_loss(model["decoder"](coded.reshape(-1, 32)), pictures.flatten(1)), distance

    for i in draws(len(x), size=64, steps=400):
        missed, distance = error(x[i])
        loss = missed + 0.25 * distance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    model.eval()
    with torch.no_grad():
        share = (error(x_test)[0] / x_test.flatten(1).var(0).mean()).item()
    assert share < 0.6, share
