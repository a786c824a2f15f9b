"""What floating point does: NaN and Inf, half precision, loss scaling."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.faulty_data import batches, digits, series, setup, shapes
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------------------------ non-finite


class Embedder(nn.Module):
    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.embed = nn.Linear(512, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(self.features(x))


@case(
    fault="non-finite",
    onset=93,
    tolerate=("exploding-gradient", "gradient-spike"),
    layers=("features", "embed"),
    tags=("mid-run",),
    source=(
        "adambielski/siamese-triplet#18, tensorflow/tensorflow#30199, tilman151/rul-adapt#22: sqrt of a squared "
        "distance that is exactly 0"
    ),
)
def digits_siamese(attach: Attach) -> None:
    """The contrastive distance is sqrt(sum of squares); one pair holds the same image twice, and the gradient of sqrt
    at 0 is infinite.
    """
    setup(150)
    x, y = digits()
    generator = torch.Generator().manual_seed(13)
    model = Embedder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = attach(model, optimizer)
    for _step in range(160):
        i = torch.randint(0, len(x), (48,), generator=generator)
        j = torch.randint(0, len(x), (48,), generator=generator)
        same = (y[i] == y[j]).float()
        d = torch.sqrt(((model(x[i]) - model(x[j])) ** 2).sum(1))
        loss = (same * d**2 + (1 - same) * F.relu(2.0 - d) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])


class DemandGRU(nn.Module):
    def __init__(self, hidden: int = 48) -> None:
        super().__init__()
        self.gru = nn.GRU(2, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0][:, -1]).squeeze(1)


@case(
    fault="non-finite",
    onset=151,
    tolerate=("exploding-gradient", "gradient-spike"),
    tags=("mid-run",),
    source="Nixtla/neuralforecast#186, timeseriesAI/tsai#506, circleAhn/TESLA-tf#1: NaN in the series",
)
def demand_with_weather(attach: Attach) -> None:
    """A single temperature reading out of six thousand is NaN; training is fine until a window with it is drawn."""
    setup(151)
    load, temperature = series(6000, seed=1), series(6000, seed=2)
    temperature[3333] = float("nan")
    data = torch.stack([load, temperature], -1)
    generator = torch.Generator().manual_seed(21)
    model = DemandGRU()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer, loss_fn=F.l1_loss)
    for _step in range(200):
        s = torch.randint(0, 5900, (6,), generator=generator)
        x = data[s[:, None] + torch.arange(24)]
        y = load[s + 24]
        optimizer.zero_grad()
        loss = F.l1_loss(model(x), y)
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)


class RainWithSpread(nn.Module):
    def __init__(self, dim: int, hidden: int = 96) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.mean = nn.Linear(hidden, 1)
        self.log_var = nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        return torch.relu(self.mean(h)).squeeze(1), self.log_var(h).squeeze(1)


@case(
    fault="non-finite",
    onset=202,
    tolerate=("exploding-gradient", "gradient-spike"),
    tags=("mid-run",),
    source=(
        "own construction: heteroscedastic loss with an unbounded log-variance (Kendall & Gal 2017; "
        "torch.nn.GaussianNLLLoss clamps its variance)"
    ),
)
def rainfall_spread(attach: Attach) -> None:
    """On dry days the mean is exactly right, so the log-variance falls without bound, until exp(-log_var) is inf and
    inf * 0 is NaN.
    """
    setup(152)
    x = torch.randn(5000, 10)
    y = torch.relu(x @ torch.randn(10) / 2 + 0.3 * torch.randn(5000) - 0.8)
    model = RainWithSpread(10)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    for xb, yb in batches(x, y, size=128, steps=400):
        mean, log_var = model(xb)
        loss = 0.5 * (torch.exp(-log_var) * (mean - yb) ** 2 + log_var).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=xb)


def rotation(six: Tensor) -> Tensor:
    a = F.normalize(six[:, :3], dim=1)
    b = six[:, 3:] - (a * six[:, 3:]).sum(1, keepdim=True) * a
    b = F.normalize(b, dim=1)
    return torch.stack([a, b, torch.linalg.cross(a, b)], 2)


@case(
    fault="non-finite",
    onset=90,
    tolerate=("gradient-spike", "exploding-gradient"),
    tags=("mid-run",),
    source=(
        "papagina/RotationContinuity#11, geoopt/geoopt#79, eigenvivek/xvr#129: acos at +-1 in the geodesic rotation "
        "loss"
    ),
)
def pose_from_points(attach: Attach) -> None:
    """The rotation error is acos((trace - 1) / 2), clamped to [-1, 1]; a pose that is exactly right has an infinite
    derivative.
    """
    setup(153)
    points = torch.randn(10, 3)
    model = nn.Sequential(nn.Linear(30, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 6))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = attach(model, optimizer)
    for _step in range(300):
        true = rotation(torch.randn(128, 6) * 0.01 + torch.tensor([1.0, 0, 0, 0, 1.0, 0]))
        x = (points @ true.transpose(1, 2)).flatten(1)
        guess = rotation(model(x))
        trace = (guess.transpose(1, 2) @ true).diagonal(dim1=1, dim2=2).sum(1)
        loss = torch.acos(((trace - 1) / 2).clamp(-1, 1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)


@case(
    fault="non-finite",
    onset=176,
    tolerate=("exploding-gradient", "gradient-spike"),
    tags=("mid-run", "rl"),
    source=(
        "DLR-RM/stable-baselines3#325, #265, #440, jolibrain/wheatley#93: the last minibatch has one element and its "
        "std() is NaN"
    ),
)
def bandit_ppo(attach: Attach) -> None:
    """Advantages are normalised per minibatch; the rollout has 16 * 64 + 1 steps, and the standard deviation of the
    last one is NaN.
    """
    setup(155)
    policy = nn.Sequential(nn.Linear(8, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 4))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    monitor = attach(policy, optimizer)
    payoff = torch.randn(8, 4)
    for rollout in range(6):
        n = 1024 + (1 if rollout == 5 else 0)  # an episode that ran one step longer
        state = torch.randn(n, 8)
        with torch.no_grad():
            dist = torch.distributions.Categorical(logits=policy(state))
            action = dist.sample()
            old = dist.log_prob(action)
        reward = (state @ payoff).gather(1, action[:, None]).squeeze(1) + 0.5 * torch.randn(n)
        for _epoch in range(2):
            for index in torch.randperm(n).split(64):
                adv = reward[index]
                adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                log_p = F.log_softmax(policy(state[index]), dim=1)
                ratio = (log_p.gather(1, action[index, None]).squeeze(1) - old[index]).exp()
                entropy = -(log_p.exp() * log_p).sum(1).mean()
                loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean() - 0.01 * entropy
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                monitor.step(loss, batch=state[index])


# -------------------------------------------------------------------------------------------------- fp16-underflow


@case(
    fault="fp16-underflow",
    layers=("0", "2"),
    onset=0,
    tolerate=(
        "vanishing-gradient",
        "dead-layer",
        "no-gradient",
        "rising-sparsity",
        "learning-rate-too-low",
        "loss-plateau",
        "not-optimized",
    ),
    source="Micikevicius et al. 2018, sec. 3.2; sanghyun-son/EDSR-PyTorch#36 (model.half() without loss scaling)",
)
def spectra_half(attach: Attach) -> None:
    """The model is simply .half()-ed, with neither loss scaling nor float32 weights; with targets of 1e-3 nearly all
    gradients are below 6e-8.
    """
    setup(156)
    lines = torch.rand(40, 64).half()
    x = torch.rand(4000, 40)
    concentration = (0.002 * torch.tanh(x @ torch.randn(40, 8) / 3)).half()
    x = (x.half() @ lines) * 0.05
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 8)).half()
    for p in model[-1].parameters():
        p.data.mul_(0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)
    for xb, yb in batches(x, concentration, size=64, steps=150):
        optimizer.zero_grad()
        loss = F.mse_loss(model(xb), yb)
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=xb)


class Denoiser(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.inp = nn.Conv2d(1, width, 3, padding=1)
        self.body = nn.Sequential(*[m for _ in range(3) for m in (nn.Conv2d(width, width, 3, padding=1), nn.ReLU())])
        self.out = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(torch.relu(self.inp(x))))


@case(
    fault="fp16-underflow",
    layers=("inp", "body"),
    onset=0,
    tolerate=(
        "vanishing-gradient",
        "dead-layer",
        "no-gradient",
        "rising-sparsity",
        "learning-rate-too-low",
        "loss-plateau",
    ),
    source="own construction after engichang1467/Open-Rig3R#35: a scaler that does not scale (init_scale=1, no growth)",
)
def disc_denoiser_amp(attach: Attach) -> None:
    """A GradScaler is there, but with init_scale=1 and no growth; the loss is averaged over pixels, weighted by 1e-3
    and split over four micro-batches.
    """
    setup(157)
    clean, _ = shapes(256, 12)
    clean = clean.clamp(0, 1)
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=10**6)
    accumulate = 4
    monitor = attach(model, optimizer, scaler=scaler, accumulate=accumulate, loss_fn=F.mse_loss)
    optimizer.zero_grad()
    total = 0.0
    for i, (x,) in enumerate(batches(clean, size=4, steps=4 * 60)):
        noisy = x + 0.3 * torch.randn_like(x)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = 1e-3 * F.mse_loss(model(noisy), x) / accumulate
        scaler.scale(loss).backward()
        total += loss.item()
        if (i + 1) % accumulate == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            monitor.step(total, batch=noisy)
            total = 0.0


# --------------------------------------------------------------------------------------------- loss-scale-collapse


class HalfBlock(nn.Module):
    def __init__(self, dim: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: Any) -> Any:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class StationNet(nn.Module):
    def __init__(self, dim: int = 24, width: int = 64, depth: int = 2, classes: int = 6) -> None:
        super().__init__()
        self.inp = nn.Linear(dim, width)
        self.blocks = nn.ModuleList(HalfBlock(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Any) -> Any:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@case(
    fault="loss-scale-collapse",
    onset=40,
    also=("non-finite",),
    tolerate=("not-optimized", "loss-plateau"),
    tags=("mid-run",),
    source=(
        "huggingface/transformers#5651 (66246 > 65504 in T5) and #4586, ymcui/Chinese-LLaMA-Alpaca#534 ('current loss "
        "scale already at minimum')"
    ),
)
def weather_stations_amp(attach: Attach) -> None:
    """From update 40 on one station file gives the pressure in pascal (101325) instead of bar; that is inf in fp16, in
    every batch.
    """
    setup(158)
    y = torch.randint(0, 6, (6000,))
    x = torch.randn(6, 24)[y] + 0.7 * torch.randn(6000, 24)
    x[:, 3] = 1.0 + 0.02 * x[:, 3]
    x[40 * 64 :, 3] *= 1e5
    model = StationNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, scaler=scaler, loss_fn=criterion)
    for step in range(90):
        xb, yb = x[step * 64 : step * 64 + 64], y[step * 64 : step * 64 + 64]
        with torch.autocast("cpu", dtype=torch.float16):
            loss = criterion(model(xb), yb)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        monitor.step(loss, batch=xb)


class HalfConv(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.fc = nn.Linear(width * 4, 10)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = F.max_pool2d(torch.relu(self.conv2(x)), 2)
        return self.fc(x.flatten(1)) * self.scale


@case(
    fault="loss-scale-collapse",
    onset=33,
    also=("non-finite",),
    tolerate=("not-optimized", "loss-plateau"),
    tags=("mid-run",),
    source=(
        "NVIDIA/apex#318, apex#1135, facebookresearch/fairseq#515: the scale falls and falls; a penalty computed in "
        "half precision overflows whatever the scale"
    ),
)
def digits_confidence_penalty_amp(attach: Attach) -> None:
    """A penalty on the fourth power of the logit gap is computed inside autocast; in half precision it overflows,
    whatever the loss scale.
    """
    setup(159)
    x, y = digits()
    model = HalfConv()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    monitor = attach(model, optimizer, scaler=scaler, loss_fn=F.cross_entropy)
    for images, labels in batches(x, y, size=32, steps=150):
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(images)
            gap = logits.max(1).values - logits.min(1).values
            loss = F.cross_entropy(logits, labels) + 1e-6 * (gap**4).mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        monitor.step(loss, batch=images)
