"""How gradients flow: too large, too small, stuck, bouncing, spiking."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.faulty_data import batches, digits, houses, series, setup, standardize, table
from scripts.fault_zoo.protocol import Attach, case

# ---------------------------------------------------------------------------------------------- exploding-gradient


class ResidualUnit(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, width)
        self.fc2 = nn.Linear(width, width)
        for fc in (self.fc1, self.fc2):
            nn.init.kaiming_normal_(fc.weight, nonlinearity="relu")
            nn.init.zeros_(fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(torch.relu(self.fc1(x)))


class TabularResNet(nn.Module):
    def __init__(self, dim: int, width: int = 64, depth: int = 16) -> None:
        super().__init__()
        self.inp = nn.Linear(dim, width)
        self.blocks = nn.Sequential(*[ResidualUnit(width) for _ in range(depth)])
        self.out = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.blocks(self.inp(x))).squeeze(1)


@case(
    fault="exploding-gradient",
    layers=("blocks", "inp"),
    onset=0,
    also=("poor-initialization",),
    tolerate=("learning-rate-too-high", "oscillating-gradient", "gradient-spike"),
    source=(
        "Zhang, Dauphin & Ma 2019 (Fixup), sec. 2: residual nets without normalisation or branch scaling explode with "
        "depth"
    ),
)
def house_prices_resnet(attach: Attach) -> None:
    """Sixteen residual blocks, He-initialised, with neither normalisation nor scaled branches: every block triples the
    variance.
    """
    setup(100)
    x, price = houses()
    x, y = standardize(x), (price - price.mean()) / price.std()
    model = TabularResNet(x.shape[1])
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    criterion = nn.MSELoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for xb, yb in batches(x, y, size=128, steps=150):
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=xb)


@case(
    fault="exploding-gradient",
    onset=10,
    tolerate=("learning-rate-too-high", "layer-imbalance"),
    source=(
        "torchgan/torchgan#42, archsyscall/GANs-TensorFlow2#2 (a WGAN whose critic is not clipped); own variant: the "
        "clamp only rebinds a name"
    ),
)
def ring_wgan(attach: Attach) -> None:
    """The critic's weights are meant to be clipped, but `w = w.clamp(...)` only rebinds a local name; its output grows
    without bound.
    """
    setup(101)
    generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    critic = nn.Sequential(
        nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1)
    )
    opt_g = torch.optim.RMSprop(generator.parameters(), lr=5e-5)
    opt_c = torch.optim.RMSprop(critic.parameters(), lr=5e-4)
    monitor = attach(critic, opt_c)
    for step in range(300):
        angle = torch.randint(0, 8, (128,)) * (math.pi / 4)
        real = torch.stack([angle.cos(), angle.sin()], 1) * 2 + 0.05 * torch.randn(128, 2)
        fake = generator(torch.randn(128, 8)).detach()
        loss_c = critic(fake).mean() - critic(real).mean()
        opt_c.zero_grad()
        loss_c.backward()
        opt_c.step()
        for w in critic.parameters():
            w = w.clamp(-0.01, 0.01)  # type: ignore[assignment]
        monitor.step(loss_c, batch=real)
        if step % 5 == 4:
            loss_g = -critic(generator(torch.randn(128, 8))).mean()
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()


class LoadForecaster(nn.Module):
    def __init__(self, hidden: int = 64, ahead: int = 24) -> None:
        super().__init__()
        self.rnn = nn.RNN(1, hidden, nonlinearity="relu", batch_first=True)
        self.head = nn.Linear(hidden, ahead)
        rnn: Any = self.rnn
        nn.init.eye_(rnn.weight_hh_l0)
        rnn.weight_hh_l0.data.mul_(0.9)
        nn.init.normal_(rnn.weight_ih_l0, std=0.01)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x[..., None])[0][:, -1])


@case(
    fault="exploding-gradient",
    layers=("rnn",),
    onset=57,
    also=("non-finite", "gradient-spike"),
    tolerate=("learning-rate-too-high",),
    tags=("mid-run",),
    source=(
        "Pascanu, Mikolov & Bengio 2013; keras-team/keras#3687 (recurrent layers with activation='relu', no clipping)"
    ),
)
def load_forecast_rnn(attach: Attach) -> None:
    """A ReLU RNN over 120 hours, without clipping; its recurrence passes 1, and the gradient goes from 1 to 1e2 to 1e9
    to overflow.
    """
    setup(4)
    load = series(4000)
    model = LoadForecaster()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)
    for _step in range(80):
        start = torch.randint(0, len(load) - 144, (48,))
        window = load[start[:, None] + torch.arange(144)]
        optimizer.zero_grad()
        loss = F.mse_loss(model(window[:, :120]), window[:, 120:])
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=window[:, :120])


# ---------------------------------------------------------------------------------------------- vanishing-gradient


def plain_stack(depth: int, width: int = 16, classes: int = 10) -> nn.Sequential:
    layers = [nn.Conv2d(1, width, 3, padding=1), nn.ReLU()]
    for i in range(depth - 2):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
        if i in (depth // 3, 2 * depth // 3):
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * 4, classes))


@case(
    fault="vanishing-gradient",
    layers=("0", "2", "4", "6", "8", "10", "12"),
    onset=0,
    also=("poor-initialization",),
    tolerate=("loss-plateau", "dead-layer", "layer-imbalance"),
    source="AUTOTRAINER (ICSE 2021), Motivation/ 20-layer ReLU models; He et al. 2015, fig. 3 (a 30-layer plain net)",
)
def digits_plain_conv(attach: Attach) -> None:
    """Twenty plain 3x3 convolutions with PyTorch's default initialisation, no shortcut, no normalisation."""
    setup(103)
    x, y = digits()
    model = plain_stack(20, width=12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for images, labels in batches(x, y, size=32, steps=120):
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=images)


