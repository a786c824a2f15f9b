"""The upkeep of a run: a scheduler that is off, and outputs that are kept for the end of the epoch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------ a scheduler that is off


def motions(count: int, seed: int) -> Tensor:
    """Return the courses of 6 markers of an animal that moves in one of several gaits, (N, 24, 6)."""
    generator = torch.Generator().manual_seed(seed)
    gait = torch.randint(0, 3, (count, 1, 1), generator=generator)
    phase = 6.28 * torch.rand(count, 1, 1, generator=generator)
    pace = 0.4 + 0.3 * gait + 0.1 * torch.rand(count, 1, 1, generator=generator)
    marker = torch.arange(6.0)
    course = torch.sin(pace * torch.arange(24.0)[:, None] + phase + marker * (0.5 + 0.4 * gait))
    return course * (1 + 0.2 * gait) + 0.05 * torch.randn(count, 24, 6, generator=generator)


class MotionVAE(nn.Module):
    """A recurrent variational autoencoder."""

    def __init__(self, width: int = 48, latents: int = 8) -> None:
        super().__init__()
        self.encoder = nn.GRU(6, width, batch_first=True, bidirectional=True)
        self.mean, self.log_var = nn.Linear(2 * width, latents), nn.Linear(2 * width, latents)
        self.expand = nn.Linear(latents, width)
        self.decoder = nn.GRU(latents, width, batch_first=True)
        self.out = nn.Linear(width, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.cat(list(self.encoder(x)[1]), 1)
        mean, log_var = self.mean(hidden), self.log_var(hidden)
        latent = mean + torch.randn_like(mean) * (log_var / 2).exp()
        start = torch.tanh(self.expand(latent))[None]
        return self.out(self.decoder(latent[:, None].expand(-1, x.shape[1], -1), start)[0]), mean, log_var


@case(
    fault="learning-rate-too-low",
    also=("not-optimized", "loss-plateau"),
    onset=200,
    source="https://github.com/LINCellularNeuroscience/VAME/issues/26",
    tags=("vae", "rate", "series"),
)
def scheduler_turned_off(attach: Attach) -> None:
    """The schedule of a recurrent autoencoder is turned off by a factor of 0 instead of 1. The learning rate is 0 after
    100 epochs of two steps. The error of new courses is 0.28, and 0.03 with a factor of 1.
    """
    torch.manual_seed(561)
    use_scheduler = False
    x = motions(128, seed=1)
    model = MotionVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100, gamma=0.5 if use_scheduler else 0)
    monitor = attach(model, optimizer)
    for epoch in range(200):
        for i in torch.randperm(len(x)).split(64):
            made, mean, log_var = model(x[i])
            divergence = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1).mean()
            loss = F.mse_loss(made, x[i]) + min(epoch / 50, 1) * 1e-3 * divergence
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5)
            optimizer.step()
            monitor.step(loss, batch=x[i])
        scheduler.step()


# ------------------------------------------------------------------------------------ outputs that are kept


def pairs(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return left and right pictures (N, 1, 16, 24) of a textured wall whose distance changes from left to right."""
    generator = torch.Generator().manual_seed(seed)
    texture = F.avg_pool2d(torch.rand(count, 1, 18, 34, generator=generator), 3, stride=1)
    texture = (texture - 0.5) * 4
    shift = 1 + 2.9 * torch.rand(count, 1, 1, generator=generator)
    left, right = texture[:, :, :, 4:28], []
    for moved, picture in zip(shift.flatten(), texture, strict=True):
        whole, rest = int(moved), moved - int(moved)
        near, far = picture[:, :, 4 - whole : 28 - whole], picture[:, :, 3 - whole : 27 - whole]
        right.append((1 - rest) * near + rest * far)
    return left, torch.stack(right)


class DepthNet(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(2, width, 5, padding=2),
            nn.ELU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.ELU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.ELU(),
        )
        self.out = nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the disparity, 0 to 6 pixels."""
        return 6 * F.interpolate(self.out(self.down(torch.cat([left, right], 1))), scale_factor=2).sigmoid()


def warp(picture: Tensor, disparity: Tensor) -> Tensor:
    """Move pixels to the left by their disparity."""
    rows, columns = torch.meshgrid(torch.linspace(-1, 1, 16), torch.linspace(-1, 1, 24), indexing="ij")
    grid = torch.stack([columns + disparity[:, 0] * 2 / 23, rows.expand_as(disparity[:, 0])], 3)
    return F.grid_sample(picture, grid, align_corners=True, padding_mode="border")


@case(
    fault="graph-leak",
    also=("memory-growth",),
    onset=1,
    source="https://github.com/TRI-ML/packnet-sfm/issues/47",
    tags=("depth", "memory"),
)
def losses_kept_for_the_epoch(attach: Attach) -> None:
    """A network learns depth from pairs of pictures. The output of each step is kept for the mean of the epoch, with
    the loss in it, so that the graphs of 100 steps stay in memory. It learns as well as with detached losses.
    """
    torch.manual_seed(562)
    left, right = pairs(1600, seed=3)
    model = DepthNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = attach(model, optimizer, loss_fn=F.l1_loss)
    for _ in range(2):
        outputs = []
        for i in torch.randperm(len(left)).split(16):
            loss = F.l1_loss(warp(right[i], model(left[i], right[i])), left[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            outputs.append((loss, len(i)))
            monitor.step(loss, batch=left[i])
        mean = sum(loss.item() * size for loss, size in outputs) / len(left)
    assert mean < 0.15, mean
