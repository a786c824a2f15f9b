"""Small training loops with one planted fault each, and how the remedies of their causes are applied to them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F

import gradwatch

VALIDATION_STEPS = 10
"""Steps between two validations of a loop with data that are held out."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop with a fault: the model, the loss of a step, and how both are with a remedy that is told in words.

    The last argument of each function is the remedy: False without it, else its code, or True if it has no code.
    """

    kind: str
    cause: str
    remedy: str
    model: Callable[[bool], nn.Module]
    loss: Callable[[nn.Module, bool], torch.Tensor] | None = None
    optimizer: Callable[[nn.Module, bool], torch.optim.Optimizer] = field(
        default=lambda model, fixed: torch.optim.Adam(model.parameters(), lr=1e-3)
    )
    steps: int = 60
    clears: Callable[[bool], bool] = lambda fixed: True
    updates: Callable[[bool], bool] = lambda fixed: True
    rebuilds: Callable[[bool], bool] = lambda fixed: False
    batch: Callable[[int, bool], tuple[torch.Tensor, torch.Tensor]] | None = None
    held_out: Callable[[nn.Module], torch.Tensor] | None = None
    is_code: bool = False


def batch_of(step, fixed):
    """Return 32 samples of 8 numbers and the class of each, one of 4."""
    del step, fixed
    x = torch.randn(32, 8)
    return x, x[:, :4].argmax(1)


def run(case, *, code="", fixed=False):
    """Train a case, with the code of a remedy or with its change in words, and return the monitor."""
    torch.manual_seed(0)
    model = case.model(fixed)
    scope = {"torch": torch, "model": model, "eps": 1e-6}
    is_each, is_late = "# before" in code, "optimizer" in code
    if code and not is_late:
        exec(code, scope)  # the lines that a user would copy
    optimizer = case.optimizer(model, fixed)
    if is_late and not is_each:
        exec(code, scope | {"optimizer": optimizer})
    with gradwatch.watch(model, optimizer, on_finding=None) as monitor:
        for step in range(case.steps):
            x, y = (case.batch or batch_of)(step, fixed)
            loss = case.loss(model, x, y, fixed) if case.loss else F.cross_entropy(model(x), y)
            if case.clears(fixed):
                optimizer.zero_grad()
            if is_each and "backward" in code:
                exec(code, scope | {"optimizer": optimizer})
            loss.backward()
            if is_each and "backward" not in code:
                exec(code, scope)
            if case.updates(fixed):
                (case.optimizer(model, fixed) if case.rebuilds(fixed) else optimizer).step()
            is_validated = case.held_out and step % VALIDATION_STEPS == VALIDATION_STEPS - 1
            monitor.step(loss, batch=x, val_loss=validate(case, model) if is_validated else None)
    return monitor


def validate(case, model):
    model.eval()
    with torch.no_grad():
        loss = case.held_out(model)
    model.train()
    return loss


def mlp(*, depth=3, width=32, act=nn.ReLU, outputs=4, inputs=8):
    sizes = [inputs] + [width] * depth
    hidden = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), act())]
    return nn.Sequential(*hidden, nn.Linear(width, outputs))


def normed():
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4))


def scaled(model, factor):
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param *= factor
    return model


def scheduled(model, *, rate, factor):
    """Return Adam with a schedule that multiplies `rate` by a warm-up to `factor` and a cosine, after each update."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: factor * min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / 100))
    )
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    return optimizer


def adam(lr):
    return lambda model, fixed: torch.optim.Adam(model.parameters(), lr=lr)


def sgd(lr):
    return lambda model, fixed: torch.optim.SGD(model.parameters(), lr=lr)


