"""How gradients flow: too large, too small, stuck, bouncing, spiking."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.faulty_data import batches, big_digits, communities, digits, regression, setup, split
from scripts.fault_zoo.protocol import Attach, case

# ---------------------------------------------------------------------------------------------- exploding-gradient


def track_step(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """A cart on a track: position, velocity; reward near the right end."""
    push = (action.float() - 1) * 0.1
    v = (state[:, 1] + push - 0.03 * torch.cos(3 * state[:, 0])).clamp(-1, 1)
    p = (state[:, 0] + 0.3 * v).clamp(-2, 2)
    return torch.stack([p, v], 1), (p > 1.5).float()


def features(s: Tensor) -> Tensor:
    return torch.cat([s, s[:, :1] * s[:, 1:], s**2, torch.ones(len(s), 1)], 1)


@case(
    fault="exploding-gradient",
    onset=20,
    tolerate=("learning-rate-too-high",),
    tags=("rl",),
    source=(
        "van Hasselt et al. 2018, 'Deep RL and the Deadly Triad' (bootstrapping off-policy without a target network)"
    ),
)
def cart_q_values(attach: Attach) -> None:
    """Q-learning on off-policy transitions bootstraps from the very network it updates; the values run away."""
    setup(0)
    q_net = nn.Sequential(nn.Linear(6, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 3))
    optimizer = torch.optim.Adam(q_net.parameters(), lr=1e-3)
    monitor = attach(q_net, optimizer, loss_fn=F.mse_loss)
    gamma = 0.99
    for _step in range(400):
        state = torch.rand(256, 2) * torch.tensor([4.0, 2.0]) - torch.tensor([2.0, 1.0])
        action = torch.randint(0, 3, (256,))
        following, reward = track_step(state, action)
        with torch.no_grad():
            target = reward + gamma * q_net(features(following)).max(1).values
        x = features(state)
        q = q_net(x).gather(1, action[:, None]).squeeze(1)
        loss = F.mse_loss(q, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)


class GraphNet(nn.Module):
    def __init__(self, adjacency: Tensor, dim: int, hidden: int, classes: int, depth: int = 4) -> None:
        super().__init__()
        self.register_buffer("adjacency", adjacency)
        sizes = [dim] + [hidden] * (depth - 1) + [classes]
        self.convs = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for i, conv in enumerate(self.convs):
            x = self.adjacency @ conv(x)
            if i < len(self.convs) - 1:
                x = torch.relu(x)
        return x


@case(
    fault="exploding-gradient",
    layers=("convs",),
    onset=0,
    also=("poor-initialization",),
    tolerate=("dead-relu", "rising-sparsity", "learning-rate-too-high"),
    tags=("graph",),
    source="Kipf & Welling 2017, sec. 2.2: without the renormalised adjacency, repeated propagation explodes",
)
def community_gcn(attach: Attach) -> None:
    """The adjacency matrix is used as it is (with self-loops), not normalised by degree, over four layers."""
    setup(1)
    a, x, y = communities(n=500, p_in=0.15, p_out=0.05)
    train = torch.rand(len(y)) < 0.5
    model = GraphNet(a + torch.eye(len(a)), x.shape[1], 48, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for _epoch in range(200):
        model.train()
        loss = criterion(model(x)[train], y[train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)


# ---------------------------------------------------------------------------------------------- vanishing-gradient


def sigmoid_mlp(sizes: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in itertools.pairwise(sizes[:-1]):
        layers += [nn.Linear(a, b), nn.Sigmoid()]
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))


@case(
    fault="vanishing-gradient",
    layers=("1", "3", "5", "7", "9"),
    onset=0,
    tolerate=("loss-plateau", "dead-layer", "layer-imbalance", "poor-initialization"),
    source="AUTOTRAINER (ICSE 2021), the sigmoid 'gradient vanish' MNIST models; Glorot & Bengio 2010, fig. 2",
)
def digits_mlp_sigmoid(attach: Attach) -> None:
    """Seven hidden layers of sigmoids with the default initialisation."""
    setup(2)
    x, y = digits()
    model = sigmoid_mlp([64, 128, 128, 128, 128, 128, 128, 128, 10])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for images, labels in batches(x, y, size=128, steps=250):
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=images)


class TanhNet(nn.Module):
    def __init__(self, dim: int, hidden: int, depth: int) -> None:
        super().__init__()
        self.inp = nn.Linear(dim, hidden)
        self.hidden = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(depth))
        self.out = nn.Linear(hidden, 1)
        for m in self.modules():
            if isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, std=0.01)
                nn.init.zeros_(m.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inp(x))
        for layer in self.hidden:
            x = torch.tanh(layer(x))
        return self.out(x).squeeze(-1)


@case(
    fault="vanishing-gradient",
    layers=("inp", "hidden"),
    onset=0,
    also=("poor-initialization",),
    tolerate=("loss-plateau", "dead-layer", "layer-imbalance"),
    source="Glorot & Bengio 2010; CS231n 'weight initialization' notes (std 0.01 in a ten-layer tanh net)",
)
def surface_fit_tanh(attach: Attach) -> None:
    """Nine tanh layers whose weights are drawn with a standard deviation of 0.01."""
    setup(3)
    x, y = regression(6000, 8)
    (xt, yt), (xv, yv) = split(x, y)
    model = TanhNet(8, 100, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    monitor = attach(model, optimizer)
    for step, (xb, yb) in enumerate(batches(xt, yt, size=128, steps=300)):
        loss = ((model(xb) - yb) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            with torch.no_grad():
                val_loss = ((model(xv) - yv) ** 2).mean()
            monitor.step(loss, batch=xb, val_loss=val_loss)
        else:
            monitor.step(loss, batch=xb)


# ------------------------------------------------------------------------------------------------------ dead-layer


class Highway(nn.Module):
    def __init__(self, dim: int, gate_bias: float) -> None:
        super().__init__()
        self.transform = nn.Linear(dim, dim)
        self.gate = nn.Linear(dim, dim)
        nn.init.kaiming_normal_(self.transform.weight, nonlinearity="relu")
        nn.init.constant_(self.gate.bias, gate_bias)

    def forward(self, x: Tensor) -> Tensor:
        g = torch.sigmoid(self.gate(x))
        return g * torch.relu(self.transform(x)) + (1 - g) * x


class HighwayNet(nn.Module):
    def __init__(self, dim: int, width: int, classes: int, biases: list[float]) -> None:
        super().__init__()
        self.embed = nn.Linear(dim, width)
        self.blocks = nn.ModuleList(Highway(width, b) for b in biases)
        self.classify = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.embed(x.flatten(1)))
        for block in self.blocks:
            x = block(x)
        return self.classify(x)


@case(
    fault="dead-layer",
    layers=("blocks.7",),
    onset=0,
    also=("saturated-activation",),
    tolerate=("layer-imbalance", "vanishing-gradient", "poor-initialization"),
    tags=("subtle",),
    source="own construction: Srivastava et al. 2015's gate biases, one of twenty mistyped",
)
def digits_highway(attach: Attach) -> None:
    """Of twenty highway blocks, the eighth got a gate bias of -20 where the others have -2.0."""
    setup(4)
    x, y = digits()
    biases = [-2.0, -2.0, -2.0, -2.0, -2.0, -2.0, -2.0, -20, -2.0, -2.0] + [-2.0] * 10
    model = HighwayNet(64, 64, 10, biases)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=220)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for images, labels in batches(x, y, size=128, steps=200):
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        monitor.step(loss, batch=images)


class Bottleneck(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        nn.init.zeros_(self.bn2.weight)  # start as the identity

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))


@case(
    fault="dead-layer",
    layers=tuple(f"{i}.{m}" for i in (3, 4, 5) for m in ("conv1", "conv2", "bn1")),
    onset=0,
    also=("no-gradient",),
    source=(
        "own construction: zero_init_residual (Goyal et al. 2017, torchvision) together with frozen BatchNorm affines "
        "(detection recipes)"
    ),
)
def digits_frozen_norms(attach: Attach) -> None:
    """The last norm of each residual branch starts at zero, and the recipe freezes all norm affines, so the branches
    never wake up.
    """
    setup(107)
    x, y = digits()
    net = nn.Sequential(
        nn.Conv2d(1, 20, 3, padding=1, bias=False),
        nn.BatchNorm2d(20),
        nn.ReLU(),
        *[Bottleneck(20) for _ in range(3)],
        nn.AvgPool2d(4),
        nn.Flatten(),
        nn.Linear(80, 10),
    )
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.weight.requires_grad_(False)
            m.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(
        [p for p in net.parameters() if p.requires_grad], lr=0.1, momentum=0.9, weight_decay=1e-4
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=150)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(net, optimizer, loss_fn=criterion)
    for images, labels in batches(x, y, size=64, steps=150):
        loss = criterion(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        monitor.step(loss, batch=images)


# -------------------------------------------------------------------------------------------- oscillating-gradient


class SmallConvNet(nn.Module):
    def __init__(self, classes: int = 10, width: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.fc = nn.Linear(2 * width * 4, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.leaky_relu(self.conv1(x), 0.1), 2)
        x = F.max_pool2d(F.leaky_relu(self.conv2(x), 0.1), 2)
        return self.fc(x.flatten(1))


@case(
    fault="oscillating-gradient",
    onset=24,
    tolerate=("learning-rate-too-high", "gradient-spike", "loss-plateau"),
    source="Deci-AI/super-gradients#416: shuffle=False by default on a class-sorted ImageNet; ultralytics/yolov5#2582",
)
def digits_from_folders(attach: Attach) -> None:
    """The images are read class by class, as the folders have them, and never shuffled."""
    setup(5)
    x, y = digits()
    order = torch.argsort(y, stable=True)
    x, y = x[order], y[order]
    model = SmallConvNet(width=24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for _epoch in range(3):
        for i in range(0, len(x) - 14, 15):
            images, labels = x[i : i + 15], y[i : i + 15]
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            monitor.step(loss, batch=images)


# -------------------------------------------------------------------------------------------------- gradient-spike


@case(
    fault="gradient-spike",
    onset=131,
    tolerate=("learning-rate-too-high", "exploding-gradient"),
    source="StackOverflow 59325381 (DeepFD benchmark): /255 applied to one part of the data only",
)
def scanned_forms_cnn(attach: Attach) -> None:
    """One shard of the images (and it comes up as whole batches) still has pixel values 0..255."""
    setup(6)
    x, y = big_digits(16)
    shard = x[:64] * 255, y[:64]
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    loss_fn = nn.CrossEntropyLoss()
    monitor = attach(net, optimizer, loss_fn=loss_fn)
    for step, (xb, yb) in enumerate(batches(x[64:], y[64:], size=64, steps=260)):
        if step % 66 == 65 and step > 100:
            xb, yb = shard
        loss = loss_fn(net(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=xb)
