"""Pictures in runs that look odd: dropout, a frozen first block, a sum over all pixels, and batches of two."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import digits, draws, mean_of_last
from scripts.fault_zoo.cases.threads.pictures import convnet
from scripts.fault_zoo.protocol import Attach, case


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


@case(source="https://github.com/Bjarten/early-stopping-pytorch/issues/18", tags=("cnn", "dropout", "odd"))
def validation_below_training(attach: Attach) -> None:
    """The loss on the pictures for validation is below that of training in every epoch. The answer was that this is
    normal: dropout and augmentation make training harder, and neither is on in the validation.
    """
    torch.manual_seed(231)
    x, y, x_val, y_val = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1),
        nn.ReLU(),
        nn.Dropout2d(0.2),
        nn.Conv2d(24, 48, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(768, 64),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(64, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    losses, gaps = [], []
    for step, i in enumerate(draws(len(x), size=35, steps=800)):
        model.train()
        picture = x[i].roll(torch.randint(-1, 2, (2,)).tolist(), (2, 3)) + 0.1 * torch.randn(len(i), 1, 8, 8)
        loss = criterion(model(picture), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        val_loss = None
        if step % 80 == 79:
            model.eval()
            with torch.no_grad():
                val_loss = criterion(model(x_val), y_val).item()
            gaps.append(mean_of_last(losses, 80) - val_loss)
        monitor.step(loss, batch=picture, val_loss=val_loss)
    assert min(gaps) > 0, gaps
    assert accuracy(model, x_val, y_val) > 0.93


@case(source="https://github.com/FangyunWei/SLRT/issues/74", tags=("cnn", "finetune", "frozen", "odd"))
def first_block_without_gradient(attach: Attach) -> None:
    """The gradient of the first block is None after every backward pass. The answer was that this is so on purpose: the
    first block of the pretrained network is frozen to save memory. The network was trained on the digits below 5 and
    learns the others.
    """
    torch.manual_seed(232)
    x, y, x_test, y_test = digits()
    model = convnet(5)
    first = torch.optim.Adam(model.parameters(), lr=2e-3)
    known = (y < 5).nonzero().squeeze(1)
    for i in draws(len(known), size=32, steps=200, seed=1):
        loss = F.cross_entropy(model(x[known[i]]), y[known[i]])
        first.zero_grad()
        loss.backward()
        first.step()
    model.zero_grad()
    model[0].requires_grad_(False)
    model[9] = nn.Linear(64, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    new = (y >= 5).nonzero().squeeze(1)
    for i in draws(len(new), size=32, steps=250):
        loss = criterion(model(x[new[i]]), y[new[i]] - 5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[new[i]])
    large = y_test >= 5
    assert accuracy(model, x_test[large], y_test[large] - 5) > 0.95


class DenseBlock(nn.Module):
    def __init__(self, inputs: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(inputs + growth * layer, growth, 3, padding=1) for layer in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, F.relu(layer(x))], 1)
        return x


@case(source="https://github.com/twtygqyy/pytorch-SRDenseNet/issues/4", tags=("super-resolution", "sum", "odd"))
def squares_summed_over_all_pixels(attach: Attach) -> None:
    """A dense network turns pictures of 4 x 4 pixels into 8 x 8. The squared errors are summed over all pixels of the
    batch, in shades of 0 to 255, so that the loss begins with tens of millions. The answer was that this is normal.
    """
    torch.manual_seed(233)
    x, _, x_test, _ = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        DenseBlock(16, 8, 4),
        nn.Conv2d(48, 4, 3, padding=1),
        nn.PixelShuffle(2),
    )
    criterion = nn.MSELoss(reduction="sum")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = attach(model, optimizer, loss_fn=criterion)
    losses = []
    for i in draws(len(x), size=32, steps=300):
        sharp = 255 * x[i]
        small = F.avg_pool2d(sharp, 2)
        loss = criterion(model(small), sharp)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=small)
        losses.append(loss.item())
    sharp = 255 * x_test
    with torch.no_grad():
        error = F.mse_loss(model(F.avg_pool2d(sharp, 2)), sharp).item()
    blurred = F.interpolate(F.avg_pool2d(sharp, 2), scale_factor=2, mode="bilinear")
    assert losses[0] > 1e7, losses[0]
    assert error < 0.7 * F.mse_loss(blurred, sharp).item(), error


@case(source="https://github.com/vitoralbiero/img2pose/issues/46", tags=("pose", "small-batch", "odd"))
def poses_in_batches_of_two(attach: Attach) -> None:
    """A network finds the place and the turn of a bar, two pictures at a time. The curve of the loss is full of spikes.
    The answer was that this is normal for so small a batch, as long as the loss trends down.
    """
    torch.manual_seed(234)
    row, column = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")

    def bars(count: int) -> tuple[Tensor, Tensor]:
        place = 5 + 6 * torch.rand(count, 2)
        turn = 3.14159 * torch.rand(count)
        across = (row - place[:, :1, None]) * turn.cos()[:, None, None]
        across = across - (column - place[:, 1:, None]) * turn.sin()[:, None, None]
        along = (row - place[:, :1, None]) * turn.sin()[:, None, None]
        along = along + (column - place[:, 1:, None]) * turn.cos()[:, None, None]
        picture = ((across.abs() < 1.2) & (along.abs() < 5)).float() + 0.1 * torch.randn(count, 16, 16)
        pose = torch.cat([(place - 8) / 3, torch.stack([(2 * turn).cos(), (2 * turn).sin()], 1)], 1)
        return picture[:, None], pose

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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    criterion = nn.MSELoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for _ in range(900):
        picture, pose = bars(2)
        loss = criterion(model(picture), pose)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=picture)
    picture, pose = bars(300)
    with torch.no_grad():
        assert criterion(model(picture), pose) < 0.25 * pose.var()
