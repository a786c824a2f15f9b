"""A generator and a discriminator that train in turn."""

import torch
from torch import nn, optim

nz, ngf, niter = 8, 8, 24


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf, 4, bias=False),
            nn.BatchNorm2d(ngf),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, input):
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, ngf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ngf, 1, 4, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, input):
        return self.main(input).view(-1)


def weights_init(m):
    if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(m.weight, 0.0, 0.02)


def main(watch):
    torch.manual_seed(3)
    netG, netD = Generator(), Discriminator()
    netG.apply(weights_init)
    netD.apply(weights_init)
    criterion = nn.BCELoss()
    optimizerD = optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizerG = optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
    losses = []
    with watch({"netD": netD, "netG": netG}, [optimizerD, optimizerG]) as monitor:
        for _ in range(niter):
            real = torch.rand(16, 1, 8, 8).round()
            netD.zero_grad()
            label = torch.ones(16)
            errD_real = criterion(netD(real), label)
            errD_real.backward()
            noise = torch.randn(16, nz, 1, 1)
            fake = netG(noise)
            errD_fake = criterion(netD(fake.detach()), label * 0)
            errD_fake.backward()
            optimizerD.step()
            netG.zero_grad()
            errG = criterion(netD(fake), label)
            errG.backward()
            optimizerG.step()
            monitor.step(errD_real + errD_fake + errG, batch=[real, noise])
            losses += [errD_real.item() + errD_fake.item(), errG.item()]
    return losses
