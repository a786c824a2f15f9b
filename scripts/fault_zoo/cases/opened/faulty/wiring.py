"""How the script is put together: what reaches the graph, the optimizer, the loss, the right mode."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from scripts.fault_zoo.cases.faulty_data import (
    batches,
    big_digits,
    chars,
    communities,
    digits,
    houses,
    setup,
    shapes,
    split,
    standardize,
    table,
    tokens,
    windows,
)
from scripts.fault_zoo.protocol import Attach, case

# ----------------------------------------------------------------------------------------------------- no-gradient


class HashCoder(nn.Module):
    def __init__(self, dim: int = 64, bits: int = 24) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(dim, 128), nn.ReLU(), nn.Linear(128, bits), nn.Sigmoid())
        self.decoder = nn.Sequential(nn.Linear(bits, 128), nn.ReLU(), nn.Linear(128, dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.round(self.encoder(x)))


@case(
    fault="no-gradient",
    layers=("encoder",),
    onset=0,
    also=("dead-layer",),
    source=(
        "Justin-Tan/generative-compression#51 and #27: rounding keeps the gradient from the encoder (no "
        "straight-through estimator), ported"
    ),
)
def digits_hash_codes(attach: Attach) -> None:
    """The code is rounded to bits between encoder and decoder with no straight-through gradient; the encoder stays as
    it was drawn.
    """
    setup(130)
    x, _ = digits()
    x = x.flatten(1)
    model = HashCoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.MSELoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for (xb,) in batches(x, size=128, steps=300):
        loss = criterion(model(xb), xb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=xb)


class EncoderLayer(nn.Module):
    def __init__(self, dim: Any, heads: int = 4) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Any) -> Any:
        h = self.ln1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.ff(self.ln2(x))


class TextClassifier(nn.Module):
    def __init__(self, vocab: Any, classes: Any, dim: int = 48, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(EncoderLayer(dim) for _ in range(depth))
        self.head = nn.Linear(dim, classes)

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return self.head(x.mean(1))


@case(
    fault="no-gradient",
    layers=("layers",),
    onset=0,
    also=("dead-layer",),
    tags=("checkpointing",),
    source=(
        "huggingface/transformers#21381, #23170: reentrant checkpointing with frozen embeddings, 'None of the inputs "
        "have requires_grad=True'"
    ),
)
def topics_frozen_embeddings(attach: Attach) -> None:
    """With the embeddings frozen, reentrant gradient checkpointing sees no input that needs a gradient and drops the
    encoder from the graph.
    """
    setup(132)
    ids, _lengths, y = tokens(3000, 16)
    model = TextClassifier(60, 4)
    model.embed.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for xb, yb in batches(ids, y, size=32, steps=150):
        loss = criterion(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=xb)


class PriceAndClass(nn.Module):
    """Two heads, and for each loss a learned log-variance."""

    def __init__(self, dim: int, hidden: int = 96) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.price = nn.Linear(hidden, 1)
        self.large = nn.Linear(hidden, 1)
        self.log_var = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        return self.price(h).squeeze(1), self.large(h).squeeze(1)


@case(
    fault="no-gradient",
    layers=("log_var",),
    onset=0,
    also=("dead-layer", "not-optimized"),
    tags=("subtle",),
    source="own construction: Kendall et al. 2018's learned loss weights, taken out of the graph by .item()",
)
def house_prices_two_losses(attach: Attach) -> None:
    """The learned loss weights enter through .item(), as numbers: they never get a gradient."""
    setup(133)
    x, price = houses()
    x, y = standardize(x), (price - price.mean()) / price.std()
    large = (x[:, 1] > 0.5).float()
    model = PriceAndClass(x.shape[1])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = attach(model, optimizer)
    for xb, yb, lb in batches(x, y, large, size=64, steps=400):
        p, q = model(xb)
        losses = [F.mse_loss(p, yb), F.binary_cross_entropy_with_logits(q, lb)]
        loss: Any = sum(
            math.exp(-model.log_var[i].item()) * each + model.log_var[i].item() for i, each in enumerate(losses)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=xb)


# --------------------------------------------------------------------------------------------------- not-optimized


class TransformerBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TiedLM(nn.Module):
    def __init__(self, vocab: int, dim: int = 48, heads: int = 4, depth: int = 2, length: int = 40) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.wpe = nn.Embedding(length, dim)
        self.h = nn.ModuleList(TransformerBlock(dim, heads) for _ in range(depth))
        self.ln_f = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.04)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def resize_token_embeddings(model: TiedLM, size: int) -> None:
    old = model.wte.weight.data
    model.wte = nn.Embedding(size, old.shape[1])
    nn.init.normal_(model.wte.weight, std=0.04)
    model.wte.weight.data[: len(old)] = old


@case(
    fault="not-optimized",
    layers=("wte",),
    onset=0,
    tolerate=("missing-zero-grad", "exploding-gradient", "layer-imbalance"),
    source=(
        "huggingface/transformers#3532: the embeddings are resized after the optimizer took the parameters; the tie to"
        " the head is lost with them"
    ),
)
def chargpt_new_tokens(attach: Attach) -> None:
    """The vocabulary is extended after the optimizer was built: the new embedding table is in no group, and no longer
    tied to the head.
    """
    setup(134)
    ids, vocab = chars()
    model = TiedLM(vocab)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    resize_token_embeddings(model, vocab + 4)
    monitor = attach(model, optimizer, loss_fn=F.cross_entropy)
    for _step in range(150):
        x, y = windows(ids, 40, 16)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)


class Backboned(nn.Module):
    def __init__(self, width: int = 20) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Sequential(nn.Linear(8 * width, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


@case(
    fault="not-optimized",
    layers=("backbone",),
    onset=80,
    tolerate=("missing-zero-grad", "exploding-gradient", "layer-imbalance"),
    tags=("mid-run",),
    source=(
        "fastai/fastai#2133, facebookresearch/detectron2#2486, skorch-dev/skorch#261: layers unfrozen mid-training "
        "never enter the optimizer"
    ),
)
def digits_unfreeze(attach: Attach) -> None:
    """After 80 updates the backbone is unfrozen, but the optimizer was built from the parameters that needed gradients
    at the start.
    """
    setup(135)
    x, y = digits()
    model = Backboned()
    for p in model.backbone.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for step, (images, labels) in enumerate(batches(x, y, size=64, steps=220)):
        if step == 80:
            for p in model.backbone.parameters():
                p.requires_grad_(True)
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=images)


class FlatMomentum(torch.optim.Optimizer):
    """SGD with momentum on flat views of the parameters."""

    def __init__(self, params: Iterator[Any], lr: float = 0.01, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "buffer" not in state:
                    state["buffer"] = torch.zeros(p.numel())
                buffer, flat = state["buffer"], p.data.contiguous().view(-1)
                buffer.mul_(group["momentum"]).add_(p.grad.contiguous().view(-1))
                flat.add_(buffer, alpha=-group["lr"])


class TiedAutoencoder(nn.Module):
    def __init__(self, dim: int = 64, code: int = 20) -> None:
        super().__init__()
        self.encoder = nn.Linear(dim, code)
        self.middle = nn.Linear(code, code)
        self.decoder = nn.Linear(code, dim)
        self.decoder.weight = nn.Parameter(self.encoder.weight.detach().clone().t())  # start from the transpose

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.middle(torch.tanh(self.encoder(x)))))


@case(
    fault="not-optimized",
    layers=("decoder",),
    onset=0,
    tags=("subtle",),
    source=(
        "elanapearl.github.io 2025, 'the bug that taught me more about PyTorch than years of using it' (updates lost "
        "on non-contiguous weights; TrainCheck success stories, case 4)"
    ),
)
def digits_transposed_autoencoder(attach: Attach) -> None:
    """The decoder starts as the encoder's transpose and is not contiguous; the hand-written optimizer updates a copy of
    it.
    """
    setup(136)
    x, _ = digits()
    x = x.flatten(1)
    model = TiedAutoencoder()
    optimizer = FlatMomentum(model.parameters(), lr=0.5)
    criterion = nn.MSELoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for (xb,) in batches(x, size=128, steps=400):
        optimizer.zero_grad()
        loss = criterion(model(xb), xb)
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=xb)


class PyramidNet(nn.Module):
    def __init__(self, dim: int = 64, widths: tuple[int, ...] = (96, 96, 64), classes: int = 10) -> None:
        super().__init__()
        self.inp = nn.Linear(dim, widths[0])
        self.hidden = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
        self.out = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.inp(x.flatten(1)))
        for layer in self.hidden:
            x = torch.relu(layer(x))
        return self.out(x)


@case(
    fault="not-optimized",
    onset=0,
    also=("no-gradient",),
    tags=("unregistered",),
    source="pytorch/pytorch#715, #1053, #59925, meta-pytorch/torchfix#31: layers in a Python list are not registered",
)
def digits_pyramid(attach: Attach) -> None:
    """The hidden layers sit in a plain Python list: they are used, but no parameter of theirs is in the model or the
    optimizer.
    """
    setup(137)
    x, y = digits()
    model = PyramidNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for images, labels in batches(x, y, size=64, steps=300):
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=images)


# ----------------------------------------------------------------------------------------------- missing-zero-grad


@case(
    fault="missing-zero-grad",
    onset=0,
    tolerate=("oscillating-gradient", "exploding-gradient", "learning-rate-too-high"),
    source=(
        "Lightning-AI/pytorch-lightning#591, #557, FoundationVision/OmniTokenizer#15, "
        "Project-MONAI/GenerativeModels#102: the generator's backward pass leaves gradients in the discriminator"
    ),
)
def sketch_gan(attach: Attach) -> None:
    """The discriminator's gradients are cleared only after its own step; the generator's backward pass adds to them and
    they stay in.
    """
    setup(138)
    x, _ = digits()
    x = x.flatten(1) * 2 - 1
    generator = nn.Sequential(nn.Linear(16, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 64), nn.Tanh())
    discriminator = nn.Sequential(
        nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)
    )
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    monitor = attach(discriminator, opt_d, loss_fn=criterion)
    one, zero = torch.ones(64, 1), torch.zeros(64, 1)
    for (real,) in batches(x, size=64, steps=300):
        fake = generator(torch.randn(64, 16))
        loss_g = criterion(discriminator(fake), one)
        loss_g.backward()
        opt_g.step()
        opt_g.zero_grad()
        loss_d = criterion(discriminator(real), one) + criterion(discriminator(fake.detach()), zero)
        loss_d.backward()
        opt_d.step()
        opt_d.zero_grad()
        monitor.step(loss_d, batch=real)


class WordVectors(nn.Module):
    def __init__(self, vocab: int, dim: int = 48, classes: int = 4) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.EmbeddingBag(vocab, dim, mode="mean"), nn.Linear(dim, 96), nn.ReLU())
        self.decoder = nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, classes))

    def forward(self, ids: Tensor) -> Tensor:
        return self.decoder(self.encoder(ids))


@case(
    fault="missing-zero-grad",
    layers=("decoder",),
    onset=1,
    tolerate=("layer-imbalance", "exploding-gradient", "oscillating-gradient"),
    tags=("subtle",),
    source="own construction: zero_grad() on the encoder alone",
)
def topic_vectors(attach: Attach) -> None:
    """encoder.zero_grad() is called, decoder.zero_grad() is not; Adam hides most of it and the loss still falls."""
    setup(139)
    ids, _lengths, y = tokens(3000, 20)
    model = WordVectors(60)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for xb, yb in batches(ids, y, size=64, steps=400):
        model.encoder.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=xb)


# -------------------------------------------------------------------------------------------------- constant-batch


class LoadLSTM(nn.Module):
    def __init__(self, vocab: int, hidden: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, 32)
        self.lstm = nn.LSTM(32, hidden, batch_first=True)
        self.out = nn.Linear(hidden, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.lstm(self.embed(ids))[0])


@case(
    fault="constant-batch",
    onset=1,
    tolerate=("overfitting",),
    source=(
        "StackOverflow 67180955 (TrainCheck list: the same random numbers again and again); own variant: a seed inside"
        " get_batch()"
    ),
)
def char_lstm_get_batch(attach: Attach) -> None:
    """get_batch() seeds the generator it draws the offsets with, so every batch is the same sixteen windows."""
    setup(141)
    ids, vocab = chars()
    model = LoadLSTM(vocab)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def get_batch() -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1337)
        return windows(ids, 32, 16, generator)

    monitor = attach(model, optimizer, loss_fn=F.cross_entropy)
    for _step in range(250):
        x, y = get_batch()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)


class Prefetcher:
    def __init__(self, loader: DataLoader[Any]) -> None:
        self.iterator = iter(loader)
        self.current: Any = None

    def next(self) -> Any:
        with contextlib.suppress(StopIteration):
            self.current = next(self.iterator)
        return self.current


@case(
    fault="constant-batch",
    onset=84,
    tolerate=("overfitting", "vanishing-gradient"),
    tags=("mid-run",),
    source=(
        "own construction: a prefetcher that swallows StopIteration (cf. the try/except loops in pytorch/pytorch#1917)"
    ),
)
def digits_prefetcher(attach: Attach) -> None:
    """When the loader is exhausted the prefetcher swallows StopIteration and hands out the last batch for the rest of
    the run.
    """
    setup(142)
    x, y = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    loader = DataLoader(TensorDataset(x.repeat(3, 1, 1, 1), y.repeat(3)), batch_size=64, shuffle=True, drop_last=True)
    prefetcher = Prefetcher(loader)
    for _step in range(220):
        images, labels = prefetcher.next()
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=images)


# ---------------------------------------------------------------------------------------- probabilities-into-loss


class UNet(nn.Module):
    def __init__(self, width: int = 10) -> None:
        super().__init__()

        def block(a: int, b: int) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())

        self.enc1, self.enc2 = block(1, width), block(width, 2 * width)
        self.mid = block(2 * width, 2 * width)
        self.dec2, self.dec1 = block(4 * width, width), block(2 * width, width)
        self.out = nn.Conv2d(width, 1, 1)
        self.act = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        a = self.enc1(x)
        b = self.enc2(F.max_pool2d(a, 2))
        m = self.mid(F.max_pool2d(b, 2))
        d = self.dec2(torch.cat([F.interpolate(m, scale_factor=2), b], 1))
        d = self.dec1(torch.cat([F.interpolate(d, scale_factor=2), a], 1))
        return self.act(self.out(d))


@case(
    fault="probabilities-into-loss",
    layers=("act", "out"),
    onset=0,
    tolerate=("loss-plateau", "saturated-activation", "learning-rate-too-low"),
    source=(
        "avBuffer/UNet3plus_pth#23, lopuhin/kaggle-imet-2019#3, argusswift/YOLOv4-pytorch#89: sigmoid, then "
        "BCEWithLogitsLoss"
    ),
)
def disc_unet(attach: Attach) -> None:
    """The U-Net ends in a sigmoid, then comes BCEWithLogitsLoss; its loss cannot fall below ln 2 on background."""
    setup(143)
    x, m = shapes(384, 16)
    model = UNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.BCEWithLogitsLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for images, masks in batches(x, m, size=16, steps=150):
        loss = criterion(model(images), masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=images)


class GCN(nn.Module):
    def __init__(self, a: Tensor, dim: int, hidden: int, classes: int) -> None:
        super().__init__()
        a = a + torch.eye(len(a))
        d = a.sum(1).rsqrt()
        self.register_buffer("a", d[:, None] * a * d[None])
        self.gc1 = nn.Linear(dim, hidden)
        self.gc2 = nn.Linear(hidden, classes)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a @ self.gc1(x))
        return F.softmax(self.a @ self.gc2(self.drop(x)), dim=1)


@case(
    fault="probabilities-into-loss",
    onset=0,
    tolerate=("loss-plateau", "learning-rate-too-low"),
    tags=("graph",),
    source=(
        "bowang-lab/Transformer-GCN-QA#32 (an extra softmax before CrossEntropyLoss), "
        "nishnik/Deep-Semantic-Similarity-Model-PyTorch#2"
    ),
)
def community_gcn_softmax(attach: Attach) -> None:
    """The graph network returns softmax probabilities, and F.cross_entropy takes them for logits."""
    setup(144)
    a, x, y = communities(n=700, groups=6)
    train = torch.rand(len(y)) < 0.4
    model = GCN(a, x.shape[1], 96, 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    monitor = attach(model, optimizer, loss_fn=F.cross_entropy)
    for _epoch in range(200):
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x)[train], y[train])
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)


# ---------------------------------------------------------------------------------------------- train-eval-mismatch


def conv_bn(cin: int, cout: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout, eps=0.001, momentum=0), nn.ReLU()
    )


@case(
    fault="train-eval-mismatch",
    layers=("0.1", "2.1", "4.1"),
    onset=0,
    tolerate=("overfitting",),
    source=(
        "Cadene/pretrained-models.pytorch#5 (momentum=0 in BatchNorm), pytorch/vision#8250, r9y9/tacotron_pytorch#19: "
        "TensorFlow's convention carried over"
    ),
)
def digits_inception_style(attach: Attach) -> None:
    """BatchNorm with momentum=0 (ported from TensorFlow) never updates its running statistics; training looks fine,
    validation is nonsense.
    """
    setup(145)
    (x, y), (xv, yv) = split(*big_digits(16))
    x, xv = x * 4 + 3, xv * 4 + 3
    model = nn.Sequential(
        conv_bn(1, 12),
        nn.MaxPool2d(2),
        conv_bn(12, 24),
        nn.MaxPool2d(2),
        conv_bn(24, 24),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for step, (images, labels) in enumerate(batches(x, y, size=64, steps=160)):
        model.train()
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            model.eval()
            with torch.no_grad():
                val_loss = criterion(model(xv), yv)
            monitor.step(loss, batch=images, val_loss=val_loss)
        else:
            monitor.step(loss, batch=images)


@case(
    fault="train-eval-mismatch",
    layers=("1", "3", "4", "7"),
    onset=24,
    tolerate=("overfitting",),
    tags=("tabular",),
    source=(
        "ipolharvard/ethos-ares#20, pliang279/MultiBench#26: validation under no_grad() but without eval(); dropout "
        "stays on and BatchNorm swallows the validation data"
    ),
)
def tumour_validation_mode(attach: Attach) -> None:
    """Validation runs under no_grad() but never in eval mode: dropout is active, and the sorted validation batches move
    BatchNorm's statistics.
    """
    setup(146)
    x, y = table("breast_cancer")
    (x, y), (xv, yv) = split(standardize(x), y, val=0.4)
    order = torch.argsort(yv)
    xv, yv = xv[order], yv[order]
    model = nn.Sequential(
        nn.Linear(30, 128),
        nn.BatchNorm1d(128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.BatchNorm1d(128),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(64, 2),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for step, (xb, yb) in enumerate(batches(x, y, size=32, steps=300)):
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        if step % 25 == 24:
            with torch.no_grad():
                parts = [criterion(model(xv[i : i + 32]), yv[i : i + 32]).item() for i in range(0, len(xv) - 1, 32)]
            monitor.step(loss, batch=xb, val_loss=sum(parts) / len(parts))
        else:
            monitor.step(loss, batch=xb)