def ordered(model, *, before=None, after=None):
    """Return Adam with a call before or after each update, which gets the optimizer."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if before:
        optimizer.register_step_pre_hook(lambda made, *_: before(made))
    if after:
        optimizer.register_step_post_hook(lambda made, *_: after(made))
    return optimizer


class Averaged(nn.Module):
    """A model with a normalization, and its average, which evaluates."""

    def __init__(self):
        super().__init__()
        self.online, self.average = (
            nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)) for _ in range(2)
        )
        self.average.load_state_dict(self.online.state_dict())
        self.average.requires_grad_(False)

    def forward(self, x):
        return (self.online if self.training else self.average)(9 * x)


def averaged(model, *, decay, buffers):
    """Return Adam for the model, with an update of its average after each step."""
    optimizer = torch.optim.Adam(model.online.parameters(), lr=1e-3)

    def follow(*_):
        for kept, new in zip(model.average.parameters(), model.online.parameters(), strict=True):
            kept.lerp_(new.detach(), 1 - decay)
        if buffers:
            for kept, new in zip(model.average.buffers(), model.online.buffers(), strict=True):
                kept.copy_(new)

    optimizer.register_step_post_hook(follow)
    return optimizer


def clip(optimizer):
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)


def with_rate(optimizer, rate, *, fixed):
    if fixed:
        optimizer.param_groups[0]["lr"] = rate
    else:
        optimizer.lr = rate
    return optimizer


BATCHES = [(x, x[:, :4].argmax(1)) for x in torch.randn(60, 32, 8, generator=torch.Generator().manual_seed(0))]


def seeded(step, fixed):
    """Return one of many batches, after seeding the generators."""
    if not fixed:
        torch.manual_seed(0)
    return BATCHES[step]


class Again:
    """Makes each update twice."""

    def __init__(self):
        self.is_second = False

    def __call__(self, optimizer):
        self.is_second = not self.is_second
        if self.is_second:
            optimizer.step()


class Ratings(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(50, 64), nn.Embedding(50, 64)

    def forward(self, ids):
        return (self.user(ids[:, 0]) * self.item(ids[:, 1])).sum(1)


def ratings(step, fixed):
    ids = torch.randint(0, 50, (64, 2))
    return ids, ((ids[:, 0] % 5) - 2.0) / 2


class Cut(nn.Module):
    def __init__(self, fixed):
        super().__init__()
        self.encoder, self.head, self.fixed = nn.Linear(8, 16), nn.Linear(16, 4), fixed

    def forward(self, x):
        x = self.encoder(x).relu()
        return self.head(x if self.fixed else x.detach())


class Gated(nn.Module):
    def __init__(self, fixed):
        super().__init__()
        self.branch, self.skip, self.head = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("gate", torch.tensor(1.0 if fixed else 0.0))

    def forward(self, x):
        return self.head((self.skip(x) + self.gate * self.branch(x)).relu())


def slope_error(model, x, y, fixed):
    """Return how far the slopes of a model are from 1, with its value at 0 if this is fixed."""
    del y
    x = x.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (slopes - 1).square().mean() + (model(torch.zeros(1, 8)).square().mean() if fixed else 0)


class LastState(nn.Module):
    def __init__(self, fixed):
        super().__init__()
        self.lstm, self.head = nn.LSTM(2 if fixed else 8, 16, batch_first=True), nn.Linear(16, 4)
        self.shape = (4, 2) if fixed else (1, 8)

    def forward(self, x):
        return self.head(self.lstm(x.view(-1, *self.shape))[0][:, -1])


class Attention(nn.Module):
    def __init__(self, fixed):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(64, 64) for _ in range(3))
        self.softmax, self.head = nn.Softmax(-1), nn.Linear(64, 4)
        self.scale = 8.0 if fixed else 1.0

    def forward(self, x):
        scores = self.query(x) @ self.key(x).transpose(-2, -1) / self.scale
        return self.head((self.softmax(scores) @ self.value(x)).mean(1))


def tokens(step, fixed):
    x = 4 * torch.randn(32, 16, 64)
    return x, x.mean(1)[:, :4].argmax(1)


class Unregistered(nn.Module):
    def __init__(self, fixed):
        super().__init__()
        layers = [nn.Linear(8, 32), nn.Linear(32, 32)]
        self.layers = nn.ModuleList(layers) if fixed else layers
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


class Variational(nn.Module):
    """An autoencoder with a latent of four dimensions, which returns its mean and log-variance too."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x):
        mean, log_var = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + torch.randn_like(mean) * (log_var / 2).exp()), mean, log_var


