"""Loops that look wrong and are not: a small clip, evaluation mode, a gradient of zero, and weights that are cut."""

from __future__ import annotations

from itertools import permutations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import digits, draws, excerpts, letters, mean_of_last
from scripts.fault_zoo.cases.stories.pictures import resnet
from scripts.fault_zoo.cases.stories.text import RotaryDecoder, add_lora
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------ a small clip


class SetDetector(nn.Module):
    """Find plates in a picture: each of 4 queries gives a box and says whether there is one."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, stride=4)
        self.places, self.queries = nn.Parameter(torch.randn(16, width)), nn.Parameter(torch.randn(4, width))
        self.encoder = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(width, 4, 2 * width, 0.0, batch_first=True)
        self.box, self.there = nn.Linear(width, 4), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        memory = self.encoder(self.patches(x).flatten(2).transpose(1, 2) + self.places)
        found = self.decoder(self.queries.expand(len(x), -1, -1), memory)
        return self.box(found).sigmoid(), self.there(found).squeeze(2)


def scenes(count: int, generator: torch.Generator) -> tuple[Tensor, list[Tensor]]:
    """Return pictures (N, 1, 16, 16) with one or two plates, and the boxes of each, from 0 to 1."""
    row, column = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    pictures, boxes = 0.1 * torch.rand(count, 1, 16, 16, generator=generator), []
    for picture in pictures:
        number = int(torch.randint(1, 3, (), generator=generator))
        middle = torch.rand(number, 2, generator=generator) * 10 + 3
        size = torch.rand(number, 2, generator=generator) * 4 + 3
        for (y, x), (h, w) in zip(middle, size, strict=True):
            picture[0, ((row - y).abs() < h / 2) & ((column - x).abs() < w / 2)] = 1
        boxes.append(torch.cat([middle, size], 1) / 16)
    return pictures, boxes


def set_loss(box: Tensor, there: Tensor, wanted: list[Tensor]) -> Tensor:
    """Match queries and boxes at the lowest cost, and return the loss of the matches."""
    loss = torch.zeros(())
    for found, says, targets in zip(box, there, wanted, strict=True):
        cost = 5 * torch.cdist(found.detach(), targets, p=1) - says.detach().sigmoid()[:, None]
        boxes = torch.arange(len(targets))
        chosen = min(
            (torch.tensor(p) for p in permutations(range(4), len(targets))), key=lambda p: cost[p, boxes].sum()
        )
        is_there = torch.zeros(4)
        is_there[chosen] = 1
        loss = loss + 5 * (found[chosen] - targets).abs().sum() + F.binary_cross_entropy_with_logits(says, is_there)
    return loss / sum(map(len, wanted))


@case(source="https://github.com/facebookresearch/detr/issues/198", tags=("detection", "clipping", "bf16", "odd"))
def norm_far_above_the_clip(attach: Attach) -> None:
    """A transformer finds sets of boxes with bfloat16 and two micro-batches per update. The norm of the gradient is 20
    to 80 times as large as the clip of 0.1 at every update. It is 100 to 1,000 times as large in the published recipe.
    """
    torch.manual_seed(581)
    generator = torch.Generator().manual_seed(1)
    model = SetDetector()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    monitor = attach(model, optimizer, accumulate=2)
    losses, norms = [], []
    for _ in range(150):
        total = 0.0
        for _ in range(2):
            pictures, boxes = scenes(16, generator)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                box, there = model(pictures)
            loss = set_loss(box.float(), there.float(), boxes) / 2
            loss.backward()
            total += loss.item()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(total, batch=pictures)
        losses.append(total)
    assert min(norms) > 0.2, min(norms)
    assert mean_of_last(losses) < 0.65 * losses[0], losses


# ------------------------------------------------------------------------------------ evaluation mode


@case(source="https://github.com/facebookresearch/FixRes/issues/9", tags=("cnn", "finetune", "mode", "odd"))
def tuned_in_evaluation_mode(attach: Attach) -> None:
    """A network for pictures of 8 x 8 pixels is tuned to 12 x 12. The whole of it is in evaluation mode, except for the
    last BatchNorm. Only this norm and the classifier learn. The answer was that this is on purpose, to make up for the
    change of the statistics.
    """
    torch.manual_seed(582)
    x, y, x_test, y_test = digits()
    model = resnet()
    first = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for i in draws(len(x), size=32, steps=200, seed=1):
        loss = F.cross_entropy(model(x[i]), y[i])
        first.zero_grad()
        loss.backward()
        first.step()
    large, large_test = (F.interpolate(t, size=12, mode="bilinear") for t in (x, x_test))

    def accuracy() -> float:
        model.eval()
        with torch.no_grad():
            return (model(large_test).argmax(1) == y_test).float().mean().item()

    before = accuracy()
    model.requires_grad_(False)
    last, classifier = model.get_submodule("3.bn2"), model[6]
    tuned = [*last.requires_grad_(True).parameters(), *classifier.requires_grad_(True).parameters()]
    optimizer = torch.optim.SGD(tuned, lr=0.02, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for i in draws(len(x), size=32, steps=200, seed=2):
        model.eval()
        last.train()
        loss = criterion(model(large[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        last.eval()
        monitor.step(loss, batch=large[i])
    assert accuracy() > before + 0.1, (before, accuracy())


# ------------------------------------------------------------------------------------ a gradient of zero


@case(source="https://github.com/microsoft/LoRA/issues/98", tags=("text", "lora", "odd"))
def first_gradient_is_zero(attach: Attach) -> None:
    """A language model is tuned with LoRA to text that is written backwards. One of the two matrices of each adapter is
    zero at first, so that the gradient of the other one is exactly zero in the first step. The answer was that one of
    them must be zero, and that it makes no difference which.
    """
    torch.manual_seed(583)
    ids, alphabet = letters()
    generator = torch.Generator().manual_seed(3)
    model = RotaryDecoder(alphabet)
    full = torch.zeros(24, 32, dtype=torch.bool)

    def loss_of(batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch[:, :-1], full).flatten(0, 1), batch[:, 1:].flatten())

    first = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        loss = loss_of(excerpts(ids, length=33, count=24, generator=generator))
        first.zero_grad()
        loss.backward()
        first.step()
    model.zero_grad()
    model.requires_grad_(False)
    add_lora(model, ("qkv", "out", "head", "mlp.0", "mlp.2"))
    trained = [p for name, p in model.named_parameters() if "lora_" in name]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    monitor = attach(model, optimizer, loss_fn=F.cross_entropy)
    swapped = ids.flip(0)
    losses = []
    for step in range(250):
        batch = excerpts(swapped, length=33, count=24, generator=generator)
        loss = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            assert not any(p.grad.any() for p in trained[::2] if p.grad is not None)
        optimizer.step()
        monitor.step(loss, batch=batch)
        losses.append(loss.item())
    assert mean_of_last(losses) < 0.8 * losses[0], losses


# ------------------------------------------------------------------------------------ weights that are cut


@case(source="https://github.com/Eric-mingjie/rethinking-network-pruning/issues/13", tags=("tabular", "pruning", "odd"))
def weights_cut_in_two_rounds(attach: Attach) -> None:
    """A network for tables loses 60 % of its weights at step 120 and 90 % at step 240. Their gradients are masked, so
    that they stay at zero. The loss jumps at both steps and recovers. The answer was that the masks are on purpose.
    """
    torch.manual_seed(584)
    data = load_breast_cancer()
    x = torch.tensor(data.data, dtype=torch.float32)
    x, y = (x - x.mean(0)) / x.std(0), torch.tensor(data.target, dtype=torch.float32)
    order = torch.randperm(len(x))
    train, test = order[:430], order[430:]
    model = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    criterion = nn.BCEWithLogitsLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    masks = [torch.ones_like(layer.weight) for layer in layers]
    losses = []
    for step, i in enumerate(draws(len(train), size=32, steps=360)):
        if step in (120, 240):
            share = 0.6 if step == 120 else 0.9
            masks = [(w.abs() > w.abs().flatten().quantile(share)).float() for w in (la.weight for la in layers)]
            with torch.no_grad():
                for layer, mask in zip(layers, masks, strict=True):
                    layer.weight.mul_(mask)
        loss = criterion(model(x[train[i]]).squeeze(1), y[train[i]])
        optimizer.zero_grad()
        loss.backward()
        for layer, mask in zip(layers, masks, strict=True):
            assert layer.weight.grad is not None
            layer.weight.grad.mul_(mask)
        optimizer.step()
        monitor.step(loss, batch=x[train[i]])
        losses.append(loss.item())
    with torch.no_grad():
        right = ((model(x[test]).squeeze(1) > 0) == (y[test] > 0)).float().mean().item()
    assert right > 0.93, right
