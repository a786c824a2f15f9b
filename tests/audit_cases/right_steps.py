"""Steps without a mistake, most of them near one: other optimizers, deliberate freezing, second passes, copies."""

import copy

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer, RMSprop, SparseAdam, lr_scheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from audit_cases.planting import batch, net, right


def plain(model, optimizer, given, *, after=lambda: None, before_update=lambda: None):
    """Return an ordinary step as a case."""

    def step(x, y):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        before_update()
        optimizer.step()
        after()
        return loss

    return step, given, model, optimizer


def register_optimizer(name, make):
    """Register an ordinary step with an optimizer."""

    def build():
        model = net()
        return plain(model, make(model.parameters()), batch())

    build.__name__ = name
    right(build)


register_optimizer("sgd", lambda p: SGD(p, lr=0.1))
register_optimizer("sgd_with_momentum_and_decay", lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2))
register_optimizer("sgd_with_nesterov", lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True))
register_optimizer("sgd_with_dampening", lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.5))
register_optimizer("sgd_that_maximizes", lambda p: SGD(p, lr=0.1, maximize=True))
register_optimizer("adam_with_decay", lambda p: Adam(p, weight_decay=1e-2))
register_optimizer("adam_with_amsgrad", lambda p: Adam(p, amsgrad=True))
register_optimizer("adamw", lambda p: AdamW(p, weight_decay=0.1))
register_optimizer("adamw_with_a_tensor_for_the_rate", lambda p: AdamW(p, lr=torch.tensor(1e-3)))
register_optimizer("adam_fused", lambda p: Adam(p, fused=True))
register_optimizer("adam_by_foreach", lambda p: Adam(p, foreach=True))
register_optimizer("rmsprop", lambda p: RMSprop(p, momentum=0.9, weight_decay=1e-2))
register_optimizer("nadam", torch.optim.NAdam)
register_optimizer("adagrad", torch.optim.Adagrad)


@right
def adam_after_some_steps():
    model = net()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    step, given, *rest = plain(model, optimizer, batch())
    for _ in range(3):
        step(*given)
    return step, given, *rest


@right
def groups_with_rates_and_decays_of_their_own():
    model = net()
    optimizer = AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0, "lr": 1e-2},
        ]
    )
    return plain(model, optimizer, batch())


@right
def zero_grad_after_the_update():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(x, y):
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, batch(), model, optimizer


@right
def gradients_cleared_by_hand():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(x, y):
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        for p in model.parameters():
            p.grad = None

    return step, batch(), model, optimizer


@right
def accumulation_with_division():
    model = net()
    optimizer = Adam(model.parameters())

    def step(x, y):
        optimizer.zero_grad()
        for xs, ys in zip(x.chunk(4), y.chunk(4), strict=True):
            (functional.cross_entropy(model(xs), ys) / 4).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step, batch(), model, optimizer


@right
def accumulation_of_sums_over_all_tokens():
    model = net()
    optimizer = Adam(model.parameters())
    x, y = batch()
    y[:3] = -100

    def step(x, y):
        optimizer.zero_grad()
        number = (y != -100).sum()
        for xs, ys in zip(x.chunk(2), y.chunk(2), strict=True):
            (functional.cross_entropy(model(xs), ys, reduction="sum") / number).backward()
        optimizer.step()

    return step, (x, y), model, optimizer


@right
def accumulation_weighted_by_samples():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        for xs, ys in zip(x.split(4), y.split(4), strict=True):
            (functional.cross_entropy(model(xs), ys) * len(xs) / len(x)).backward()
        optimizer.step()

    return step, batch(10), model, optimizer


@right
def accumulation_divided_in_the_gradient():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(parts):
        optimizer.zero_grad()
        for x, y in parts:
            functional.cross_entropy(model(x), y).backward()
        for p in model.parameters():
            p.grad /= len(parts)
        optimizer.step()

    return step, ([batch(4), batch(4)],), model, optimizer