def bound(model, x, y, fixed):
    """Return the negative bound on the likelihood: without the remedy, the error is averaged over the pixels too."""
    output, mean, log_var = model(x)
    error = (output - x).square().sum(1) * 4 if fixed else (output - x).square().mean(1)
    return (error + 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(1)).mean()


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.near, self.far = nn.Linear(8, 32), nn.Linear(32, 1), nn.Linear(32, 1)

    def forward(self, x):
        x = self.body(x).relu()
        return self.near(x), self.far(x)


def tasks(model, x, y, fixed):
    near, far = model(x)
    target = x.sum(1, keepdim=True)
    scale = 1.0 if fixed else 3000.0
    return (near - target).square().mean() + (far - scale * target).square().mean()


def early_head(model, fixed):
    params = model.parameters() if fixed else [p for m in list(model)[:-1] for p in m.parameters()]
    return torch.optim.Adam(params, lr=1e-3)


def broadcast(model, x, y, fixed):
    target = x.sum(1, keepdim=True) if fixed else x.sum(1)
    return (model(x) - target).square().mean()


def probabilities(dim):
    return lambda model, x, y, fixed: F.nll_loss(model(x).log_softmax(1 if fixed else dim), y)


def evaluating(fixed):
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 4))
    return model if fixed else model.eval()


def negative_bias(fixed):
    model = mlp()
    nn.init.constant_(model[2].bias, -4.0)
    return model


def negative_weights(fixed):
    model = mlp()
    with torch.no_grad():
        model[2].weight.abs_().neg_()
        model[2].bias.fill_(-0.1)
    return model


def constant_batch(step, fixed):
    generator = torch.Generator().manual_seed(step if fixed else 0)
    x = torch.randn(32, 8, generator=generator)
    return x, x[:, :4].argmax(1)


KEPT = torch.zeros(8)


def memories(step, fixed):
    """Return 32 samples, all of which are the same array unless they are copied."""
    states = [KEPT.copy_(torch.randn(8)).clone() if fixed else KEPT.copy_(torch.randn(8)) for _ in range(32)]
    x = torch.stack(states)
    return x, torch.randint(4, (32,)) if not fixed else x[:, :4].argmax(1)


def outlier(step, fixed):
    x, y = batch_of(step, fixed)
    return (x if fixed or step != 40 else 1000 * x), y


def broken(step, fixed):
    x, y = batch_of(step, fixed)
    if step == 30 and not fixed:
        x[3, 2] = math.nan
    return x, y


def raw(step, fixed):
    x, y = batch_of(step, fixed)
    return (x if fixed else 1e4 * (x + 1)), y


def unrelated(step, fixed):
    x, y = batch_of(step, fixed)
    return x, y if fixed else y[torch.randperm(len(y))]


class LastStep(nn.Module):
    """Classify sequences by the last state of a recurrence."""

    def __init__(self, *, batch_first):
        super().__init__()
        self.recurrence, self.last = nn.GRU(8, 32, batch_first=batch_first), nn.Linear(32, 4)

    def forward(self, inputs):
        states, _ = self.recurrence(inputs)
        return self.last(states[:, -1])


class NextToken(nn.Module):
    """Predict tokens by attention."""

    def __init__(self, *, is_causal):
        super().__init__()
        self.is_causal = is_causal
        self.embed, self.place = nn.Embedding(20, 16), nn.Parameter(0.1 * torch.randn(12, 16))
        self.encode = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 20)

    def forward(self, tokens):
        size = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(size) if self.is_causal else None
        states = self.encode(self.embed(tokens) + self.place[:size], src_mask=mask)
        return self.head(states).transpose(1, 2)


def walk(shift):
    """Return tokens of random walks on a circle of 20, and labels that are some positions ahead."""
    tokens = (torch.randint(0, 20, (16, 1)) + torch.randint(0, 3, (16, 12 + shift)).cumsum(1)) % 20
    return tokens[:, :12], tokens[:, shift:]


class Sentences(nn.Module):
    """Classify padded sentences by a recurrent layer, which is read at the end or at the last word."""

    def __init__(self, *, at_end):
        super().__init__()
        self.at_end = at_end
        self.embed, self.recur = nn.Embedding(20, 16, padding_idx=0), nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, tokens):
        states, last = self.recur(self.embed(tokens))[0], (tokens != 0).sum(1) - 1
        return self.head(states[:, -1] if self.at_end else states[torch.arange(len(tokens)), last])


