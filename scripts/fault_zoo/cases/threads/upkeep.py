"""The loop around the network: figures that stay open, an optimizer of copies, and a warm-up that starts warm."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import cells, draws, excerpts, letters
from scripts.fault_zoo.cases.threads.masks import UNet, overlap
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------ figures that stay open

Canvas = npt.NDArray[np.uint8]


class Plots:
    """A stand-in for `matplotlib.pyplot`, which keeps each figure until it is closed."""

    def __init__(self) -> None:
        self.open: list[Canvas] = []

    def figure(self) -> None:
        """Open a figure of 640 x 480 pixels."""
        self.open.append(np.full((480, 640, 4), 255, np.uint8))

    def imshow(self, picture: Canvas) -> None:
        """Draw a picture into the figure, enlarged."""
        enlarged = picture.repeat(30, 0).repeat(30, 1)
        self.open[-1][: enlarged.shape[0], : enlarged.shape[1], :3] = enlarged[:480, :640, None]


def draw_mask_on_image(plots: Plots, picture: Tensor, mask: Tensor) -> None:
    """Show a picture and the mask that was found."""
    plots.figure()
    plots.imshow((255 * (0.5 * picture + 0.5 * (mask > 0)).clamp(0, 1)).numpy().astype(np.uint8))


def tune_masks(attach: Attach) -> float:
    """Return the intersection over union on new pictures."""
    torch.manual_seed(301)
    plots = Plots()
    x, masks = cells(480, seed=8)
    model = UNet(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.BCEWithLogitsLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for i in draws(len(x), size=12, steps=300):
        found = model(x[i])
        loss = criterion(found, masks[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        draw_mask_on_image(plots, x[i][0, 0], found.detach()[0, 0])
        monitor.step(loss, batch=x[i])
    model.eval()
    pictures, wanted = cells(200, seed=9)
    with torch.no_grad():
        return overlap(model(pictures) > 0, wanted > 0)


@case(
    fault="memory-growth",
    onset=0,
    source="https://github.com/luluricketts/SAM-finetune/issues/4",
    tags=("segmentation", "memory"),
)
def figures_left_open(attach: Attach) -> None:
    """A mask is drawn in each step, and its figure is never closed: 1.2 MB stay in memory each time."""
    tune_masks(attach)


# ------------------------------------------------------------------------------------ an optimizer of copies


class LetterModel(nn.Module):
    """A causal transformer over letters, with norms before the blocks or after."""

    def __init__(self, alphabet: int, *, layers: int, norm_first: bool, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(alphabet, width)
        self.position = nn.Parameter(0.02 * torch.randn(48, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=norm_first)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, alphabet)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        hidden = self.embedding(ids) + self.position[: ids.shape[1]]
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)

    def loss(self, text: Tensor) -> Tensor:
        """Return the loss of the next letter."""
        return F.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


class TrainingModule:
    """Run a model on a device: a loss and the gradients in one call, and the weights by name."""

    def __init__(self, model: LetterModel) -> None:
        self.model = model

    def forward_backward(self, text: Tensor) -> Tensor:
        """Return the loss of a text. Its gradients can be read by `named_gradients`."""
        self.model.zero_grad()
        loss = self.model.loss(text)
        loss.backward()
        return loss

    def named_parameters(self) -> dict[str, Tensor]:
        """Return the weights."""
        return {name: p.detach().clone().requires_grad_() for name, p in self.model.named_parameters()}

    def named_gradients(self) -> dict[str, Tensor | None]:
        """Return the gradients of the last loss."""
        return {name: p.grad for name, p in self.model.named_parameters()}


def tune_letters(attach: Attach) -> tuple[float, float]:
    """Return the mean loss of the first 20 and of the last 20 steps."""
    torch.manual_seed(302)
    ids, alphabet = letters()
    generator = torch.Generator().manual_seed(1)
    model = LetterModel(alphabet, layers=2, norm_first=True)
    module = TrainingModule(model)
    weights = module.named_parameters()
    optimizer = torch.optim.SGD(weights.values(), lr=0.1)
    monitor = attach(model, optimizer)
    losses = []
    for _ in range(150):
        text = excerpts(ids, length=33, count=16, generator=generator)
        loss = module.forward_backward(text)
        for name, gradient in module.named_gradients().items():
            weights[name].grad = gradient
        optimizer.step()
        monitor.step(loss, batch=text)
        losses.append(loss.item())
    return sum(losses[:20]) / 20, sum(losses[-20:]) / 20


@case(
    fault="not-optimized",
    also=("loss-plateau",),
    onset=0,
    source="https://github.com/pytorch/executorch/pull/6039",
    tags=("transformer", "optimizer"),
)
def optimizer_of_copies(attach: Attach) -> None:
    """The runtime hands out clones of its weights. The optimizer updates the clones, and the model stays as it is: the
    loss is 4.89 at the start and 4.90 at the end.
    """
    tune_letters(attach)


# ------------------------------------------------------------------------------------ a warm-up that starts warm


class GradualWarmup:
    """Raise the rate from the base rate to `multiplier` times the base rate, or from 0 if the multiplier is 1."""

    def __init__(self, optimizer: torch.optim.Optimizer, multiplier: float, total: int) -> None:
        self.optimizer, self.multiplier, self.total = optimizer, multiplier, total
        self.base = [group["lr"] for group in optimizer.param_groups]
        self.after = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=60)
        self.last = 0

    def step_reduce_on_plateau(self, metric: float) -> None:
        """Set the rate of the next step."""
        self.last += 1
        if self.last > self.total:
            self.after.step(metric)
            return
        rates = [base * ((self.multiplier - 1.0) * self.last / self.total + 1.0) for base in self.base]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def train_warm(attach: Attach) -> float:
    """Return the mean loss of the last 20 steps."""
    torch.manual_seed(303)
    ids, alphabet = letters()
    generator = torch.Generator().manual_seed(2)
    model = LetterModel(alphabet, layers=6, norm_first=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = GradualWarmup(optimizer, multiplier=1.0, total=100)
    monitor = attach(model, optimizer)
    losses = []
    for _ in range(300):
        text = excerpts(ids, length=33, count=16, generator=generator)
        loss = model.loss(text)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step_reduce_on_plateau(loss.item())
        monitor.step(loss, batch=text)
        losses.append(loss.item())
    return sum(losses[-20:]) / 20


@case(
    fault="learning-rate-too-high",
    also=("loss-plateau", "vanishing-gradient", "exploding-gradient"),
    tolerate=("gradient-spike", "oscillating-gradient", "dead-layer", "dead-relu"),
    onset=0,
    source="https://github.com/ildoonet/pytorch-gradual-warmup-lr/issues/19",
    tags=("transformer", "warm-up"),
)
def warm_up_that_starts_warm(attach: Attach) -> None:
    """The schedule computes the warm-up by another formula if the rate falls on a plateau later. With a multiplier of 1
    that formula gives the full rate of 0.01 from the first step. The loss stays at 3.2; at 0.003 it falls to 2.3.
    """
    train_warm(attach)
