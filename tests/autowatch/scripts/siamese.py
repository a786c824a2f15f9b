"""One network for both images of a pair."""

import torch
from torch import nn, optim


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 16))
        self.fc = nn.Sequential(nn.Linear(32, 16), nn.ReLU(inplace=True), nn.Linear(16, 1))
        self.sigmoid = nn.Sigmoid()

    def forward(self, input1, input2):
        output = torch.cat((self.backbone(input1), self.backbone(input2)), 1)
        return self.sigmoid(self.fc(output))


def main(watch):
    torch.manual_seed(7)
    model = SiameseNetwork()
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    criterion = nn.BCELoss()
    losses = []
    with watch(model, optimizer) as monitor:
        for _ in range(30):
            targets = torch.randint(2, (16,)).float()
            first = torch.rand(16, 1, 8, 8)
            second = torch.where(targets.view(-1, 1, 1, 1) > 0, first, torch.rand(16, 1, 8, 8))
            optimizer.zero_grad()
            outputs = model(first, second).squeeze()
            loss = criterion(outputs, targets)
            loss.backward()
            optimizer.step()
            monitor.step(loss, batch=[first, second])
            losses.append(loss.item())
    return losses
