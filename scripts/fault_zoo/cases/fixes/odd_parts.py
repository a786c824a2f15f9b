"""Parts that look odd: cells that spike, a layer without depth, words of averages, and a gradient that turns."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import digits, draws, mean_of_last
from scripts.fault_zoo.protocol import Attach, case


class Spike(torch.autograd.Function):
    """A step at 0, with the slope of a fast sigmoid."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).float()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient / (1 + 10 * x.abs()) ** 2


class SpikingReader(nn.Module):
    """Leaky cells that spike and start again, over 12 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 128), nn.Linear(128, 10)

    def forward(self, spikes: Tensor) -> Tensor:
        charge, out = torch.zeros(spikes.shape[1], 128), torch.zeros(spikes.shape[1], 10)
        counts = torch.zeros_like(out)
        for now in spikes:
            charge = 0.9 * charge + self.inner(now)
            fired = Spike.apply(charge - 1)
            charge = charge * (1 - fired.detach())
            out = 0.9 * out + self.outer(fired)
            counts = counts + out
        return counts / len(spikes)


@case(source="https://github.com/jeshraghian/snntorch", tags=("spiking", "recurrent"))
def cells_that_spike(attach: Attach) -> None:
    """The hidden values are 0 or 1, most of them 0, and their true derivative is 0 everywhere. A slope is made up for
    the backward pass.
    """
    torch.manual_seed(421)
    x, y, new_x, new_y = (part.flatten(1) if part.ndim > 1 else part for part in digits())
    model = SpikingReader()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer, loss_fn=criterion)

    def spikes(pictures: Tensor) -> Tensor:
        return (torch.rand(12, *pictures.shape) < pictures).float()

    for i in draws(len(x), size=64, steps=300):
        loss = criterion(model(spikes(x[i])), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        right = (model(spikes(new_x)).argmax(1) == new_y).float().mean().item()
    assert right > 0.9, right


class FixedPoint(nn.Module):
    """The state at which one layer gives back what it gets, with the gradient of that state."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.recur, self.inject = nn.Linear(width, width, bias=False), nn.Linear(64, width)
        self.norm = nn.LayerNorm(width)

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        """Return the next state."""
        return 0.5 * torch.tanh(self.norm(self.recur(z) + self.inject(x))) + 0.3 * z

    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros(len(x), self.norm.normalized_shape[0])
        with torch.no_grad():
            for _ in range(25):
                z = self.step(z, x)
        if not self.training:
            return z
        z = self.step(z, x)
        at = z.detach().requires_grad_()
        again = self.step(at, x.detach())

        def solve(gradient: Tensor) -> Tensor:
            total = gradient
            for _ in range(15):
                total = gradient + torch.autograd.grad(again, at, total, retain_graph=True)[0]
            return total

        z.register_hook(solve)
        return z


@case(source="https://github.com/locuslab/deq", tags=("implicit", "fixed-point"))
def layer_without_depth(attach: Attach) -> None:
    """A deep equilibrium model: 25 passes through one layer without a graph, one with, and a hook on the result that
    solves for the gradient. Most of the forward pass is never differentiated.
    """
    torch.manual_seed(422)
    x, y, new_x, new_y = (part.flatten(1) if part.ndim > 1 else part for part in digits())
    model = nn.Sequential(FixedPoint(), nn.Linear(64, 10))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer, loss_fn=criterion)
    for i in draws(len(x), size=64, steps=250):
        loss = criterion(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    model.eval()
    with torch.no_grad():
        right = (model(new_x).argmax(1) == new_y).float().mean().item()
    assert right > 0.9, right


class Codebook(nn.Module):
    """The nearest of 32 words for each vector. The words are averages of the vectors that chose them."""

    words: Tensor
    counts: Tensor

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.register_buffer("words", torch.randn(32, width))
        self.register_buffer("counts", torch.ones(32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen = torch.cdist(x, self.words).argmin(1)
        if self.training:
            picked = F.one_hot(chosen, 32).float()
            self.counts.mul_(0.95).add_(0.05 * picked.sum(0))
            means = picked.T @ x.detach() / picked.sum(0).clamp(min=1)[:, None]
            share = (0.05 * picked.sum(0) / self.counts.clamp(min=1e-3)).clamp(max=1)[:, None]
            self.words.lerp_(means, share)
            tired = self.counts < 0.1
            self.words[tired] = x.detach()[torch.randint(0, len(x), (int(tired.sum()),))]
            self.counts[tired] = 1.0
        near = self.words[chosen]
        return x + (near - x).detach(), F.mse_loss(x, near)


@case(source="https://github.com/zalandoresearch/pytorch-vq-vae", tags=("vq-vae", "average"))
def words_that_are_averages(attach: Attach) -> None:
    """The words of a codebook get no gradient and are in no optimizer: they are moving averages. The gradient of the
    decoder goes to the encoder as if there were no choice of a word between them.
    """
    torch.manual_seed(423)
    x, _, new_x, _ = (part.flatten(1) if part.ndim > 1 else part for part in digits())
    encoder = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))
    decoder = nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 64))
    codebook = Codebook()
    model = nn.ModuleDict({"encoder": encoder, "codebook": codebook, "decoder": decoder})
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)

    def rebuilt(pictures: Tensor) -> tuple[Tensor, Tensor]:
        near, commitment = codebook(encoder(pictures).view(-1, 8))
        return decoder(near.view(len(pictures), 32)), commitment

    for i in draws(len(x), size=64, steps=300):
        drawn, commitment = rebuilt(x[i])
        loss = F.mse_loss(drawn, x[i]) + 0.25 * commitment
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    model.eval()
    with torch.no_grad():
        error = F.mse_loss(rebuilt(new_x)[0], new_x).item()
    assert error < 0.6 * new_x.var(0).mean().item(), error


class Reversal(torch.autograd.Function):
    """Pass values on, and turn gradients around."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        return -gradient


@case(source="https://github.com/fungtion/DANN", tags=("adversarial", "domain"))
def gradient_turned_around(attach: Attach) -> None:
    """Adversarial adaptation: a judge tells bright pictures from inverted ones, and the gradient that it sends to the
    features is turned around. Its loss stays near log 2, which is what is wanted.
    """
    torch.manual_seed(424)
    x, y, new_x, new_y = (part.flatten(1) if part.ndim > 1 else part for part in digits())
    features = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU())
    model = nn.ModuleDict({"features": features, "labels": nn.Linear(48, 10), "judge": nn.Linear(48, 1)})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = attach(model, optimizer)
    judged, labels = [], []
    domain = torch.cat([torch.zeros(64), torch.ones(64)])
    others = draws(len(x), size=64, steps=350, seed=1)
    for i in draws(len(x), size=64, steps=350):
        found = features(torch.cat([x[i], 0.7 * x[next(others)] + 0.2]))
        label_loss = F.cross_entropy(model["labels"](found[:64]), y[i])
        judge_loss = F.binary_cross_entropy_with_logits(model["judge"](Reversal.apply(found)).squeeze(1), domain)
        loss = label_loss + 0.3 * judge_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
        judged.append(judge_loss.item())
        labels.append(label_loss.item())
    with torch.no_grad():
        right = (model["labels"](features(0.7 * new_x + 0.2)).argmax(1) == new_y).float().mean().item()
    assert mean_of_last(labels) < 0.3, mean_of_last(labels)
    assert right > 0.8, right