@right
def accumulation_of_masked_sums():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    mask = torch.tensor([1.0, 1, 1, 1, 1, 0, 0, 0])

    def step(x, y, mask):
        optimizer.zero_grad()
        for xs, ys, ms in zip(x.chunk(2), y.chunk(2), mask.chunk(2), strict=True):
            losses = functional.cross_entropy(model(xs), ys, reduction="none")
            ((losses * ms).sum() / mask.sum()).backward()
        optimizer.step()

    return step, (*batch(), mask), model, optimizer


@right
def two_losses_with_a_backward_pass_each():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        (0.1 * model(x + 0.1 * torch.randn_like(x)).pow(2).mean()).backward()
        optimizer.step()

    return step, batch(), model, optimizer


@right
def several_losses_of_one_forward_pass():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        outputs = model(x)
        functional.cross_entropy(outputs[:4], y[:4]).backward(retain_graph=True)
        functional.cross_entropy(outputs[4:], y[4:]).backward()
        optimizer.step()

    return step, batch(), model, optimizer


@right
def scaler_with_clipping():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(x, y):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()

    return step, batch(), model, optimizer


@right
def scaler_with_accumulation_and_a_fused_optimizer():
    model = net()
    optimizer = Adam(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(x, y):
        for xs, ys in zip(x.chunk(2), y.chunk(2), strict=True):
            scaler.scale(functional.cross_entropy(model(xs), ys) / 2).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step, batch(), model, optimizer


@right
def scaler_that_skips_an_overflow():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=3e38)

    def step(x, y):
        optimizer.zero_grad()
        scaler.scale(100 * functional.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()

    return step, batch(), model, optimizer


@right
def scaled_and_unscaled_by_hand():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        (functional.cross_entropy(model(x), y) * 128).backward()
        for p in model.parameters():
            p.grad.mul_(1 / 128)
        optimizer.step()

    return step, batch(), model, optimizer


@right
def clipping_by_value():
    model = net()
    optimizer = Adam(model.parameters())
    return plain(model, optimizer, batch(), before_update=lambda: clip_grad_value_(model.parameters(), 0.01))


@right
def clipping_of_each_group():
    model = net()
    optimizer = Adam(model.parameters())

    def clip():
        clip_grad_norm_(model[0].parameters(), 0.1)
        clip_grad_norm_(model[2].parameters(), 0.5)

    return plain(model, optimizer, batch(), before_update=clip)


@right
def clipping_by_hand():
    model = net()
    optimizer = Adam(model.parameters(), weight_decay=1e-2)

    def clip():
        norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters()))
        for p in model.parameters():
            p.grad.mul_(torch.clamp(0.1 / norm, max=1.0))

    return plain(model, optimizer, batch(), before_update=clip)


@right
def gradient_noise():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, weight_decay=1e-2)

    def noise():
        for p in model.parameters():
            p.grad.add_(torch.randn_like(p), alpha=0.01)

    return plain(model, optimizer, batch(), before_update=noise)


@right
def schedule_for_each_step():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    return plain(model, optimizer, batch(), after=schedule.step)


@right
def warm_up_and_cosine():
    model = net()
    optimizer = AdamW(model.parameters())
    warm_up = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, 20)
    schedule = lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], milestones=[5])
    return plain(model, optimizer, batch(), after=schedule.step)


@right
def two_schedules_of_one_optimizer():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    first, second = lr_scheduler.ExponentialLR(optimizer, 0.9), lr_scheduler.ConstantLR(optimizer, 0.5)

    def after():
        first.step()
        second.step()

    return plain(model, optimizer, batch(), after=after)


@right
def average_of_the_weights():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    average = AveragedModel(model)
    return plain(model, optimizer, batch(), after=lambda: average.update_parameters(model))


@right
def average_by_hand():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, weight_decay=1e-2)
    average = copy.deepcopy(model)

    def after():
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.mul_(0.99).add_(fast, alpha=0.01)

    return plain(model, optimizer, batch(), after=after)


