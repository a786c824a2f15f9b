"""A classifier with train and test functions and argparse, as in many first scripts."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(8 * 3 * 3, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        x = F.relu(self.fc1(self.dropout(torch.flatten(x, 1))))
        return F.log_softmax(self.fc2(x), dim=1)


def train(args, model, loader, optimizer, monitor, losses):
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=data)
        losses.append(loss.item())


def test(model, loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for data, target in loader:
            correct += model(data).argmax(1).eq(target).sum().item()
    return correct


def main(watch, argv=()):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    args = parser.parse_args(argv)
    torch.manual_seed(1)
    images, labels = torch.rand(512, 1, 8, 8), torch.randint(10, (512,))
    images[torch.arange(512), 0, 0, labels % 8] += 2
    train_set, test_set = TensorDataset(images[:448], labels[:448]), TensorDataset(images[448:], labels[448:])
    loader, test_loader = DataLoader(train_set, 16, shuffle=True), DataLoader(test_set, 64)
    model = Net()
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    losses = []
    with watch(model, optimizer) as monitor:
        for _ in range(args.epochs):
            train(args, model, loader, optimizer, monitor, losses)
            losses.append(float(test(model, test_loader)))
            scheduler.step()
    return losses
