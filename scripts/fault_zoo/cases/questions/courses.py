"""Courses of training: a warm-up without end, a search without a line, a scaler that is half used, and odd steps."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from sklearn.datasets import load_wine
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from scripts.fault_zoo.cases.mailing.material import digits, draws, excerpts, letters, mean_of_last
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------ a warm-up without end


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, 2)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class LetterModel(nn.Module):
    def __init__(self, alphabet: int) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(alphabet, 64), nn.Embedding(32, 64)
        self.blocks = nn.Sequential(Block(64, 4), Block(64, 4))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, alphabet)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.letter(ids) + self.place(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(hidden)))


def linear_with_warmup(optimizer: torch.optim.Optimizer, warmup: int, total: int) -> LambdaLR:
    """Return a schedule that climbs to the rate in `warmup` steps and falls to zero at `total`."""

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        return max(0.0, (total - step) / max(1, total - warmup))

    return LambdaLR(optimizer, factor)


def train_letters(attach: Attach, *, warmup: int) -> float:
    """Return the mean loss of the last 20 steps."""
    torch.manual_seed(91)
    ids, alphabet = letters()
    model = LetterModel(alphabet)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    scheduler = linear_with_warmup(optimizer, warmup, 350)
    monitor = attach(model, optimizer, loss_fn=F.cross_entropy)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(350):
        text = excerpts(ids, length=33, count=24, generator=generator)
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        monitor.step(loss, batch=text)
        losses.append(loss.item())
    return mean_of_last(losses)


@case(
    fault="learning-rate-too-low",
    also=("loss-plateau",),
    onset=0,
    source="https://github.com/Morizeyao/GPT2-Chinese/issues/60",
    tags=("transformer", "schedule"),
)
def warmed_up_for_ten_thousand_steps(attach: Attach) -> None:
    """The warm-up of 10,000 steps comes from the recipe of a large model, and this training has 350 steps: the rate
    ends at 7e-5 instead of 2e-3. Reported in https://github.com/Morizeyao/GPT2-Chinese/issues/60,
    https://github.com/salesforce/LAVIS/issues/72 and https://github.com/facebookresearch/d2go/issues/19.
    """
    train_letters(attach, warmup=10_000)


# ------------------------------------------------------------------------------------ other points in each call


def solve_oscillator(attach: Attach, *, redraws: bool) -> float:
    """Return the largest error of the position of a damped oscillator, whose amplitude is 1."""
    torch.manual_seed(92)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=20, history_size=50)
    monitor = attach(model, optimizer)
    damping, stiffness, start = 0.4, 9.0, torch.zeros(1, 1, requires_grad=True)
    fixed = 3 * torch.rand(100, 1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        points = 3 * torch.rand(100, 1) if redraws else fixed
        time = torch.cat([start, points])
        place = model(time)
        speed = torch.autograd.grad(place.sum(), time, create_graph=True)[0]
        force = torch.autograd.grad(speed.sum(), time, create_graph=True)[0]
        equation = (force + damping * speed + stiffness * place).square().mean()
        loss = equation + 100 * ((place[0] - 1).square() + speed[0].square()).sum()
        loss.backward()
        return loss

    for _ in range(60):
        loss = optimizer.step(closure)
        monitor.step(loss)
    turn = math.sqrt(stiffness - damping**2 / 4)
    time = torch.linspace(0, 3, 200)[:, None]
    with torch.no_grad():
        exact = torch.exp(-damping / 2 * time) * (torch.cos(turn * time) + damping / 2 / turn * torch.sin(turn * time))
        return (model(time) - exact).abs().max().item()


@case(
    fault="non-finite",
    also=("learning-rate-too-high", "exploding-gradient", "gradient-spike", "oscillating-gradient", "loss-plateau"),
    tolerate=("saturated-activation", "vanishing-gradient", "layer-imbalance"),
    onset=1,
    source="https://github.com/pytorch/pytorch/issues/5953",
    tags=("lbfgs", "physics"),
)
def other_points_in_each_call(attach: Attach) -> None:
    """An equation is solved by L-BFGS, which compares the gradients of two calls of the closure. The closure draws new
    points in each call, so that the difference is mostly noise, and nothing shortens the steps that come out of it.
    Reported in https://github.com/pytorch/pytorch/issues/5953; the missing line search in
    https://github.com/lululxvi/deepxde/pull/1463 and https://github.com/mlverse/torch/issues/516.
    """
    solve_oscillator(attach, redraws=True)


# ------------------------------------------------------------------------------------ a scaler that is half used


def train_scaled(attach: Attach, *, repaired: bool) -> float:
    """Return the accuracy on digits for testing."""
    torch.manual_seed(93)
    x, y, x_test, y_test = digits()
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, scaler=scaler, loss_fn=criterion)
    for i in draws(len(x), size=64, steps=250):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = criterion(model(x[i]), y[i])
        scaler.scale(loss).backward()
        if repaired:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        return (model(x_test).argmax(1) == y_test).float().mean().item()


@case(
    fault="exploding-gradient",
    also=("learning-rate-too-high", "non-finite", "loss-scale-collapse"),
    tolerate=("dead-relu", "gradient-spike", "layer-imbalance", "loss-plateau"),
    onset=0,
    source="https://github.com/IAHispano/Applio/pull/860",
    tags=("amp", "fp16"),
)
def scaled_and_never_unscaled(attach: Attach) -> None:
    """The loss is scaled for float16, and the loop still calls `optimizer.step` and not `scaler.step`: the gradients
    are 65,536 times too large. Reported in https://github.com/IAHispano/Applio/pull/860 and
    https://github.com/nerfstudio-project/nerfacc/issues/307.
    """
    train_scaled(attach, repaired=False)


@case(source="the repaired twin of `scaled_and_never_unscaled`: `scaler.step`", tags=("amp", "fp16", "twin"))
def scaled_and_unscaled(attach: Attach) -> None:
    """The scaler divides the gradients by its scale before the step."""
    assert train_scaled(attach, repaired=True) > 0.93


# ------------------------------------------------------------------------------------ odd recipes


class Muon(torch.optim.Optimizer):
    """Make every singular value of an update one, by five steps of Newton and Schulz."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                mean.mul_(group["momentum"]).add_(parameter.grad)
                update = parameter.grad + group["momentum"] * mean
                update = update / (update.norm() + 1e-7)
                for _ in range(5):
                    square = update @ update.T
                    update = 3.4445 * update + (-4.7750 * square + 2.0315 * square @ square) @ update
                parameter.add_(update, alpha=-group["lr"] * max(1, update.shape[0] / update.shape[1]) ** 0.5)