class EchoNet(nn.Module):
    """An instrument's calibration sets the initial state; the readings follow; then a decision."""

    def __init__(self, dim: int = 8, hidden: int = 48, classes: int = 4) -> None:
        super().__init__()
        self.calibrate = nn.Sequential(nn.Linear(dim, 64), nn.Tanh(), nn.Linear(64, 2 * hidden))
        self.lstm = nn.LSTM(2, hidden, batch_first=True)
        self.decide = nn.Linear(hidden, classes)
        with torch.no_grad():
            lstm: Any = self.lstm
            lstm.bias_ih_l0[hidden : 2 * hidden] = -1.5

    def forward(self, setting: Tensor, readings: Tensor) -> Tensor:
        h, c = self.calibrate(setting).chunk(2, 1)
        out, _ = self.lstm(readings, (torch.tanh(h)[None].contiguous(), c[None].contiguous()))
        return self.decide(out[:, -1])


@case(
    fault="vanishing-gradient",
    layers=("calibrate",),
    onset=0,
    also=("dead-layer",),
    tolerate=("loss-plateau", "layer-imbalance", "poor-initialization"),
    source="own construction after Gers et al. 2000, Jozefowicz et al. 2015 (forget-gate bias)",
)
def echo_calibration_lstm(attach: Attach) -> None:
    """The forget gates start at a bias of -1.5 (someone set the wrong sign), so nothing reaches back over 20 readings
    to the calibration.
    """
    setup(104)
    key = torch.randn(8, 4)
    model = EchoNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for _step in range(200):
        setting = torch.randn(64, 8)
        y = (setting @ key).argmax(1)
        readings = torch.randn(64, 20, 2)
        loss = criterion(model(setting, readings), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=readings)


@case(
    fault="vanishing-gradient",
    layers=("0", "2", "4", "6"),
    onset=145,
    tolerate=("loss-plateau", "dead-layer", "layer-imbalance"),
    tags=("mid-run",),
    source=(
        "own construction: a weight decay of AdamW's size given to SGD, where it is multiplied by the gradient's rate "
        "(Loshchilov & Hutter 2019)"
    ),
)
def digits_two_stage(attach: Attach) -> None:
    """The second training stage switches to weight_decay=0.2; at this learning rate the weights, and the gradients with
    them, shrink to nothing.
    """
    setup(105)
    x, y = digits()
    layers, width = [nn.Flatten(), nn.Linear(64, 96), nn.Tanh()], 96
    for _ in range(5):
        layers += [nn.Linear(width, width), nn.Tanh()]
    model = nn.Sequential(*layers[1:], nn.Linear(width, 10))
    x = x.flatten(1)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    monitor = attach(model, optimizer, loss_fn=criterion)
    for step, (xb, yb) in enumerate(batches(x, y, size=64, steps=330)):
        if step == 130:
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.2
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=xb)


# ------------------------------------------------------------------------------------------------------ dead-layer


