"""Loops that look wrong and are not: copies now and then, folds in place, rare frauds, and a critic that is faster."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import digits, draws
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------ a copy now and then


@case(source="arXiv:1312.5602, with the target network of Mnih et al. 2015", tags=("rl", "target", "odd"))
def network_copied_now_and_then(attach: Attach) -> None:
    """An agent learns to walk to the end of a corridor. The network of the targets is copied every 100 updates, and the
    loss rises after copies, since the values of more places become known.
    """
    torch.manual_seed(761)
    generator = torch.Generator().manual_seed(1)
    length = 10

    def seen(place: Tensor) -> Tensor:
        return F.one_hot(place, length).float()

    model = nn.Sequential(nn.Linear(length, 64), nn.ReLU(), nn.Linear(64, 2))
    target = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    place = torch.randint(0, length - 1, (4000,), generator=generator)
    move = torch.randint(0, 2, (4000,), generator=generator)
    after = (place + 2 * move - 1).clamp(min=0)
    is_over = after == length - 1
    for step, i in enumerate(draws(4000, size=32, steps=600)):
        if step % 100 == 0:
            target.load_state_dict(model.state_dict())
        with torch.no_grad():
            wanted = is_over[i].float() + 0.9 * ~is_over[i] * target(seen(after[i])).amax(1)
        loss = F.mse_loss(model(seen(place[i])).gather(1, move[i, None]).squeeze(1), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=seen(place[i]))
    with torch.no_grad():
        values = model(seen(torch.arange(length - 1)))
    assert (values[3:, 1] > values[3:, 0]).all(), values


# ------------------------------------------------------------------------------------ folds in place


@case(source="https://discuss.pytorch.org/t/reset-model-weights/19180", tags=("cnn", "folds", "odd"))
def folds_in_place(attach: Attach) -> None:
    """Four folds are trained one after the other. The weights are drawn again for each of them, in place, and the
    optimizer forgets its moments: the loss returns to 2.3 three times.
    """
    torch.manual_seed(762)
    x, y, _, _ = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 32), nn.ReLU(),
        nn.Linear(32, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    fold = torch.arange(len(x)) % 4
    right = []
    for held in range(4):
        for layer in model:
            if isinstance(layer, nn.Conv2d | nn.Linear):
                layer.reset_parameters()
        optimizer.state.clear()
        known = (fold != held).nonzero().squeeze(1)
        for step, i in enumerate(draws(len(known), size=32, steps=100, seed=held)):
            loss = criterion(model(x[known[i]]), y[known[i]])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            val_loss = None
            if step % 25 == 24:
                with torch.no_grad():
                    said = model(x[fold == held])
                    val_loss = criterion(said, y[fold == held]).item()
            monitor.step(loss, batch=x[known[i]], val_loss=val_loss)
        right.append((said.argmax(1) == y[fold == held]).float().mean().item())
    assert min(right) > 0.9, right


# ------------------------------------------------------------------------------------ rare frauds


@case(source="https://pytorch.org/docs/stable/generated/torch.nn.BCEWithLogitsLoss.html", tags=("tabular", "odd"))
def frauds_that_weigh_more(attach: Attach) -> None:
    """Two of 100 payments are frauds, and count 50 times as much as the others. Most batches have one or none, and the
    loss differs from batch to batch by a factor of 30.
    """
    torch.manual_seed(763)
    generator = torch.Generator().manual_seed(1)
    is_fraud = (torch.rand(6000, generator=generator) < 0.02).float()
    x = torch.randn(6000, 12, generator=generator)
    x[:, :3] += 1.5 * is_fraud[:, None] * (1 + x[:, 3:6])
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(49.0))
    monitor = attach(model, optimizer, loss_fn=criterion)
    for i in draws(5000, size=32, steps=500):
        loss = criterion(model(x[i]).squeeze(1), is_fraud[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        scores = model(x[5000:]).squeeze(1)
    frauds, others = scores[is_fraud[5000:] == 1], scores[is_fraud[5000:] == 0]
    above = (frauds[:, None] > others).float().mean().item()
    assert above > 0.8, above


# ------------------------------------------------------------------------------------ a critic that learns faster


@case(source="arXiv:1706.08500 and arXiv:1801.04406", tags=("gan", "odd"))
def critic_that_learns_faster(attach: Attach) -> None:
    """The discriminator learns four times as fast as the generator and makes two steps for one of it, with a penalty
    for its slope at the real points (two time scales). Neither loss falls, and the points come to lie on a ring.
    """
    torch.manual_seed(764)
    generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    model = nn.ModuleDict({"generator": generator, "critic": critic})
    forging = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.0, 0.99))
    judging = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.0, 0.99))
    monitor = attach(model, [forging, judging])

    def real() -> Tensor:
        angle = 2 * torch.pi * torch.rand(128, 1)
        return torch.cat([angle.cos(), angle.sin()], 1) * (1 + 0.05 * torch.randn(128, 1)) + 1

    for _ in range(600):
        for _ in range(2):
            points = real().requires_grad_()
            judged = critic(points)
            (slopes,) = torch.autograd.grad(judged.sum(), points, create_graph=True)
            forged = generator(torch.randn(128, 8)).detach()
            loss = F.softplus(-judged).mean() + F.softplus(critic(forged)).mean()
            loss = loss + 0.05 * slopes.square().sum(1).mean()
            judging.zero_grad()
            loss.backward()
            judging.step()
        loss_of_generator = F.softplus(-critic(generator(torch.randn(128, 8)))).mean()
        forging.zero_grad()
        loss_of_generator.backward()
        forging.step()
        monitor.step(loss_of_generator, batch=points.detach())
    with torch.no_grad():
        radius = (generator(torch.randn(2000, 8)) - 1).norm(dim=1)
    assert abs(radius.median().item() - 1) < 0.2, radius.median()


# ------------------------------------------------------------------------------------ easy digits first


@case(source="arXiv:1904.03626", tags=("cnn", "curriculum", "odd"))
def easy_digits_first(attach: Attach) -> None:
    """The first steps see only the digits that a linear model finds easy, and later ones more and more of the others:
    the loss falls to 0.1 and then rises while the network learns.
    """
    torch.manual_seed(765)
    x, y, x_test, y_test = digits()
    x, x_test = (part + 0.25 * torch.randn(part.shape) for part in (x, x_test))
    judge = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    sorting = torch.optim.Adam(judge.parameters(), lr=0.01)
    for i in draws(len(x), size=64, steps=60):
        sorting.zero_grad()
        F.cross_entropy(judge(x[i]), y[i]).backward()
        sorting.step()
    with torch.no_grad():
        order = F.cross_entropy(judge(x), y, reduction="none").argsort()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(),
        nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    generator = torch.Generator().manual_seed(1)
    for step in range(300):
        known = int(len(x) * min(1, 0.15 + step / 250))
        i = order[torch.randint(0, known, (32,), generator=generator)]
        loss = criterion(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        right = (model(x_test).argmax(1) == y_test).float().mean().item()
    assert right > 0.8, right
