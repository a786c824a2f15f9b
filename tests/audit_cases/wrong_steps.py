"""Steps with one planted mistake each; the line that the audit should name is marked."""

import copy

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW, lr_scheduler

from audit_cases.planting import batch, net, wrong


@wrong("loss", "loss-not-divided")
def accumulation_without_division():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        for xs, ys in zip(x.chunk(4), y.chunk(4), strict=True):
            functional.cross_entropy(model(xs), ys).backward()  # planted
        optimizer.step()

    return step, batch(), model, optimizer


@wrong("loss", "loss-not-divided")
def accumulation_over_a_list_without_division():
    model = net()
    optimizer = Adam(model.parameters())
    criterion = nn.MSELoss()

    def step(parts):
        for x, y in parts:
            loss = criterion(model(x), y)
            loss.backward()  # planted
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, ([(torch.randn(4, 4), torch.randn(4, 3)) for _ in range(3)],), model, optimizer


@wrong("loss", "loss-not-divided")
def accumulation_of_scaled_losses_without_division():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def step(x, y):
        optimizer.zero_grad()
        for xs, ys in zip(x.chunk(2), y.chunk(2), strict=True):
            scaler.scale(
                (functional.mse_loss(model(xs), functional.one_hot(ys, 3).float(), reduction="none")).mean()
            ).backward()  # planted
        scaler.step(optimizer)
        scaler.update()

    return step, batch(), model, optimizer


@wrong("loss", "wrong-divisor")
def last_window_divided_by_the_usual_number():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(parts):
        optimizer.zero_grad()
        for x, y in parts:
            (functional.cross_entropy(model(x), y) / 4).backward()  # planted
        optimizer.step()

    return step, ([batch(2) for _ in range(3)],), model, optimizer


@wrong("accumulate", "mean-of-means")
def mean_of_means_over_unequal_samples():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        for xs, ys in zip(x.split(4), y.split(4), strict=True):
            (functional.cross_entropy(model(xs), ys) / 3).backward()  # planted
        optimizer.step()

    return step, batch(10), model, optimizer


@wrong("accumulate", "mean-of-means")
def mean_of_means_over_unequal_tokens():
    model = net()
    optimizer = AdamW(model.parameters())
    x, y = batch(8)
    y[:3] = -100

    def step(x, y):
        optimizer.zero_grad()
        for xs, ys in zip(x.chunk(2), y.chunk(2), strict=True):
            (functional.cross_entropy(model(xs), ys, ignore_index=-100) / 2).backward()  # planted
        optimizer.step()

    return step, (x, y), model, optimizer


@wrong("accumulate", "mean-of-means")
def mean_of_means_by_a_mask():
    model = net()
    optimizer = AdamW(model.parameters())
    mask = torch.tensor([1.0, 1, 1, 1, 1, 0, 0, 0])

    def step(x, y, mask):
        optimizer.zero_grad()
        for xs, ys, ms in zip(x.chunk(2), y.chunk(2), mask.chunk(2), strict=True):
            losses = functional.cross_entropy(model(xs), ys, reduction="none")
            ((losses * ms).sum() / ms.sum() / 2).backward()  # planted
        optimizer.step()

    return step, (*batch(8), mask), model, optimizer


@wrong("gradient", "decay-twice")
def penalty_in_the_loss_and_weight_decay():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, weight_decay=1e-2)

    def step(x, y):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y) + 5e-3 * sum((p**2).sum() for p in model.parameters())
        loss.backward()  # planted
        optimizer.step()

    return step, batch(), model, optimizer


@wrong("gradient", "decay-twice")
def norm_in_the_loss_and_weight_decay():
    model = net()
    optimizer = AdamW(model.parameters(), weight_decay=1e-2)

    def step(x, y):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        for p in model.parameters():
            loss = loss + 1e-3 * torch.linalg.vector_norm(p)
        loss.backward()  # planted
        optimizer.step()

    return step, batch(), model, optimizer