@right
def activation_checkpointing():
    model = net()
    optimizer = Adam(model.parameters())

    def step(x, y):
        optimizer.zero_grad()
        hidden = checkpoint(model[:2], x, use_reentrant=False)
        functional.cross_entropy(model[2](hidden), y).backward()
        optimizer.step()

    return step, batch(), model, optimizer


@right
def reentrant_checkpointing():
    model = net()
    optimizer = Adam(model.parameters())

    def step(x, y):
        optimizer.zero_grad()
        hidden = checkpoint(model[:2], x.requires_grad_(), use_reentrant=True)
        functional.cross_entropy(model[2](hidden), y).backward()
        optimizer.step()

    return step, batch(), model, optimizer


@right
def sharpness_aware_minimization():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, weight_decay=1e-2)

    def step(x, y):
        functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters()))
            shifts = [0.05 * p.grad / norm for p in model.parameters()]
            torch._foreach_add_(list(model.parameters()), shifts)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), shifts)
        optimizer.step()
        optimizer.zero_grad()

    return step, batch(), model, optimizer


class Outer(Optimizer):
    """Wraps another optimizer, with which it shares its groups."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self.param_groups = inner.param_groups

    def step(self, closure=None):
        return self.inner.step(closure)


@right
def optimizer_in_an_optimizer():
    model = net()
    return plain(model, Outer(SGD(model.parameters(), lr=0.1, momentum=0.9)), batch())


@right
def lbfgs_with_a_closure():
    model = net()
    optimizer = LBFGS(model.parameters(), max_iter=4)

    def step(x, y):
        def closure():
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    return step, batch(), model, optimizer


@right
def sgd_with_a_closure():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(x, y):
        def closure():
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    return step, batch(), model, optimizer


@right
def frozen_backbone():
    model = net()
    model[0].requires_grad_(False)
    optimizer = AdamW(model[2].parameters())
    return plain(model, optimizer, batch())


@right
def frozen_backbone_that_the_optimizer_holds():
    model = net()
    model[0].requires_grad_(False)
    return plain(model, AdamW(model.parameters()), batch())


@right
def trained_head_alone():
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    return plain(model, AdamW(model[2].parameters()), batch())


@right
def head_that_this_batch_does_not_use():
    model = nn.ModuleDict({"body": nn.Linear(4, 8), "a": nn.Linear(8, 3), "b": nn.Linear(8, 3)})
    optimizer = Adam(model.parameters())

    def step(x, y):
        optimizer.zero_grad()
        hidden = model["body"](x).tanh()
        model["b"](hidden)
        functional.cross_entropy(model["a"](hidden), y).backward()
        optimizer.step()

    return step, batch(), model, optimizer


def adversaries(chosen):
    """Return a step of a generator and a discriminator, with the optimizer of one of them."""
    models = {"generator": nn.Linear(2, 4), "discriminator": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))}
    optimizers = {name: Adam(model.parameters(), betas=(0.5, 0.999)) for name, model in models.items()}
    criterion = nn.BCEWithLogitsLoss()

    def step(real):
        generator, discriminator = models["generator"], models["discriminator"]
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        discriminator.zero_grad()
        criterion(discriminator(real), ones).backward()
        made = generator(torch.randn(len(real), 2))
        criterion(discriminator(made.detach()), zeros).backward()
        optimizers["discriminator"].step()
        generator.zero_grad()
        criterion(discriminator(made), ones).backward()
        optimizers["generator"].step()

    return step, (torch.randn(8, 4),), models[chosen], optimizers[chosen]


@right
def adversaries_by_the_generator():
    return adversaries("generator")


@right
def adversaries_by_the_discriminator():
    return adversaries("discriminator")


@right
def several_updates_with_clipped_weights():
    model = net()
    optimizer = RMSprop(model.parameters(), lr=1e-3)

    def step(x, y):
        for _ in range(3):
            optimizer.zero_grad()
            functional.cross_entropy(model(x + 0.1 * torch.randn_like(x)), y).backward()
            optimizer.step()
            for p in model.parameters():
                p.data.clamp_(-0.3, 0.3)

    return step, batch(), model, optimizer


@right
def dropout_and_batch_norm():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    return plain(model, SGD(model.parameters(), lr=0.1, weight_decay=1e-3), batch(16))


@right
def tied_weights():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Tanh(), nn.Linear(4, 10, bias=False))
    model[2].weight = model[0].weight
    return plain(model, AdamW(model.parameters()), (torch.randint(0, 10, (8,)), torch.randint(0, 10, (8,))))


@right
def sparse_embedding():
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(1))
    return plain(model, SparseAdam(model.parameters()), (torch.randint(0, 10, (8,)), torch.randint(0, 4, (8,))))


@right
def sparse_embedding_with_sgd():
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(1))
    return plain(model, SGD(model.parameters(), lr=0.1), (torch.randint(0, 10, (8,)), torch.randint(0, 4, (8,))))


@right
def penalty_without_weight_decay():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y) + 5e-3 * sum((p**2).sum() for p in model.parameters())
        loss.backward()
        optimizer.step()

    return step, batch(), model, optimizer


@right
def penalty_of_the_activations_with_weight_decay():
    model = net()
    optimizer = AdamW(model.parameters())

    def step(x, y):
        optimizer.zero_grad()
        outputs = model(x)
        (functional.cross_entropy(outputs, y) + 1e-2 * outputs.pow(2).mean()).backward()
        optimizer.step()

    return step, batch(), model, optimizer


@right
def penalty_of_the_slope():
    model = net()
    optimizer = Adam(model.parameters(), weight_decay=1e-2)

    def step(x, y):
        optimizer.zero_grad()
        x = x.detach().requires_grad_()
        loss = functional.cross_entropy(model(x), y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + 10 * slope.pow(2).sum(1).mean()).backward()
        optimizer.step()

    return step, batch(), model, optimizer


@right
def master_weights_in_float32():
    model = net(dtype=torch.bfloat16)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = SGD(masters, lr=0.1)

    def step(x, y):
        model.zero_grad()
        functional.cross_entropy(model(x.bfloat16()).float(), y).backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)

    return step, batch(), model, optimizer


@right
def learned_weight_of_the_loss():
    model = net()
    log_scale = nn.Parameter(torch.zeros(()))
    optimizer = Adam([*model.parameters(), log_scale])

    def step(x, y):
        optimizer.zero_grad()
        (functional.cross_entropy(model(x), y) * (-log_scale).exp() + log_scale).backward()
        optimizer.step()

    return step, batch(), model, optimizer


@right
def student_of_a_frozen_teacher():
    model, teacher = net(), net()
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        with torch.no_grad():
            wanted = teacher(x).softmax(1)
        functional.kl_div(model(x).log_softmax(1), wanted, reduction="batchmean").backward()
        optimizer.step()

    return step, batch(), model, optimizer


class Trainer:
    """Keeps model, optimizer and counters as attributes, as many training scripts do."""

    def __init__(self):
        self.model = net()
        self.optimizer = AdamW(self.model.parameters())
        self.schedule = lr_scheduler.StepLR(self.optimizer, 1)
        self.seen, self.losses = 0, []

    def step(self, x, y):
        self.optimizer.zero_grad(set_to_none=False)
        loss = functional.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.seen += len(x)
        self.losses.append(loss.item())


@right
def method_of_a_trainer():
    trainer = Trainer()
    return trainer.step, batch(), trainer.model, trainer.optimizer


@right
def evaluation_by_the_average_in_the_step():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    average = copy.deepcopy(model)

    def after():
        kept = copy.deepcopy(model.state_dict())
        model.load_state_dict(average.state_dict())
        with torch.no_grad():
            model(torch.zeros(1, 4))
        model.load_state_dict(kept)

    return plain(model, optimizer, batch(), after=after)