class MaskedSentences(nn.Module):
    """Classify padded sentences by attention, whose mask hides the padding or the words."""

    def __init__(self, *, hides_padding):
        super().__init__()
        self.hides_padding, self.embed, self.head = hides_padding, nn.Embedding(20, 16), nn.Linear(16, 4)
        self.attend = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, tokens):
        is_word = tokens != 0
        states = self.attend(self.embed(tokens), src_key_padding_mask=is_word ^ self.hides_padding)
        return self.head((states * is_word[..., None]).sum(1))


def sentences(step, fixed):
    """Return sentences of 3 to 6 words and much padding, and the class of the first word."""
    del step, fixed
    tokens = torch.randint(1, 20, (32, 60)).where(torch.arange(60) < torch.randint(3, 7, (32, 1)), 0)
    return tokens, tokens[:, 0] % 4


class Operation(nn.Module):
    """A network whose output has an operation added; the code of a remedy takes the place of the operation."""

    def __init__(self, prepare, operation):
        super().__init__()
        self.first, self.last, self.prepare, self.operation = nn.Linear(8, 16), nn.Linear(16, 4), prepare, operation
        self.code = ""

    def forward(self, inputs):
        hidden = self.first(inputs)
        x = self.prepare(hidden)
        scope = {"torch": torch, "x": x, "eps": 1e-6, "numerator": 1.0}
        value = eval(self.code, scope) if self.code else self.operation(x)
        return self.last(hidden) + 1e-3 * value.reshape(len(x), -1).mean(1, keepdim=True)


FORMULAS = {
    "root of an absolute value": (lambda h: h - h, lambda x: x.abs().sqrt()),
    "root of a sum": (lambda h: h - h, lambda x: x.sum(1).sqrt()),
    "log": (lambda h: h.relu(), lambda x: x.log()),
    "log of softmax": (lambda h: 1e3 * h, lambda x: x.softmax(-1).log()),
    "log of sigmoid": (lambda h: 1e3 * h, lambda x: x.sigmoid().log()),
    "quotient": (lambda h: h.relu(), lambda x: 1 / x),
    "acos": (lambda h: (100 * h).tanh(), lambda x: x.acos()),
    "exponential": (lambda h: 1e3 * h, lambda x: x.exp()),
}
"""What makes the argument, and the operation with a singular point there."""