class SwitchLayer(nn.Module):
    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        p = self.router(x).softmax(-1)
        weight, choice = p.max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mine = choice == i
            out[mine] = expert(x[mine])
        return x + weight[:, None] * out


class SwitchClassifier(nn.Module):
    def __init__(self, dim: int, classes: int, width: int = 64, experts: int = 6) -> None:
        super().__init__()
        self.inp = nn.Linear(dim, width)
        self.switch = SwitchLayer(width, 128, experts)
        self.out = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.switch(torch.relu(self.inp(x))))


@case(
    fault="dead-layer",
    layers=tuple(f"switch.experts.{i}" for i in (0, 1, 2, 4, 5)),
    onset=0,
    also=("no-gradient",),
    tolerate=("rising-sparsity", "layer-imbalance", "poor-initialization"),
    source=(
        "pytorch/torchtitan#1246 (router collapse, top-1); Shazeer et al. 2017, sec. 4 (gates converge to the same few"
        " experts)"
    ),
)
def digits_switch(attach: Attach) -> None:
    """Top-1 routing without a balancing loss: the router sends nearly everything to one expert, and the others get
    exactly zero gradient.
    """
    setup(106)
    x, y = digits()
    x = x.flatten(1)
    model = SwitchClassifier(64, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for xb, yb in batches(x, y, size=64, steps=400):
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=xb)


class MixerBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)
        self.drop_path = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand(()) < self.drop_path:
            return x
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class DeepMixer(nn.Module):
    def __init__(self, dim: int = 64, width: int = 64, depth: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.patch = nn.Linear(dim, width)
        self.blocks = nn.ModuleList(MixerBlock(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def set_drop_path(self, rate: float) -> None:
        blocks: Any = self.blocks
        for i, block in enumerate(blocks):
            block.drop_path = rate * i / (len(blocks) - 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@case(
    fault="dead-layer",
    layers=("blocks.7",),
    onset=78,
    also=("no-gradient",),
    tolerate=("oscillating-gradient",),
    tags=("mid-run", "subtle"),
    source=(
        "own construction: stochastic depth (Huang et al. 2016) with a schedule advanced per batch instead of per epoch"
    ),
)
def digits_stochastic_depth(attach: Attach) -> None:
    """The stochastic-depth rate is raised 1% per batch (it should be per epoch); after 100 updates the last block is
    always skipped.
    """
    setup(112)
    x, y = digits()
    model = DeepMixer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    model.train()
    for epoch, (images, labels) in enumerate(batches(x, y, size=64, steps=300)):
        model.set_drop_path(min(1.0, 0.01 * epoch))
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=images)


class DigitVAE(nn.Module):
    def __init__(self, hidden: int = 128, latent: int = 12) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU())
        self.mu, self.logvar = nn.Linear(hidden, latent), nn.Linear(hidden, latent)
        self.decoder = nn.Sequential(
            nn.Linear(latent, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, 64)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        h = self.encoder(x)
        posterior = torch.distributions.Normal(self.mu(h), torch.exp(0.5 * self.logvar(h)))
        return self.decoder(posterior.sample()), posterior


@case(
    fault="dead-layer",
    layers=("encoder", "mu", "logvar"),
    onset=30,
    also=("no-gradient", "vanishing-gradient"),
    tolerate=("layer-imbalance", "loss-plateau"),
    source=(
        "jankrepl/deepdow#106 (sample() where rsample() is needed); molecularsets/moses#45, "
        "yanggeng1995/vae_tacotron#10 (KL goes to 0)"
    ),
)
def digits_vae(attach: Attach) -> None:
    """The latent is drawn with sample(), which has no gradient; the encoder only sees the KL term, satisfies it, and
    its gradient dies away.
    """
    setup(107)
    x, _ = digits()
    x = x.flatten(1)
    model = DigitVAE()
    prior = torch.distributions.Normal(0.0, 1.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    for (xb,) in batches(x, size=128, steps=300):
        logits, posterior = model(xb)
        rec = F.binary_cross_entropy_with_logits(logits, xb, reduction="none").sum(1).mean()
        kl = torch.distributions.kl_divergence(posterior, prior).sum(1).mean()
        loss = rec + 0.05 * kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=xb)


# -------------------------------------------------------------------------------------------- oscillating-gradient


class TwoTasks(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.label = nn.Linear(8 * width, 10)
        self.ink = nn.Linear(8 * width, 1)


@case(
    fault="oscillating-gradient",
    onset=2,
    also=("layer-imbalance",),
    tolerate=("learning-rate-too-high", "gradient-spike", "exploding-gradient"),
    source=(
        "own construction: round-robin multi-task updates with losses in different units (GradNorm, Chen et al. 2018)"
    ),
)
def digits_two_datasets(attach: Attach) -> None:
    """Updates alternate between two tasks, one with a loss around 1, the other with a squared error in grey levels; the
    norm jumps 1000-fold each time.
    """
    setup(108)
    x, y = digits()
    total = (x * 16).sum((1, 2, 3))
    model = TwoTasks()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    monitor = attach(model, optimizer)
    for step, (images, labels, ink) in enumerate(batches(x, y, total, size=64, steps=300)):
        h = model.trunk(images)
        loss = F.cross_entropy(model.label(h), labels) if step % 2 == 0 else F.mse_loss(model.ink(h).squeeze(1), ink)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=images)


@case(
    fault="oscillating-gradient",
    onset=80,
    also=("gradient-spike",),
    tolerate=("learning-rate-too-high",),
    source="ronnyworm/keras_catsdogs (DeepLocalize benchmark, 'batch size'): a batch of one picture per update",
)
def tumour_online(attach: Attach) -> None:
    """The batch size is one (the loop iterates over the dataset, not over a loader), at a learning rate for batches of
    64.
    """
    setup(109)
    x, y = table("breast_cancer")
    x = standardize(x)
    model = nn.Sequential(nn.Linear(30, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for i in torch.randint(0, len(x), (600,)).tolist():
        row, label = x[i : i + 1], y[i : i + 1]
        optimizer.zero_grad()
        loss = criterion(model(row), label)
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=row)


# -------------------------------------------------------------------------------------------------- gradient-spike


class RiverGRU(nn.Module):
    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.gru = nn.GRU(1, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x[..., None])[0][:, -1]).squeeze(1)


@case(
    fault="gradient-spike",
    onset=38,
    tolerate=("exploding-gradient", "learning-rate-too-high"),
    tags=("mid-run",),
    source="own construction: the missing-value code -9999 of hydrology tables left in the target",
)
def river_gauge(attach: Attach) -> None:
    """A few gauge readings are -9999, the code for 'missing', and stay in the target of the forecasts."""
    setup(110)
    level = series(6000, seed=3)
    reading = level.clone()
    reading[[1500, 2870, 4410]] = -9999.0
    starts = torch.arange(0, 5900)
    order = torch.randperm(len(starts), generator=torch.Generator().manual_seed(5))
    starts = starts[order]
    model = RiverGRU()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)
    for step in range(180):
        s = starts[(step * 64) % 5888 : (step * 64) % 5888 + 64]
        x = level[s[:, None] + torch.arange(24)]
        y = reading[s + 24]
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)


class RunningNorm:
    """Exponential running mean and variance per channel, as for observations in reinforcement learning."""

    def __init__(self, dim: int, rate: float = 0.1) -> None:
        self.mean, self.var, self.rate = torch.zeros(dim), torch.ones(dim), rate

    def __call__(self, x: Tensor) -> Tensor:
        z = (x - self.mean) / torch.sqrt(self.var + 1e-8)
        self.mean += self.rate * (x.mean(0) - self.mean)
        self.var += self.rate * (x.var(0, unbiased=False) - self.var)
        return z


@case(
    fault="gradient-spike",
    onset=170,
    tolerate=("exploding-gradient", "learning-rate-too-high"),
    tags=("mid-run",),
    source=(
        "NousResearch/atropos#457: normalising by a standard deviation near zero gives gradient spikes; own variant: "
        "running statistics"
    ),
)
def plant_controller(attach: Attach) -> None:
    """Inputs are normalised by running statistics; a sensor that rests for 100 batches has variance 1e-5 of before when
    it wakes up.
    """
    setup(111)
    model = nn.Sequential(nn.Linear(12, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    norm = RunningNorm(12)
    truth = torch.randn(12, 3) / 3
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)
    for step in range(300):
        sensors = torch.randn(64, 12)
        if 60 <= step < 170 or 200 <= step < 285:
            sensors[:, 4] = 0.2
        y = torch.tanh(sensors @ truth)
        z = norm(sensors)
        loss = F.mse_loss(model(z), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=z)
