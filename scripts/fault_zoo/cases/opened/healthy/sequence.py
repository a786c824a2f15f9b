"""Text, series, attention, mixed precision, parameter-efficient tuning. All of these runs are fine."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from scripts.fault_zoo.cases.healthy_data import GPT, characters, digits, pretrained_gpt, shuffled, windows
from scripts.fault_zoo.protocol import Attach, case


@case(source="PyTorch AMP recipe with bfloat16 on CPU", tags=("gpt", "amp", "bf16"))
def gpt_autocast_bf16(attach: Attach) -> None:
    """Autocast to bfloat16, no scaler needed; gradients carry eight bits of mantissa and many are exactly equal."""
    torch.manual_seed(1)
    text, vocabulary = characters(seed=1)
    model = GPT(vocabulary, dim=48, tie=False, context=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    monitor = attach(model, optimizer)
    for _step in range(160):
        x, y = windows(text, 12, 32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        monitor.step(loss, batch=x)
    assert loss.item() < 1.6, loss.item()


@case(
    source="PyTorch AMP recipe: unscale_ before clipping, with accumulation",
    tags=("amp", "fp16", "scaler", "accumulation", "clipping"),
)
def fp16_scaler_unscale_clip_accumulate(attach: Attach) -> None:
    """GradScaler with two micro-batches, unscale_ and clipping; in between the scale is doubled on its interval and a
    step may be skipped.
    """
    torch.manual_seed(3)
    x, y, test_x, test_y = digits()
    x, test_x = x.flatten(1), test_x.flatten(1)
    model = nn.Sequential(
        nn.Linear(64, 192),
        nn.LayerNorm(192),
        nn.GELU(),
        nn.Linear(192, 192),
        nn.LayerNorm(192),
        nn.GELU(),
        nn.Linear(192, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", growth_interval=40)
    loss_fn, accumulate = nn.CrossEntropyLoss(), 2
    monitor = attach(model, optimizer, scaler=scaler, accumulate=accumulate, loss_fn=loss_fn)
    loader = shuffled(len(x), 48, seed=3)
    for _ in range(260):
        for _ in range(accumulate):
            idx = next(loader)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_fn(model(x[idx]), y[idx]) / accumulate
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        monitor.step(loss * accumulate, batch=x[idx])
    assert (model(test_x).argmax(1) == test_y).float().mean() > 0.93


@case(source="torch.utils.checkpoint, non-reentrant", tags=("gpt", "checkpointing"))
def gpt_activation_checkpointing(attach: Attach) -> None:
    """Activation checkpointing: every block's forward runs a second time inside backward."""
    torch.manual_seed(4)
    text, vocabulary = characters(seed=4)
    model = GPT(vocabulary, dim=48, depth=3, context=40, checkpointing=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, 1.0, 20)
    monitor = attach(model, optimizer)
    for _ in range(150):
        x, y = windows(text, 12, 40)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        monitor.step(loss, batch=x)
    assert loss.item() < 1.6, loss.item()


@case(
    source="Vaswani et al. 2017: post-LN encoder with inverse-square-root warmup",
    tags=("post-ln", "transformer", "warmup"),
)
def post_ln_transformer_warmup(attach: Attach) -> None:
    """Post-LN encoder with the original schedule: tiny rate at first, top-heavy gradients, then it learns."""
    torch.manual_seed(5)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(200, 64)
            self.position = nn.Parameter(0.1 * torch.randn(24, 64))
            layer = nn.TransformerEncoderLayer(64, 4, 128, 0.1, batch_first=True, norm_first=False)
            self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
            self.out = nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.encoder(self.embed(x) + self.position).mean(1))

    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: 64**-0.5 * 0.25 * min((s + 1) ** -0.5, (s + 1) * 60**-1.5)
    )
    monitor = attach(model, optimizer)
    topics = torch.softmax(1.1 * torch.randn(10, 200), 1)
    for _ in range(300):
        y = torch.randint(0, 10, (20,))
        x = torch.multinomial(topics[y], 24, replacement=True)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        monitor.step(loss, batch=x)
    assert loss.item() < 0.5, loss.item()


class PackedGRU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 32, padding_idx=0)
        self.gru = nn.GRU(32, 96, batch_first=True, bidirectional=True)
        self.out = nn.Linear(192, 5)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        _, h = self.gru(packed)
        return self.out(torch.cat([h[0], h[1]], 1))