@wrong("gradient", "decay-twice")
def decay_of_the_gradient_by_hand_and_weight_decay():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, weight_decay=1e-4)

    def step(x, y):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()  # planted
        for p in model.parameters():
            p.grad.add_(p.detach(), alpha=1e-4)
        optimizer.step()

    return step, batch(), model, optimizer


@wrong("update", "decay-twice")
def decay_of_the_weights_by_hand_and_weight_decay():
    model = net()
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=1e-1)

    def step(x, y):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        for p in model.parameters():
            p.data.mul_(1 - 1e-3)
        optimizer.step()  # planted

    return step, batch(), model, optimizer


@wrong("gradient", "gradient-dropped")
def features_detached_before_the_head():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        features = model[1](model[0](x)).detach()
        functional.cross_entropy(model[2](features), y).backward()  # planted
        optimizer.step()

    return step, batch(), model, optimizer


@wrong("gradient", "gradient-dropped")
def first_layer_under_no_grad():
    model = net()
    optimizer = Adam(model.parameters())

    def step(x, y):
        optimizer.zero_grad()
        with torch.no_grad():
            hidden = model[0](x)
        functional.cross_entropy(model[2](model[1](hidden)), y).backward()  # planted
        optimizer.step()

    return step, batch(), model, optimizer


@wrong("accumulate", "zero-grad-missing")
def no_zero_grad():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(x, y):
        functional.cross_entropy(model(x), y).backward()  # planted
        optimizer.step()

    return step, batch(), model, optimizer


@wrong("accumulate", "zero-grad-missing")
def zero_grad_of_another_optimizer():
    model, other = net(), net()
    optimizer, second = Adam(model.parameters()), Adam(other.parameters())

    def step(x, y):
        second.zero_grad()
        functional.cross_entropy(model(x) + other(x), y).backward()  # planted
        optimizer.step()
        second.step()

    return step, batch(), model, optimizer


@wrong("accumulate", "zeroed-before-update")
def zero_grad_between_backward_and_step():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(x, y):
        functional.cross_entropy(model(x), y).backward()
        optimizer.zero_grad()  # planted
        optimizer.step()

    return step, batch(), model, optimizer


@wrong("accumulate", "zeroed-between-micro-batches")
def zero_grad_inside_of_the_accumulation():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(x, y):
        for xs, ys in zip(x.chunk(2), y.chunk(2), strict=True):
            optimizer.zero_grad()  # planted
            (functional.cross_entropy(model(xs), ys) / 2).backward()
        optimizer.step()

    return step, batch(), model, optimizer


@wrong("unscale", "not-unscaled")
def scaled_loss_without_the_scaler_step():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(x, y):
        optimizer.zero_grad()
        scaler.scale(functional.cross_entropy(model(x), y)).backward()
        optimizer.step()  # planted

    return step, batch(), model, optimizer


