"""How the script is put together: what reaches the graph, the optimizer, the loss, the right mode."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from scripts.fault_zoo.cases.faulty_data import (
    batches,
    chars,
    digits,
    setup,
    split,
    standardize,
    table,
    tokens,
    windows,
)
from scripts.fault_zoo.protocol import Attach, case

# ----------------------------------------------------------------------------------------------------- no-gradient


class Captioner(nn.Module):
    """A picture's features start a GRU that spells the label's name."""

    def __init__(self, vocab: int, dim: int = 64) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 16, dim), nn.Tanh()
        )
        self.embed = nn.Embedding(vocab, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.project = nn.Linear(dim, vocab)

    def forward(self, images: Tensor, ids: Tensor) -> Tensor:
        memory = self.encoder(images)
        states, _ = self.gru(self.embed(ids), memory.detach()[None])
        return self.project(states)


NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


@case(
    fault="no-gradient",
    layers=("encoder",),
    onset=0,
    also=("dead-layer",),
    tolerate=("loss-plateau",),
    source=(
        "lucidrains/CoCa-pytorch#6 (the extractor detaches, so nothing reaches the image encoder); "
        "speechbrain/speechbrain#1396"
    ),
)
def digit_captions(attach: Attach) -> None:
    """A stale detach() keeps the image encoder out of the graph while the language part learns letter statistics."""
    setup(20)
    letters = sorted(set("".join(NAMES)))
    code = {c: i + 2 for i, c in enumerate(letters)}  # 0 pads and ends, 1 starts
    spelled = torch.zeros(10, 7, dtype=torch.long)
    for k, name in enumerate(NAMES):
        spelled[k, 0] = 1
        spelled[k, 1 : len(name) + 1] = torch.tensor([code[c] for c in name])
    x, y = digits()
    model = Captioner(len(letters) + 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer, loss_fn=F.cross_entropy)
    for images, labels in batches(x, y, size=64, steps=300):
        ids = spelled[labels]
        logits = model(images, ids[:, :-1])
        loss = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=images)


@case(
    fault="no-gradient",
    onset=0,
    also=("loss-plateau", "dead-layer", "saturated-activation"),
    tolerate=("poor-initialization",),
    source="StackOverflow 42800203 and 33969059 (DeepFD benchmark): softmax on a single output unit",
)
def tumour_classifier(attach: Attach) -> None:
    """The binary classifier ends in a softmax over its one output unit, which is always 1."""
    setup(21)
    x, y = table("breast_cancer")
    x, y = standardize(x), y.float()
    model = nn.Sequential(
        nn.Linear(30, 256),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, 1),
        nn.Softmax(dim=1),
    )
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    criterion = nn.BCELoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for xb, yb in batches(x, y, size=64, steps=400):
        optimizer.zero_grad()
        p = model(xb).squeeze(1)
        loss = criterion(p, yb)
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=xb)


class ReviewTagger(nn.Module):
    def __init__(self, vocab: int, classes: int, dim: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=0)
        self.forward_gru = nn.GRU(dim, dim, batch_first=True)
        self.backward_gru = nn.GRU(dim, dim, batch_first=True)
        self.norm = nn.LayerNorm(2 * dim)
        self.classify = nn.Sequential(nn.Dropout(0.2), nn.Linear(2 * dim, classes))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        ahead, _ = self.forward_gru(x)
        back, _ = self.forward_gru(x.flip(1))
        return self.classify(self.norm(torch.cat([ahead[:, -1], back[:, -1]], 1)))


@case(
    fault="no-gradient",
    layers=("backward_gru",),
    onset=0,
    also=("dead-layer", "not-optimized"),
    tags=("subtle",),
    source="inria-thoth/HySUPP#3 (a layer that forward() never uses), NoamRosenberg/autodeeplab#20",
)
def review_topics_bigru(attach: Attach) -> None:
    """The reversed sequence is passed to forward_gru a second time; backward_gru is never called."""
    setup(131)
    ids, _lengths, y = tokens(3000, 16)
    model = ReviewTagger(60, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for xb, yb in batches(ids, y, size=32, steps=200):
        loss = criterion(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=xb)


# --------------------------------------------------------------------------------------------------- not-optimized


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))


class ResNet(nn.Module):
    def __init__(self, classes: int, width: int = 20, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.layers = nn.Sequential(*[ResidualBlock(width) for _ in range(depth)])
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layers(self.stem(x)).mean((2, 3)))


@case(
    fault="not-optimized",
    layers=("fc",),
    onset=0,
    tolerate=("missing-zero-grad", "exploding-gradient", "layer-imbalance"),
    source=(
        "microsoft/nni#4521, huggingface/pytorch-openai-transformer-lm#6: the optimizer still holds the replaced "
        "layer's parameters"
    ),
)
def finetune_digits_resnet(attach: Attach) -> None:
    """The classifier head is swapped for one with ten classes after the optimizer has been built."""
    setup(22)
    x, y = digits()
    model = ResNet(classes=100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=150)
    model.fc = nn.Linear(model.fc.in_features, 10)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for images, labels in batches(x, y, size=64, steps=150):
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        monitor.step(loss, batch=images)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.ln2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.ln1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


class CharGPT(nn.Module):
    def __init__(self, vocab: int, dim: int = 48, heads: int = 4, depth: int = 2, length: int = 48) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.ln_f = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        nn.init.normal_(self.tok.weight, std=0.02)
        nn.init.normal_(self.pos.weight, std=0.02)
        self.register_buffer("mask", torch.triu(torch.full((length, length), float("-inf")), 1))

    def forward(self, ids: Tensor) -> Tensor:
        t = ids.shape[1]
        mask: Any = self.mask
        x = self.tok(ids) + self.pos.weight[:t]
        for block in self.blocks:
            x = block(x, mask[:t, :t])
        return self.head(self.ln_f(x))


@case(
    fault="not-optimized",
    layers=("blocks.0.ln1", "blocks.0.ln2", "blocks.1.ln1", "blocks.1.ln2", "ln_f"),
    onset=0,
    tags=("subtle",),
    source=(
        "own construction: the decay / no-decay grouping that karpathy/minGPT's configure_optimizers guards with an "
        "assertion"
    ),
)
def chargpt_weight_decay_groups(attach: Attach) -> None:
    """Parameters are grouped by name for weight decay; LayerNorm weights match neither rule and land in no group."""
    setup(23)
    ids, vocab = chars()
    model = CharGPT(vocab)
    decay, plain = [], []
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            plain.append(p)
        elif p.dim() >= 2:
            decay.append(p)
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=1e-3, betas=(0.9, 0.95)
    )
    monitor = attach(model, optimizer, loss_fn=F.cross_entropy)
    for _step in range(150):
        x, y = windows(ids, 48, 16)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        monitor.step(loss, batch=x)


# ----------------------------------------------------------------------------------------------- missing-zero-grad


@case(
    fault="missing-zero-grad",
    onset=1,
    tolerate=("exploding-gradient", "learning-rate-too-high", "oscillating-gradient", "loss-plateau", "gradient-spike"),
    source="StackOverflow 60335387 'pytorch MNIST example not converge' (TrainCheck's silent-error list, OSDI 2025)",
)
def digits_convnet(attach: Attach) -> None:
    """optimizer.zero_grad() is nowhere in the loop."""
    setup(24)
    x, y = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss_fn = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    for _epoch in range(6):
        for data, label in loader:
            loss = loss_fn(model(data), label)
            loss.backward()
            optimizer.step()
            monitor.step(loss, batch=data)


@case(
    fault="missing-zero-grad",
    onset=1,
    tolerate=("exploding-gradient", "learning-rate-too-high", "oscillating-gradient", "gradient-spike"),
    tags=("accumulation",),
    source=(
        "abhishekkrthakur/tez#38 (zero_grad not run per update in an accumulation loop); own variant: indented into "
        "the epoch loop"
    ),
)
def digits_accumulated(attach: Attach) -> None:
    """Gradients are accumulated over four micro-batches, but cleared only once per epoch."""
    setup(140)
    x, y = digits()
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    criterion = nn.CrossEntropyLoss()
    accumulate = 4
    monitor = attach(model, optimizer, accumulate=accumulate, loss_fn=criterion)
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, drop_last=True)
    for _epoch in range(8):
        optimizer.zero_grad()
        total = 0.0
        for i, (images, labels) in enumerate(loader):
            loss = criterion(model(images), labels) / accumulate
            loss.backward()
            total += loss.item()
            if (i + 1) % accumulate == 0:
                optimizer.step()
                monitor.step(total, batch=images)
                total = 0.0


# -------------------------------------------------------------------------------------------------- constant-batch


@case(
    fault="constant-batch",
    onset=1,
    tolerate=("overfitting", "vanishing-gradient", "loss-plateau"),
    source=(
        "own construction around the next(iter(loader)) of pytorch/pytorch#1917, udacity/deep-learning-v2-pytorch#309 "
        "(the same first batch at each call unless it is shuffled)"
    ),
)
def wine_step_loop(attach: Attach) -> None:
    """Every step seeds the generator and takes the first batch of a fresh iterator, so it is always the same batch."""
    setup(25)
    x, y = table("wine")
    x = standardize(x)
    model = nn.Sequential(nn.Linear(13, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    generator = torch.Generator()
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, generator=generator)
    for _step in range(400):
        generator.manual_seed(42)
        xb, yb = next(iter(loader))
        loss = criterion(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=xb)


# ---------------------------------------------------------------------------------------- probabilities-into-loss


@case(
    fault="probabilities-into-loss",
    layers=("6",),
    onset=0,
    tolerate=("loss-plateau", "saturated-activation", "learning-rate-too-low"),
    source=(
        "Lightning-Universe/lightning-bolts#654, jindongwang/Deep-learning-activity-recognition#10: softmax, then "
        "CrossEntropyLoss"
    ),
)
def activity_windows(attach: Attach) -> None:
    """The network ends in a softmax and its output goes to CrossEntropyLoss."""
    setup(26)
    wave = torch.sin(torch.arange(64)[None] * (0.15 + 0.1 * torch.arange(6)[:, None]))
    model = nn.Sequential(
        nn.Conv1d(3, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool1d(4),
        nn.Flatten(),
        nn.Linear(32 * 16, 100),
        nn.ReLU(),
        nn.Sequential(nn.Linear(100, 6), nn.Softmax(dim=1)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for _step in range(300):
        y = torch.randint(0, 6, (64,))
        x = wave[y][:, None] * torch.rand(64, 3, 1) + 0.5 * torch.randn(64, 3, 64)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)


# ---------------------------------------------------------------------------------------------- train-eval-mismatch


@case(
    fault="train-eval-mismatch",
    onset=60,
    tolerate=("overfitting", "gradient-spike", "oscillating-gradient", "exploding-gradient", "learning-rate-too-high"),
    source="wkentaro/pytorch-fcn#56, ermongroup/ncsn#2, hendrycks/ethics#5: eval() for validation, never train() again",
)
def digits_resnet_validation(attach: Attach) -> None:
    """The first validation puts the model in eval mode and nothing puts it back."""
    setup(27)
    (x, y), (xv, yv) = split(*digits())
    model = nn.Sequential(ResNet(classes=64, depth=2), nn.Dropout(0.3), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    model.train()
    for step, (images, labels) in enumerate(batches(x, y, size=64, steps=200)):
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        if step % 60 == 59:
            model.eval()
            with torch.no_grad():
                val_loss = criterion(model(xv), yv).item()
            monitor.step(loss, batch=images, val_loss=val_loss)
        else:
            monitor.step(loss, batch=images)
