"""Loops that look wrong and are not: a steep start, labels that are all zero, and layers frozen now and then."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import cells, digits, draws, mean_of_last
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------ a steep start


def shifted(pictures: Tensor) -> Tensor:
    """Return pictures with shifts, other brightness and noise."""
    row, column = (torch.arange(8) + torch.randint(0, 3, (len(pictures), 1)) for _ in range(2))
    cut = F.pad(pictures, (1, 1, 1, 1))[torch.arange(len(pictures))[:, None, None], 0, row[:, :, None], column[:, None]]
    bright = 0.8 + 0.4 * torch.rand(len(pictures), 1, 1, 1)
    return cut[:, None] * bright + 0.1 * torch.randn_like(pictures)


def embedder() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 32),
    )


@case(source="https://github.com/TIGER-AI-Lab/VLM2Vec/issues/137", tags=("contrastive", "odd"))
def norm_that_starts_high(attach: Attach) -> None:
    """Vectors of pictures are tuned to say which digit it is, at a temperature of 0.02. The norm of the gradient is
    1,000 at the start, where the vectors are short, and 1 later. The answer was that this is normal if it goes down.
    """
    torch.manual_seed(671)
    x, y, x_test, y_test = digits()
    model = embedder()
    nn.init.normal_(model.get_parameter("7.weight"), std=0.002)
    nn.init.zeros_(model.get_parameter("7.bias"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = attach(model, optimizer)
    norms: list[float] = []
    for i in draws(len(x), size=64, steps=300):
        here, there = (F.normalize(model(shifted(x[i])), dim=1) for _ in range(2))
        same = (y[i][:, None] == y[i]).float()
        loss = F.cross_entropy(here @ there.T / 0.02, same / same.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        vectors, known = F.normalize(model(x_test), dim=1), F.normalize(model(x), dim=1)
    right = (y[(vectors @ known.T).argmax(1)] == y_test).float().mean().item()
    assert max(norms[:20]) > 5 * mean_of_last(norms), (norms[:20], norms[-20:])
    assert right > 0.95, right


# ------------------------------------------------------------------------------------ labels that are all zero


@case(source="https://github.com/dddzg/MoCo/issues/2", tags=("contrastive", "momentum", "odd"))
def labels_all_zero(attach: Attach) -> None:
    """Momentum contrast (He et al. 2020): the vector of a picture is to be nearer to that of another view of it,
    which comes first, than to those of 63 other pictures. The label of every picture is 0. The answer was that it has
    to be.
    """
    torch.manual_seed(672)
    x, y, x_test, y_test = digits()
    model = embedder()
    keys = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    losses = []
    for i in draws(len(x), size=64, steps=300):
        query = F.normalize(model(shifted(x[i])), dim=1)
        with torch.no_grad():
            for slow, fast in zip(keys.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
            key = F.normalize(keys(shifted(x[i])), dim=1)
        near = query @ key.T / 0.2
        others = near[~torch.eye(64, dtype=torch.bool)].view(64, 63)
        logits = torch.cat([near.diagonal()[:, None], others], 1)
        loss = criterion(logits, torch.zeros(64, dtype=torch.int64))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
        losses.append(loss.item())
    with torch.no_grad():
        vectors, known = F.normalize(model(x_test), dim=1), F.normalize(model(x), dim=1)
    right = (y[(vectors @ known.T).argmax(1)] == y_test).float().mean().item()
    assert right > 0.9, right
    assert mean_of_last(losses) < 0.7 * losses[0], losses


# ------------------------------------------------------------------------------------ norms that are frozen for the end


@case(source="https://github.com/jingyuanli001/RFR-Inpainting/issues/25", tags=("inpainting", "finetune", "odd"))
def norms_frozen_for_the_end(attach: Attach) -> None:
    """A network fills holes in pictures. For the last third, its BatchNorms are put into evaluation mode, and the
    rate is a quarter of what it was. The answer was that this settles the norms, whose statistics depend on the
    holes.
    """
    torch.manual_seed(673)
    x, _ = cells(800, seed=31)
    model = nn.Sequential(
        nn.Conv2d(2, 24, 5, padding=2),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Conv2d(24, 24, 5, padding=2),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Conv2d(24, 1, 5, padding=2),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer, loss_fn=F.l1_loss)
    losses = []
    for step, i in enumerate(draws(len(x), size=16, steps=240)):
        if step == 160:
            for layer in model:
                if isinstance(layer, nn.BatchNorm2d):
                    layer.eval()
            optimizer.param_groups[0]["lr"] = 5e-4
        row, column, height = torch.randint(2, 8, (3,)).tolist()
        seen = torch.ones(len(i), 1, 16, 16)
        seen[:, :, row : row + height, column : column + 6] = 0
        loss = F.l1_loss(model(torch.cat([x[i] * seen, seen], 1)), x[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
        losses.append(loss.item())
    assert mean_of_last(losses) < sum(losses[140:160]) / 20 < 0.7 * losses[0], losses


# ------------------------------------------------------------------------------------ a critic whose loss rises


@case(source="https://github.com/stevenpjg/ddpg-aigym/issues/7", tags=("rl", "actor-critic", "odd"))
def critic_that_errs_more_and_more(attach: Attach) -> None:
    """DDPG learns to hold a cart on a mark. The error of the critic rises at first, as the values grow from zero, and
    goes up and down later, while the cart comes nearer. The answer was that no steady fall is to be expected.
    """
    torch.manual_seed(674)
    generator = torch.Generator().manual_seed(4)
    actor = nn.Sequential(nn.Linear(2, 48), nn.ReLU(), nn.Linear(48, 1), nn.Tanh())
    critic = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    model = nn.ModuleDict({"actor": actor, "critic": critic})
    slow = copy.deepcopy(model).requires_grad_(False)
    acting = torch.optim.Adam(actor.parameters(), lr=1e-3)
    judging = torch.optim.Adam(critic.parameters(), lr=2e-3)
    monitor = attach(model, [acting, judging])
    state = torch.rand(16, 2, generator=generator) * 2 - 1
    memory, rewards, losses = [], [], []
    for step in range(400):
        with torch.no_grad():
            push = (actor(state) + 0.3 * torch.randn(16, 1, generator=generator)).clamp(-1, 1)
        speed = 0.9 * state[:, 1:] + 0.2 * push
        after = torch.cat([state[:, :1] + 0.2 * speed, speed], 1)
        reward = 1 - after[:, :1].abs()
        memory.append((state, push, reward, after))
        rewards.append(reward.mean().item())
        state = torch.rand(16, 2, generator=generator) * 2 - 1 if step % 40 == 39 else after
        picked = torch.randint(0, len(memory), (8,), generator=generator).tolist()
        old, pushed, earned, new = (torch.cat([memory[k][part] for k in picked]) for part in range(4))
        with torch.no_grad():
            target = earned + 0.97 * slow["critic"](torch.cat([new, slow["actor"](new)], 1))
        error = F.mse_loss(critic(torch.cat([old, pushed], 1)), target)
        judging.zero_grad()
        error.backward()
        judging.step()
        worth = -critic(torch.cat([old, actor(old)], 1)).mean()
        acting.zero_grad()
        worth.backward()
        acting.step()
        with torch.no_grad():
            for late, early in zip(slow.parameters(), model.parameters(), strict=True):
                late.lerp_(early, 0.05)
        monitor.step(error, batch=old)
        losses.append(error.item())
    assert max(losses[50:]) > sum(losses[20:40]) / 20, losses
    assert mean_of_last(rewards, 40) > 0.7 > sum(rewards[:40]) / 40, rewards


# ------------------------------------------------------------------------------------ layers frozen now and then


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.relu(self.inner(self.norm(x))))


@case(source="https://github.com/liuyuisanai/trojans-face-recognizer/issues/4", tags=("residual", "freezing", "odd"))
def blocks_frozen_now_and_then(attach: Attach) -> None:
    """In each update, a third of the blocks is left out by lot and does not require a gradient. Its gradient is zero
    and it moves on by its momentum. The answer was that this makes no difference.
    """
    torch.manual_seed(675)
    x, y, x_test, y_test = digits()
    blocks = nn.ModuleList([Block(64) for _ in range(6)])
    model = nn.ModuleDict({"stem": nn.Linear(64, 64), "blocks": blocks, "head": nn.Linear(64, 10)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    x, x_test = x.flatten(1), x_test.flatten(1)
    for i in draws(len(x), size=32, steps=300):
        h = model["stem"](x[i])
        for block in blocks:
            is_used = bool(torch.rand(()) > 0.33)
            block.requires_grad_(is_used)
            h = block(h) if is_used else h
        loss = criterion(model["head"](h), y[i])
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        h = model["stem"](x_test)
        for block in blocks:
            h = block(h)
        right = (model["head"](h).argmax(1) == y_test).float().mean().item()
    assert right > 0.9, right