@case(source="packed sequences of length 2 to 40, padding_idx", tags=("gru", "variable-length", "natural-zeros"))
def gru_variable_lengths(attach: Attach) -> None:
    """Sequences of very different length, so gradient norms differ a lot from batch to batch; the padding row never has
    a gradient.
    """
    torch.manual_seed(8)
    model = PackedGRU()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    loss_fn = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    history = []
    for _ in range(320):
        longest = int(torch.randint(6, 41, ()))
        lengths = torch.randint(2, longest + 1, (32,))
        lengths[0] = longest
        tokens = torch.randint(1, 13, (32, longest)) * (torch.arange(longest)[None] < lengths[:, None])
        y = ((tokens == 7).sum(1)).clamp(max=4)  # how many sevens
        loss = loss_fn(model(tokens, lengths), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        history.append(loss.item())
        monitor.step(loss, batch=tokens)
    assert np.mean(history[-30:]) < 0.25, np.mean(history[-30:])


class Seq2Seq(nn.Module):
    def __init__(self, width: int = 112) -> None:
        super().__init__()
        self.embed = nn.Embedding(14, width)
        self.encoder, self.decoder = nn.GRU(width, width, batch_first=True), nn.GRU(width, width, batch_first=True)
        self.query, self.out = nn.Linear(width, width), nn.Linear(2 * width, 14)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, h = self.encoder(self.embed(source))
        states, _ = self.decoder(self.embed(target), h)
        attention = torch.softmax(self.query(states) @ memory.transpose(1, 2) / 10.6, -1)
        return self.out(torch.cat([states, attention @ memory], -1))


@case(
    source="sequence-to-sequence with attention and a length curriculum",
    tags=("seq2seq", "attention", "curriculum", "loss-jumps"),
)
def seq2seq_attention_curriculum(attach: Attach) -> None:
    """Reversing words whose length grows in stages: the loss jumps up at each stage, and the attention becomes one-hot,
    which is the solution.
    """
    torch.manual_seed(9)
    model = Seq2Seq()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor = attach(model, optimizer)
    for step in range(360):
        length = (4, 6, 9)[step // 120]
        source = torch.randint(2, 14, (48, length))
        goal = source.flip(1)
        given = torch.cat([torch.ones(48, 1, dtype=torch.long), goal[:, :-1]], 1)
        loss = F.cross_entropy(model(source, given).flatten(0, 1), goal.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        monitor.step(loss, batch=source)
    assert loss.item() < 0.3, loss.item()


class TopOneMoE(nn.Module):
    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        p = self.router(x).softmax(-1)
        weight, pick = p.max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            at = pick == i
            if at.any():
                out[at] = weight[at, None] * expert(x[at])
        share = F.one_hot(pick, len(self.experts)).float().mean(0)
        return out, len(self.experts) * (share * p.mean(0)).sum()


@case(
    source="Switch Transformer routing, Fedus et al. 2021, with load-balancing loss",
    tags=("moe", "routing", "natural-zeros"),
)
def moe_top1_routing(attach: Attach) -> None:
    """Top-1 routing over 8 experts on small batches: an expert without tokens has no gradient in that step."""
    torch.manual_seed(11)
    domain = torch.randn(8, 24, 24) / 5

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.moe, self.norm, self.out = (
                nn.Linear(32, 96),
                TopOneMoE(96, 8),
                nn.LayerNorm(96),
                nn.Linear(96, 24),
            )

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.inp(x)
            routed, balance = self.moe(self.norm(h))
            return self.out(h + routed), balance

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    history = []
    for _ in range(500):
        kind, v = torch.randint(0, 8, (48,)), torch.randn(48, 24)
        y = torch.einsum("bi,bij->bj", v, domain[kind])
        prediction, balance = model(torch.cat([v, F.one_hot(kind, 8).float()], 1))
        loss = F.mse_loss(prediction, y) + 0.01 * balance
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        history.append(loss.item())
        monitor.step(loss)
    assert np.mean(history[-40:]) < 0.5 * np.mean(history[:10]), (np.mean(history[:10]), np.mean(history[-40:]))


@case(source="BitFit, Ben Zaken et al. 2021: only biases and LayerNorms train", tags=("frozen", "transfer", "bitfit"))
def bitfit_only_biases(attach: Attach) -> None:
    """Only biases and norms train, 2% of the parameters; all weight matrices are frozen with requires_grad=False."""
    model, text, vocabulary = pretrained_gpt(13, dim=48, context=32, tie=False)
    torch.manual_seed(130)
    for _name, p in model.named_parameters():
        p.requires_grad_(p.ndim == 1)
    text = torch.where(text % 5 == 0, (text + 4) % vocabulary, text)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    monitor = attach(model, optimizer)
    history = []
    for _ in range(180):
        x, y = windows(text, 12, 32)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
        monitor.step(loss, batch=x)
    assert np.mean(history[-20:]) < 0.75 * np.mean(history[:3]), (history[:3], history[-3:])


@case(
    source="word2vec, Mikolov et al. 2013: nn.Embedding(sparse=True) with Adagrad",
    tags=("embedding", "sparse-gradients", "adagrad"),
)
def word2vec_sparse_gradients(attach: Attach) -> None:
    """Skip-gram with negative sampling: the gradients are torch sparse tensors that hold only the rows of the words in
    the batch.
    """
    torch.manual_seed(14)
    rng = np.random.RandomState(14)
    vocabulary, groups = 4000, 40
    popularity = 1 / np.arange(1, vocabulary + 1) ** 0.8
    group = rng.randint(0, groups, vocabulary)
    centre: Any = rng.choice(vocabulary, 60000, p=popularity / popularity.sum())
    context = np.empty_like(centre)
    for g in range(groups):
        members = np.flatnonzero(group == g)
        at = np.flatnonzero(group[centre] == g)
        context[at] = rng.choice(members, len(at), p=popularity[members] / popularity[members].sum())
    centre, context = torch.tensor(centre), torch.tensor(context)

    class SkipGram(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.out = nn.Embedding(vocabulary, 48, sparse=True), nn.Embedding(vocabulary, 48, sparse=True)
            nn.init.uniform_(self.inp.weight, -0.5 / 48, 0.5 / 48)
            nn.init.zeros_(self.out.weight)

        def forward(self, c: Any, w: Any, negative: Any) -> Any:
            v = self.inp(c)
            positive = F.logsigmoid((v * self.out(w)).sum(1))
            return -(positive + F.logsigmoid(-(self.out(negative) @ v[:, :, None]).squeeze(2)).sum(1)).mean()

    model = SkipGram()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.3)
    monitor = attach(model, optimizer)
    loader, history = shuffled(len(centre), 512, seed=14), []
    for _ in range(400):
        idx = next(loader)
        loss = model(centre[idx], context[idx], torch.randint(0, vocabulary, (512, 5)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
        monitor.step(loss, batch=centre[idx])
    assert np.mean(history[-30:]) < 0.7 * history[0], (history[0], np.mean(history[-30:]))


class TCN(nn.Module):
    def __init__(self, width: int = 24, levels: int = 5) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(1 if i == 0 else width, width, 3, dilation=2**i) for i in range(levels))
        self.out = nn.Conv1d(width, 1, 1)

    def forward(self, x: Any) -> Any:
        for i, conv in enumerate(self.convs):
            h = F.relu(conv(F.pad(x, (2 * 2**i, 0))))
            x = h if i == 0 else x + h
        return self.out(x)


@case(source="temporal convolution forecaster, Bai et al. 2018", tags=("series", "cnn", "noise-floor"))
def tcn_forecast_noise_floor(attach: Attach) -> None:
    """One-step forecast of a noisy series: the loss falls to the noise level in the first third and rightly stays
    there.
    """
    torch.manual_seed(15)
    t = torch.arange(20000) / 12
    series = torch.sin(t) + 0.6 * torch.sin(0.31 * t + 1) + 0.3 * torch.sin(2.3 * t) + 0.35 * torch.randn(20000)
    model = TCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)
    history = []
    for _ in range(260):
        start = torch.randint(0, 19800, (16,))
        chunk = torch.stack([series[s : s + 129] for s in start])
        x, y = chunk[:, None, :-1], chunk[:, None, 1:]
        loss = F.mse_loss(model(x)[..., 64:], y[..., 64:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
        monitor.step(loss, batch=x)
    assert np.mean(history[-50:]) < 0.2, np.mean(history[-50:])


class Highway(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.transform, self.gate = nn.Linear(width, width), nn.Linear(width, width)
        self.act, self.sigmoid = nn.ReLU(), nn.Sigmoid()
        nn.init.constant_(self.gate.bias, -3.0)

    def forward(self, x: Tensor) -> Tensor:
        g = self.sigmoid(self.gate(x))
        return g * self.act(self.transform(x)) + (1 - g) * x


@case(source="Highway networks, Srivastava et al. 2015: gate bias -3", tags=("highway", "sigmoid", "deep"))
def highway_closed_gates(attach: Attach) -> None:
    """Twelve highway layers whose sigmoid gates start almost shut at -3 by design: small gradients inside, information
    passes straight through.
    """
    torch.manual_seed(17)
    x, y, test_x, test_y = digits()
    x, test_x = x.flatten(1), test_x.flatten(1)
    model = nn.Sequential(nn.Linear(64, 96), *[Highway(96) for _ in range(12)], nn.Linear(96, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader = shuffled(len(x), 64, seed=17)
    for _ in range(260):
        idx = next(loader)
        loss = loss_fn(model(x[idx]), y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[idx])
    assert (model(test_x).argmax(1) == test_y).float().mean() > 0.93


@case(source="log_softmax output with nn.NLLLoss (PyTorch MNIST example)", tags=("nll", "bag-of-words", "domain-shift"))
def nll_loss_new_domain_midway(attach: Attach) -> None:
    """The model ends in log_softmax and uses NLLLoss, which is right. Half way a second domain is mixed in: the loss
    triples, then recovers.
    """
    torch.manual_seed(18)
    rng = np.random.RandomState(18)
    mix = torch.tensor(rng.normal(size=(2, 60, 60)) / 7, dtype=torch.float32)
    centres = 1.5 * torch.randn(2, 8, 60)
    model = nn.Sequential(
        nn.Linear(60, 320),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(320, 320),
        nn.ReLU(),
        nn.Linear(320, 8),
        nn.LogSoftmax(1),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_fn = nn.NLLLoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    for step in range(500):
        y = torch.randint(0, 8, (96,))
        domain = (torch.rand(96) < 0.5).long() if step >= 250 else torch.zeros(96, dtype=torch.long)
        x = torch.einsum("bi,bij->bj", centres[domain, y] * 0.5 + 1.1 * torch.randn(96, 60), mix[domain])
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)
    model.eval()
    assert (model(x).argmax(1) == y).float().mean() > 0.85