@case(source="Jordan et al. 2024, Muon: an optimizer for hidden layers", tags=("optimizer", "transformer", "odd"))
def letters_by_muon(attach: Attach) -> None:
    """The matrices of the blocks are trained by Muon, whose updates have the same size whatever the gradient is, and
    everything else by AdamW.
    """
    torch.manual_seed(94)
    ids, alphabet = letters()
    model = LetterModel(alphabet)
    matrices = [parameter for parameter in model.blocks.parameters() if parameter.ndim == 2]
    chosen = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    optimizers = [Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=2e-3)]
    monitor = attach(model, optimizers, loss_fn=F.cross_entropy)
    generator = torch.Generator().manual_seed(2)
    losses = []
    for step in range(300):
        text = excerpts(ids, length=33, count=24, generator=generator)
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        for optimizer, rate in zip(optimizers, (0.01, 2e-3), strict=True):
            optimizer.param_groups[0]["lr"] = rate * min(1.0, (300 - step) / 100)
            optimizer.step()
        monitor.step(loss, batch=text)
        losses.append(loss.item())
    assert mean_of_last(losses) < 2.3, losses[0]


@case(source="Welling and Teh 2011, Stochastic Gradient Langevin Dynamics", tags=("bayesian", "noise", "odd"))
def wines_by_langevin(attach: Attach) -> None:
    """Noise is added to the weights after each step, so that they wander through the posterior: the loss stays above
    its minimum, and the mean of many predictions is the answer.
    """
    torch.manual_seed(95)
    data = torch.tensor(load_wine().data, dtype=torch.float32)
    x, y = (data - data.mean(0)) / data.std(0), torch.tensor(load_wine().target)
    order = torch.randperm(len(x))
    train, test = order[:120], order[120:]
    model = nn.Sequential(nn.Linear(13, 20), nn.Tanh(), nn.Linear(20, 3))
    rate = 4e-3
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, weight_decay=1.0)
    monitor = attach(model, optimizer)
    votes = torch.zeros(len(test), 3)
    for step, i in enumerate(draws(120, size=24, steps=500)):
        loss = 120 * F.cross_entropy(model(x[train[i]]), y[train[i]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=math.sqrt(2 * rate))
            if step >= 200:
                votes += model(x[test]).softmax(1)
        monitor.step(loss, batch=x[train[i]])
    assert (votes.argmax(1) == y[test]).float().mean() > 0.9
