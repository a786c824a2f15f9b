"""An upscaling network, initialized by a function of torch and tested without no_grad."""

import torch
from torch import nn, optim
from torch.nn import init


class Net(nn.Module):
    def __init__(self, upscale_factor):
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(1, 8, (5, 5), (1, 1), (2, 2))
        self.conv2 = nn.Conv2d(8, upscale_factor**2, (3, 3), (1, 1), (1, 1))
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)
        init.orthogonal_(self.conv1.weight, init.calculate_gain("relu"))
        init.orthogonal_(self.conv2.weight)

    def forward(self, x):
        return self.pixel_shuffle(self.conv2(self.relu(self.conv1(x))))


def main(watch):
    torch.manual_seed(123)
    targets = nn.functional.interpolate(torch.rand(160, 1, 4, 4), size=(12, 12), mode="bicubic")
    inputs = nn.functional.interpolate(targets, size=(6, 6))
    model = Net(2)
    criterion = nn.MSELoss()
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    with watch(model, optimizer) as monitor:
        for _ in range(4):
            for input, target in zip(inputs[:144].split(16), targets[:144].split(16), strict=True):
                optimizer.zero_grad()
                loss = criterion(model(input), target)
                losses.append(loss.item())
                loss.backward()
                optimizer.step()
                monitor.step(loss, batch=input)
            losses.append(criterion(model(inputs[144:]), targets[144:]).item())
    return losses