@wrong("unscale", "unscaled-twice")
def unscaled_by_hand_and_by_the_scaler():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(x, y):
        optimizer.zero_grad()
        scaler.scale(functional.cross_entropy(model(x), y)).backward()  # planted
        for p in model.parameters():
            p.grad.div_(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()

    return step, batch(), model, optimizer


@wrong("clip", "clip-before-unscale")
def clip_before_unscale():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(x, y):
        optimizer.zero_grad()
        scaler.scale(functional.cross_entropy(model(x), y)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # planted
        scaler.step(optimizer)
        scaler.update()

    return step, batch(), model, optimizer


@wrong("clip", "clip-before-unscale")
def clip_by_value_before_unscale():
    model = net()
    optimizer = Adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(x, y):
        optimizer.zero_grad()
        scaler.scale(functional.cross_entropy(model(x), y)).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.5)  # planted
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    return step, batch(), model, optimizer


@wrong("clip", "clip-after-update")
def clip_after_the_update():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        clip_grad_norm_(model.parameters(), 1.0)  # planted

    return step, batch(), model, optimizer


@wrong("clip", "clip-of-wrong-parameters")
def clip_of_an_old_copy():
    model = net()
    old = copy.deepcopy(model)
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        clip_grad_norm_(old.parameters(), 1.0)  # planted
        optimizer.step()

    return step, batch(), model, optimizer


@wrong("clip", "clip-of-wrong-parameters")
def clip_of_an_exhausted_generator():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        params = model.parameters()
        functional.cross_entropy(model(x), y).backward()
        norm = sum(p.grad.norm() ** 2 for p in params)
        clip_grad_norm_(params, 1.0)  # planted
        optimizer.step()
        return norm

    return step, batch(), model, optimizer


@wrong("clip", "clip-before-the-sum")
def clip_of_all_micro_batches_but_the_last():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        for i, (xs, ys) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
            (functional.cross_entropy(model(xs), ys) / 2).backward()
            if i == 0:
                clip_grad_norm_(model.parameters(), 0.1)  # planted
        optimizer.step()

    return step, batch(), model, optimizer


@wrong("update", "updated-twice")
def optimizer_stepped_twice():
    model = net()
    optimizer = Adam(model.parameters())

    def step(x, y):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.step()  # planted

    return step, batch(), model, optimizer


@wrong("update", "updated-twice")
def optimizer_stepped_by_hand_and_by_the_scaler():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)

    def step(x, y):
        optimizer.zero_grad()
        scaler.scale(functional.cross_entropy(model(x), y)).backward()
        optimizer.step()
        scaler.step(optimizer)  # planted
        scaler.update()

    return step, batch(), model, optimizer


@wrong("update", "update-before-backward")
def step_before_backward():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        optimizer.step()  # planted
        functional.cross_entropy(model(x), y).backward()

    return step, batch(), model, optimizer


@wrong("update", "update-skipped")
def no_optimizer_step():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()  # planted

    return step, batch(), model, optimizer


@wrong("update", "stale-parameters")
def optimizer_of_a_copy():
    model = net()
    optimizer = Adam(copy.deepcopy(model).parameters())

    def step(x, y):
        model.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()  # planted

    return step, batch(), model, optimizer


@wrong("update", "stale-parameters")
def head_replaced_after_the_optimizer():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    model[2] = nn.Linear(8, 3)

    def step(x, y):
        model.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()  # planted

    return step, batch(), model, optimizer


@wrong("update", "not-in-a-group")
def biases_in_no_group():
    model = net()
    optimizer = SGD([p for p in model.parameters() if p.dim() > 1], lr=0.1)

    def step(x, y):
        model.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()  # planted

    return step, batch(), model, optimizer


@wrong("update", "frozen")
def one_bias_frozen():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    model[0].bias.requires_grad_(False)

    def step(x, y):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()  # planted

    return step, batch(), model, optimizer


@wrong("update", "not-the-formula")
def weights_changed_by_a_hook_of_the_optimizer():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)

    def double(*_):
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=0.1)

    optimizer.register_step_post_hook(double)

    def step(x, y):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()  # planted

    return step, batch(), model, optimizer


@wrong("write-back", "update-undone")
def weights_loaded_back_after_the_update():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(x, y):
        kept = copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()  # planted
        model.load_state_dict(kept)

    return step, batch(), model, optimizer


@wrong("write-back", "update-lost")
def update_smaller_than_the_spacing_of_bfloat16():
    model = net(dtype=torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=1e-6)

    def step(x, y):
        optimizer.zero_grad()
        functional.cross_entropy(model(x.bfloat16()).float(), y).backward()
        optimizer.step()  # planted

    return step, batch(), model, optimizer


@wrong("schedule", "scheduled-twice")
def scheduler_stepped_twice():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, 100)

    def step(x, y):
        optimizer.zero_grad()
        for i, (xs, ys) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
            (functional.cross_entropy(model(xs), ys) / 2).backward()
            if i:
                optimizer.step()
                schedule.step()
        schedule.step()  # planted

    return step, batch(), model, optimizer


@wrong("schedule", "schedule-before-update")
def scheduler_before_the_optimizer():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = lr_scheduler.StepLR(optimizer, 1)

    def step(x, y):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        schedule.step()  # planted
        optimizer.step()

    return step, batch(), model, optimizer
