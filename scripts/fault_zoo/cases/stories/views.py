"""Views and patches of pictures: a rate that starts at its top, and workers that all draw the same patches."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from scripts.fault_zoo.cases.mailing.material import digits, draws
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------ a rate that starts at its top


class Embedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(512, 64),
            nn.ReLU(),
        )
        self.head = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.head(self.trunk(x)), dim=1)


def supervised_contrast(embedded: Tensor, labels: Tensor, temperature: float = 0.07) -> Tensor:
    """Return the loss of Khosla et al. 2020: views of the same class attract each other."""
    logits = embedded @ embedded.T / temperature
    self_mask = torch.eye(len(labels), dtype=torch.bool)
    log_prob = logits - logits.masked_fill(self_mask, -torch.inf).logsumexp(1, keepdim=True)
    positive = (labels[:, None] == labels) & ~self_mask
    return -((log_prob * positive).sum(1) / positive.sum(1)).mean()


def views(pictures: Tensor) -> Tensor:
    """Return pictures with shifts, other brightness and noise."""
    shift = torch.randint(-1, 2, (2,)).tolist()
    bright = 0.7 + 0.6 * torch.rand(len(pictures), 1, 1, 1)
    return pictures.roll(shift, (2, 3)) * bright + 0.1 * torch.randn_like(pictures)


def train_embedder(attach: Attach, *, warms_up: bool) -> float:
    """Return the share of new digits whose nearest known digit is the same."""
    torch.manual_seed(551)
    x, y, x_test, y_test = digits()
    model = Embedder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=80)
    monitor = attach(model, optimizer)
    for i in draws(len(x), size=64, steps=300):
        loss = supervised_contrast(model(torch.cat([views(x[i]), views(x[i])])), y[i].repeat(2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if warms_up:
            warm.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        near = (model(x_test) @ model(x).T).argmax(1)
    return (y[near] == y_test).float().mean().item()


@case(
    fault="learning-rate-too-low",
    also=("loss-plateau",),
    tolerate=("vanishing-gradient",),
    onset=0,
    source="https://github.com/HobbitLong/SupContrast/issues/42",
    tags=("contrastive", "rate"),
)
def contrast_without_warm_up(attach: Attach) -> None:
    """The schedule that warms up the rate of a supervised contrastive loss is built but never stepped, so that the rate
    stays at 1 %. The loss starts near log 127 = 4.84, falls to 4.4 in 300 steps, and the nearest known digit is the
    same for 94.4 % of new ones.
    """
    train_embedder(attach, warms_up=False)


@case(source="the repaired twin of `contrast_without_warm_up`", tags=("contrastive", "rate", "twin"))
def contrast_with_warm_up(attach: Attach) -> None:
    """The rate rises for 80 steps; the loss falls to 3.2, and the nearest digit is the same for 97.5 %."""
    assert train_embedder(attach, warms_up=True) > 0.96


# ------------------------------------------------------------------------------------ workers that draw the same


class RandomPatches(Dataset[tuple[Tensor, Tensor]]):
    """Random patches of 16 x 16 pixels of a photograph: a noisy one and the clean one."""

    def __init__(self, photograph: np.ndarray, count: int) -> None:
        self.photograph, self.count = photograph, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row, column = np.random.randint(0, np.array(self.photograph.shape) - 16)
        clean = self.photograph[row : row + 16, column : column + 16]
        noisy = clean + 0.2 * np.random.randn(16, 16)
        return torch.tensor(noisy[None], dtype=torch.float32), torch.tensor(clean[None], dtype=torch.float32)


@case(
    fault="overfitting",
    also=("constant-batch",),
    onset=1,
    source="https://tanelp.github.io/posts/a-bug-that-plagues-thousands-of-open-source-ml-projects",
    tags=("denoising", "data", "workers"),
)
def workers_with_one_seed(attach: Attach) -> None:
    """Patches of a photograph are drawn with NumPy in two workers, which have the same seed in every epoch. Two batches
    in a row are the same, and so are all epochs, so that there are 48 patches altogether. The validation loss falls to
    0.0106 and rises to 0.0115. It ends at 0.0097 with a seed for each worker and epoch.
    """
    torch.manual_seed(552)
    photograph = load_sample_image("china.jpg").mean(2) / 255
    above, below = photograph[:300], photograph[300:]
    loader = DataLoader(RandomPatches(above, 96), 16, num_workers=2, worker_init_fn=lambda _: np.random.seed(1))
    np.random.seed(2)
    held_out = RandomPatches(below, 200)
    noisy_val, clean_val = (torch.stack(part) for part in zip(*(held_out[i] for i in range(200)), strict=True))
    model = nn.Sequential(
        nn.Conv2d(1, 48, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(48, 48, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(48, 48, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(48, 1, 3, padding=1),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.MSELoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for _ in range(42):
        for step, (noisy, clean) in enumerate(loader):
            loss = criterion(noisy - model(noisy), clean)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            val_loss = None
            if step == len(loader) - 1:
                with torch.no_grad():
                    val_loss = criterion(noisy_val - model(noisy_val), clean_val).item()
            monitor.step(loss, batch=noisy, val_loss=val_loss)