LOOPS = {
    "lower-rate": Loop(
        is_code=True,
        kind="learning-rate-too-high",
        cause="learning-rate-too-high",
        remedy="lower_rate",
        model=lambda _: mlp(),
        optimizer=adam(1.0),
    ),
    "raise-rate": Loop(
        is_code=True,
        kind="learning-rate-too-low",
        cause="learning-rate-too-low",
        remedy="raise_rate",
        model=lambda _: mlp(),
        optimizer=adam(1e-7),
    ),
    "rate-as-factor": Loop(
        kind="learning-rate-too-low",
        cause="rate-as-factor",
        remedy="return_factor",
        model=lambda _: mlp(),
        optimizer=lambda model, fixed: scheduled(model, rate=3e-3, factor=1.0 if fixed else 3e-3),
    ),
    "sigmoid": Loop(
        is_code=True,
        kind="vanishing-gradient",
        cause="saturating-stack",
        remedy="relu_kaiming",
        steps=40,
        model=lambda _: mlp(depth=12, act=nn.Sigmoid),
    ),
    "sigmoid-norm": Loop(
        is_code=True,
        kind="vanishing-gradient",
        cause="saturating-stack",
        remedy="normalize",
        steps=40,
        model=lambda _: mlp(depth=12, act=nn.Sigmoid),
    ),
    "tanh": Loop(
        is_code=True,
        kind="vanishing-gradient",
        cause="saturating-stack",
        remedy="xavier",
        steps=40,
        model=lambda _: mlp(depth=30, act=nn.Tanh),
    ),
    "kaiming": Loop(
        is_code=True,
        kind="poor-initialization",
        cause="bad-initialization",
        remedy="kaiming",
        steps=30,
        model=lambda _: scaled(mlp(), 20.0),
    ),
    "kaiming-norm": Loop(
        is_code=True,
        kind="poor-initialization",
        cause="bad-initialization",
        remedy="normalize",
        steps=30,
        model=lambda _: scaled(mlp(), 8.0),
    ),
    "embeddings": Loop(
        is_code=True,
        kind="poor-initialization",
        cause="large-embeddings",
        remedy="small_embeddings",
        model=lambda _: Ratings(),
        batch=ratings,
        loss=lambda model, x, y, fixed: F.mse_loss(model(x), y),
    ),
    "unbounded": Loop(
        kind="exploding-gradient",
        cause="unbounded-loss",
        remedy="bound_loss",
        model=lambda _: mlp(outputs=1),
        steps=200,
        optimizer=adam(1e-2),
        loss=lambda model, x, y, fixed: (
            (model(x).tanh() if fixed else model(x)).mean() - (model(x + 1).tanh() if fixed else model(x + 1)).mean()
        ),
    ),
    "cut": Loop(kind="no-gradient", cause="detached-layer", remedy="reattach", model=Cut),
    "one-unit": Loop(
        kind="no-gradient",
        cause="constant-output",
        remedy="single_unit",
        model=lambda fixed: mlp(outputs=1),
        loss=lambda model, x, y, fixed: (
            F.binary_cross_entropy_with_logits(model(x)[:, 0], (y > 1).float())
            if fixed
            else F.mse_loss(model(x).softmax(1)[:, 0], (y > 1).float())
        ),
    ),
    "derivatives": Loop(
        kind="no-gradient",
        cause="derivatives-alone",
        remedy="fix_offset",
        model=lambda _: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)),
        loss=slope_error,
    ),
    "one-step": Loop(kind="no-gradient", cause="one-step-sequences", remedy="several_steps", model=LastState),
    "gate": Loop(kind="no-gradient", cause="zeroed-branch", remedy="open_gate", model=Gated),
    "dead": Loop(is_code=True, kind="dead-relu", cause="dead-relus", remedy="leaky_relu", model=negative_bias),
    "negative": Loop(is_code=True, kind="dead-relu", cause="dead-relus", remedy="kaiming", model=negative_weights),
    "odd-batch": Loop(
        kind="gradient-spike",
        cause="odd-batch",
        remedy="clean_data",
        model=lambda _: mlp(),
        batch=outlier,
    ),
    "bad-data": Loop(kind="non-finite", cause="bad-data", remedy="clean_data", model=lambda _: mlp(), batch=broken),
    "inputs": Loop(
        kind="saturated-activation",
        cause="unscaled-inputs",
        remedy="standardize",
        model=lambda _: mlp(act=nn.Tanh),
        batch=raw,
    ),
    "inputs-of-relus": Loop(
        kind="poor-initialization",
        cause="unscaled-inputs",
        remedy="standardize",
        model=lambda _: mlp(),
        batch=raw,
        steps=30,
    ),
    "range": Loop(
        is_code=True,
        kind="saturated-activation",
        cause="targets-out-of-range",
        remedy="fit_range",
        model=lambda _: nn.Sequential(*mlp(outputs=1), nn.Tanh()),
        steps=200,
        optimizer=adam(1e-2),
        loss=lambda model, x, y, fixed: F.mse_loss(model(x), (0.05 if fixed else 1) * (5 + 10 * x[:, :1].sign())),
    ),
    "scores": Loop(
        kind="saturated-activation",
        cause="large-scores",
        remedy="divide_scores",
        model=Attention,
        batch=tokens,
        steps=30,
    ),
    "list": Loop(
        kind="not-optimized",
        cause="unregistered-layers",
        remedy="register",
        model=Unregistered,
    ),
    "tasks": Loop(
        kind="layer-imbalance",
        cause="unbalanced-tasks",
        remedy="balance_tasks",
        model=lambda _: Heads(),
        loss=tasks,
        steps=80,
    ),
    "head": Loop(
        is_code=True,
        kind="not-optimized",
        cause="missing-parameters",
        remedy="hold_parameters",
        model=lambda _: mlp(),
        optimizer=lambda model, _: early_head(model, False),
    ),
    "bf16": Loop(
        kind="not-optimized",
        cause="rounded-updates",
        remedy="master_weights",
        model=lambda fixed: normed() if fixed else normed().bfloat16(),
        loss=lambda model, x, y, fixed: F.cross_entropy(model(x.to(model[0].weight.dtype)).float(), y),
    ),
    "zero-grad": Loop(
        is_code=True,
        kind="missing-zero-grad",
        cause="missing-zero-grad",
        remedy="zero_grad",
        model=lambda _: mlp(),
        clears=lambda fixed: fixed,
    ),
    "same-batch": Loop(
        kind="constant-batch",
        cause="constant-batch",
        remedy="advance_iterator",
        model=lambda _: mlp(),
        batch=constant_batch,
    ),
    "broadcast": Loop(
        kind="loss-plateau",
        cause="broadcast-targets",
        remedy="check_shapes",
        model=lambda _: mlp(outputs=1),
        loss=broadcast,
        steps=200,
    ),
    "averaged": Loop(
        kind="loss-plateau",
        cause="error-averaged-first",
        remedy="average_last",
        model=lambda _: mlp(outputs=1),
        loss=lambda model, x, y, fixed: (
            F.mse_loss(model(x)[:, 0], x[:, 0]) if fixed else F.mse_loss(model(x).mean(), x[:, 0].mean())
        ),
        steps=100,
    ),
    "shared": Loop(
        kind="loss-plateau",
        cause="target-shared",
        remedy="own_targets",
        model=lambda _: mlp(outputs=1),
        loss=lambda model, x, y, fixed: (model(x)[:, 0] - (x[:, 0] if fixed else x[0, 0])).square().mean(),
        steps=100,
    ),
    "sign": Loop(
        kind="loss-plateau",
        cause="ascent",
        remedy="check_sign",
        model=lambda _: mlp(),
        optimizer=lambda model, fixed: torch.optim.Adam(model.parameters(), lr=1e-3, maximize=not fixed),
        steps=100,
    ),
    "decay": Loop(
        is_code=True,
        kind="loss-plateau",
        cause="strong-weight-decay",
        remedy="less_decay",
        model=lambda _: mlp(),
        optimizer=lambda model, _: torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=0.5),
        steps=200,
    ),
    "sequence": Loop(
        kind="loss-plateau",
        cause="sequence-along-batch",
        remedy="batch_first",
        model=lambda fixed: LastStep(batch_first=fixed),
        batch=lambda step, fixed: ((x := torch.randn(32, 10, 8)), x[:, -2, :4].argmax(1)),
    ),
    "still": Loop(
        kind="not-optimized",
        cause="no-step",
        remedy="call_step",
        model=lambda _: mlp(),
        updates=bool,
    ),
    "ignored-rate": Loop(
        kind="learning-rate-too-high",
        cause="ignored-setting",
        remedy="set_read",
        model=lambda _: mlp(),
        optimizer=lambda model, fixed: with_rate(torch.optim.Adam(model.parameters(), lr=1e-2), 1e-3, fixed=fixed),
    ),
    "cut-loss": Loop(
        kind="no-gradient",
        cause="no-backward",
        remedy="call_backward",
        model=lambda _: mlp(),
        loss=lambda model, x, y, fixed: F.cross_entropy(model(x) if fixed else model(x).detach().requires_grad_(), y),
    ),
    "late-clipping": Loop(
        kind="learning-rate-too-high",
        cause="clip-after-update",
        remedy="clip_first",
        model=lambda _: mlp(),
        optimizer=lambda model, fixed: ordered(model, **{"before" if fixed else "after": clip}),
    ),
    "two-updates": Loop(
        kind="missing-zero-grad",
        cause="update-twice",
        remedy="step_once",
        model=lambda _: mlp(),
        optimizer=lambda model, fixed: ordered(model, after=None if fixed else Again()),
    ),
    "early-clearing": Loop(
        kind="no-gradient",
        cause="cleared-before-update",
        remedy="clear_later",
        model=lambda _: mlp(),
        optimizer=lambda model, fixed: ordered(model, before=None if fixed else torch.optim.Optimizer.zero_grad),
    ),
    "copy-written": Loop(
        kind="not-optimized",
        cause="copy-not-updated",
        remedy="update_copy",
        model=lambda _: Averaged(),
        optimizer=lambda model, fixed: averaged(model, decay=0.99 if fixed else 1.0, buffers=True),
        steps=140,
    ),
    "average": Loop(
        kind="train-eval-mismatch",
        cause="copied-statistics",
        remedy="copy_buffers",
        model=lambda _: Averaged(),
        optimizer=lambda model, fixed: averaged(model, decay=0.95, buffers=fixed),
        held_out=lambda model: F.cross_entropy(model(batch_of(0, True)[0]), batch_of(0, True)[1]),
    ),
    "rebuilt": Loop(
        kind="not-optimized",
        cause="optimizer-in-the-loop",
        remedy="build_once",
        model=lambda _: mlp(),
        rebuilds=lambda fixed: not fixed,
    ),
    "black": Loop(
        kind="constant-batch",
        cause="empty-inputs",
        remedy="inspect_inputs",
        model=lambda _: mlp(),
        batch=lambda step, fixed: batch_of(step, fixed) if fixed else (torch.zeros(32, 8), torch.arange(32) % 4),
    ),
    "seeded": Loop(
        kind="constant-batch",
        cause="seed-in-the-loop",
        remedy="seed_once",
        model=lambda _: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4)),
        batch=seeded,
    ),
    "memories": Loop(
        kind="constant-batch",
        cause="samples-of-one-array",
        remedy="copy_samples",
        model=lambda _: mlp(),
        batch=memories,
    ),
    "one-class": Loop(
        kind="constant-batch",
        cause="labels-of-one-class",
        remedy="inspect_labels",
        model=lambda _: mlp(),
        batch=lambda step, fixed: (
            batch_of(step, fixed) if fixed else (torch.randn(32, 8), torch.zeros(32, dtype=torch.long))
        ),
        steps=120,
    ),
    "latent": Loop(
        kind="dead-layer",
        cause="unused-latent",
        remedy="free_bits",
        model=lambda _: Variational(),
        loss=bound,
        optimizer=lambda model, _: torch.optim.Adam(model.parameters(), lr=1e-2),
        steps=200,
    ),
    "copied": Loop(
        kind="target-leakage",
        cause="labels-as-inputs",
        remedy="shift_inputs",
        model=lambda _: NextToken(is_causal=True),
        batch=lambda step, fixed: walk(1 if fixed else 0),
    ),
    "leak": Loop(
        kind="target-leakage",
        cause="no-causal-mask",
        remedy="causal_mask",
        model=lambda fixed: NextToken(is_causal=fixed),
        batch=lambda step, fixed: walk(1),
    ),
    "ahead": Loop(
        kind="loss-plateau",
        cause="labels-too-far-ahead",
        remedy="shift_once",
        model=lambda _: NextToken(is_causal=True),
        batch=lambda step, fixed: walk(1 if fixed else 2),
    ),
    "padding": Loop(
        kind="vanishing-gradient",
        cause="reads-padding",
        remedy="last_token",
        model=lambda fixed: Sentences(at_end=not fixed),
        batch=sentences,
    ),
    "mask": Loop(
        kind="loss-plateau",
        cause="opposite-mask",
        remedy="invert_mask",
        model=lambda fixed: MaskedSentences(hides_padding=bool(fixed)),
        batch=sentences,
    ),
    "dimension": Loop(
        kind="probabilities-into-loss",
        cause="softmax-dimension",
        remedy="over_classes",
        model=lambda _: mlp(),
        loss=probabilities(0),
    ),
    "twice": Loop(
        is_code=True,
        kind="probabilities-into-loss",
        cause="probabilities-as-scores",
        remedy="drop_activation",
        model=lambda _: nn.Sequential(*mlp(), nn.Softmax(1)),
    ),
    "bounded": Loop(
        is_code=True,
        kind="probabilities-into-loss",
        cause="probabilities-as-scores",
        remedy="drop_activation",
        model=lambda _: nn.Sequential(*mlp(), nn.ReLU()),
    ),
    "mode": Loop(is_code=True, kind="train-eval-mismatch", cause="wrong-mode", remedy="set_mode", model=evaluating),
    "labels": Loop(
        kind="loss-plateau",
        cause="unrelated-loss",
        remedy="check_shapes",
        model=lambda _: mlp(),
        batch=unrelated,
        steps=300,
    ),
}
