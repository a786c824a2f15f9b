"""Parameters that the gradient or the optimizer does not reach."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scripts.fault_zoo.cases.reports.material import accuracy, characters, digits, indices, windows
from scripts.fault_zoo.protocol import Attach, case

# -------------------------------------------------------------------------------------- adapters that start at zero


class Adapted(nn.Module):
    """A frozen layer and a product of two thin matrices beside it."""

    def __init__(self, base: nn.Linear, rank: int, *, random_down: bool) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)
        if not random_down:
            nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def train_adapters(attach: Attach, *, repaired: bool) -> float:
    """Return the accuracy on test digits that are upside down, after a training on upright ones."""
    torch.manual_seed(2)
    x, y, test_x, test_y = digits()
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    chosen = indices(len(x), 64)
    for _ in range(300):
        i = next(chosen)
        optimizer.zero_grad()
        F.cross_entropy(model(x[i]), y[i]).backward()
        optimizer.step()
    for place in (0, 2):
        layer = model[place]
        assert isinstance(layer, nn.Linear)
        model[place] = Adapted(layer, 8, random_down=repaired)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    monitor = attach(model, optimizer)
    for _ in range(300):
        i = next(chosen)
        rows = x[i].flip(1)
        loss = F.cross_entropy(model(rows), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=rows)
    return accuracy(model, test_x.flip(1), test_y)


@case(
    fault="no-gradient",
    also=("dead-layer",),
    layers=("0.down", "0.up", "2.down", "2.up"),
    onset=0,
    tolerate=("vanishing-gradient", "poor-initialization", "not-optimized"),
    source="https://github.com/Guitaricet/relora/issues/18",
    tags=("lora", "fine-tuning", "digits"),
)
def adapters_from_zero(attach: Attach) -> None:
    """Both matrices of each adapter start at zero, so that the gradients of both are zero for ever; only the head
    learns. Reported in https://github.com/Guitaricet/relora/issues/18.
    """
    train_adapters(attach, repaired=False)


@case(
    source="the repaired twin of `adapters_from_zero`: one of the two matrices is random",
    tags=("lora", "fine-tuning", "digits"),
)
def adapters_from_zero_and_random(attach: Attach) -> None:
    """Adapters are trained beside frozen layers. One matrix of each starts at zero, so that the other one gets no
    gradient at the first step.
    """
    assert train_adapters(attach, repaired=True) > 0.88


# ------------------------------------------------------------------------------------- checkpoints of frozen inputs


class CheckpointedReader(nn.Module):
    """Blocks of attention behind a frozen embedding; each block is computed again in the backward pass."""

    def __init__(self, vocabulary: int, *, reentrant: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 48).requires_grad_(False)
        self.place = nn.Embedding(16, 48).requires_grad_(False)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(48, 2, 96, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.norm = nn.LayerNorm(48)
        self.head = nn.Linear(48, vocabulary)
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


def train_checkpointed(attach: Attach, *, repaired: bool) -> float:
    """Return the loss over the last 40 steps."""
    torch.manual_seed(0)
    tokens, vocabulary = characters(30_000)
    model = CheckpointedReader(vocabulary, reentrant=not repaired)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=4e-3)
    monitor = attach(model, optimizer)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(220):
        x, y = windows(tokens, 16, 16, generator)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)
        losses.append(loss.item())
    return sum(losses[-40:]) / 40


@case(
    fault="no-gradient",
    also=("not-optimized", "dead-layer"),
    layers=("blocks",),
    onset=0,
    source="https://github.com/huggingface/transformers/issues/21381",
    tags=("checkpoint", "fine-tuning", "text"),
)
def checkpoints_behind_frozen_embedding(attach: Attach) -> None:
    """The embedding is frozen, so that no input of the checkpointed blocks requires a gradient, and the reentrant
    checkpoint cuts them from the graph. Only the head learns. Reported in
    https://github.com/huggingface/transformers/issues/21381.
    """
    train_checkpointed(attach, repaired=False)


@case(
    source="the repaired twin of `checkpoints_behind_frozen_embedding`: the checkpoint is not reentrant",
    tags=("checkpoint", "fine-tuning", "text"),
)
def checkpoints_without_reentry(attach: Attach) -> None:
    """Blocks behind a frozen embedding run twice per step, forward and again in the backward pass."""
    assert train_checkpointed(attach, repaired=True) < 2.55


# --------------------------------------------------------------------------------------------- layers in a plain list


class ListedLayers(nn.Module):
    """Six narrow hidden layers and a classifier."""

    def __init__(self, *, registered: bool) -> None:
        super().__init__()
        hids = [nn.Linear(64 if i == 0 else 12, 12) for i in range(6)]
        self.hids = nn.ModuleList(hids) if registered else hids
        self.classifier = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        for hid in self.hids:
            x = torch.tanh(hid(x))
        return self.classifier(x)


def train_listed(attach: Attach, *, repaired: bool) -> float:
    """Return the accuracy on test digits."""
    torch.manual_seed(0)
    x, y, test_x, test_y = digits()
    model = ListedLayers(registered=repaired)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    monitor = attach(model, optimizer)
    chosen = indices(len(x), 64)
    for _ in range(600):
        i = next(chosen)
        loss = F.cross_entropy(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    return accuracy(model, test_x, test_y)


@case(
    fault="not-optimized",
    onset=0,
    tolerate=("loss-plateau", "missing-zero-grad"),
    source="https://github.com/pytorch/pytorch/issues/715",
    tags=("digits",),
)
def layers_in_plain_list(attach: Attach) -> None:
    """The hidden layers are in a list of Python. They get gradients, but `parameters()` does not return them. Reported
    in https://github.com/pytorch/pytorch/issues/715.
    """
    train_listed(attach, repaired=False)


# -------------------------------------------------------------------------------------- pruned after the optimizer


def narrower(layer: nn.Linear, rows: Tensor | None, columns: Tensor | None) -> nn.Linear:
    """Return a new layer with some of the outputs and inputs of a layer."""
    weight, bias = layer.weight.detach(), layer.bias.detach()
    if rows is not None:
        weight, bias = weight[rows], bias[rows]
    if columns is not None:
        weight = weight[:, columns]
    small = nn.Linear(weight.shape[1], weight.shape[0])
    small.weight.data.copy_(weight)
    small.bias.data.copy_(bias)
    return small


class PrunableNet(nn.Module):
    """A classifier whose second hidden layer can be cut down."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 48)
        self.body = nn.Linear(48, 96)
        self.neck = nn.Linear(96, 48)
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.neck(F.relu(self.body(F.relu(self.stem(x)))))))

    def prune(self, keep_body: int, keep_neck: int) -> None:
        """Replace the layers by smaller ones that keep the units with the largest weights."""
        body = self.body.weight.detach().norm(dim=1).topk(keep_body).indices
        neck = self.neck.weight.detach().norm(dim=1).topk(keep_neck).indices
        self.body = narrower(self.body, body, None)
        self.neck = narrower(self.neck, neck, body)
        self.head = narrower(self.head, None, neck)


