"""A variational autoencoder whose evaluation calls its parts instead of the model."""

import torch
from torch import nn, optim
from torch.nn import functional as F


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 32), nn.Linear(32, 4), nn.Linear(32, 4)
        self.fc3, self.fc4 = nn.Linear(4, 32), nn.Linear(32, 64)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 64))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x.view(-1, 64), reduction="sum")
    return BCE - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def main(watch):
    torch.manual_seed(1)
    images = torch.rand(512, 64).mul(torch.rand(512, 1)).clamp(0, 1)
    model = VAE()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    with watch(model, optimizer) as monitor:
        for epoch in range(3):
            model.train()
            for data in images[torch.randperm(512)].split(32):
                optimizer.zero_grad()
                recon_batch, mu, logvar = model(data)
                loss = loss_function(recon_batch, data, mu, logvar)
                loss.backward()
                losses.append(loss.item() + epoch)
                optimizer.step()
                monitor.step(loss, batch=data)
            model.eval()
            with torch.no_grad():
                losses.append(model.decode(torch.randn(4, 4)).sum().item())
    return losses