def train_pruned(attach: Attach, *, repaired: bool) -> float:
    """Return the accuracy on test digits."""
    torch.manual_seed(0)
    x, y, test_x, test_y = digits()
    model = PrunableNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    monitor = attach(model, optimizer)
    chosen = indices(len(x), 64)
    for step in range(450):
        if step == 200:
            model.prune(6, 6)
            if repaired:
                optimizer.param_groups[0]["params"] = list(model.parameters())
        i = next(chosen)
        loss = F.cross_entropy(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    return accuracy(model, test_x, test_y)


@case(
    fault="not-optimized",
    layers=("body", "neck", "head"),
    onset=200,
    tolerate=("missing-zero-grad", "loss-plateau", "exploding-gradient"),
    source="https://github.com/microsoft/nni/issues/4521",
    tags=("pruning", "digits"),
)
def pruned_under_old_optimizer(attach: Attach) -> None:
    """Pruning replaces three layers by smaller ones. The optimizer still holds the parameters of the old ones, so that
    the new ones are never updated. Reported in https://github.com/microsoft/nni/issues/4521.
    """
    train_pruned(attach, repaired=False)


@case(
    source="the repaired twin of `pruned_under_old_optimizer`: the optimizer gets the new parameters",
    tags=("pruning", "digits"),
)
def pruned_and_told_the_optimizer(attach: Attach) -> None:
    """Pruning replaces three layers by smaller ones, the loss jumps, and fine-tuning brings it down again."""
    assert train_pruned(attach, repaired=True) > 0.9
