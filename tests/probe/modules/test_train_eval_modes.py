"""Modes: who trains or validates in the wrong one, whose statistics are off, and who only looks so."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradwatch
from gradwatch.monitor import Schedule

DRAWN = torch.Generator().manual_seed(0)
X = 2 * torch.randn(256, 6, generator=DRAWN) + 1
Y = (X @ torch.randn(6, 3, generator=DRAWN)).argmax(1)


def net(*, dropout=0.3, momentum=0.1, norm=True):
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(16, momentum=momentum)] if norm else [nn.LayerNorm(16)]
    return nn.Sequential(nn.Linear(6, 16), *middle, nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.encoder(x))


def without_gradients(model):
    with torch.no_grad():
        return F.cross_entropy(model(X), Y)


def right(model):
    model.eval()
    loss = without_gradients(model)
    model.train()
    return loss


def forgets(model):
    model.eval()
    return without_gradients(model)


def with_gradients(model):
    return F.cross_entropy(model(X), Y).detach()


def average(model):
    return without_gradients(copy.deepcopy(model).eval())


def drops(model):
    """MC dropout: only the dropout is on."""
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.train()
    loss = without_gradients(model)
    model.train()
    return loss


def noted(monitor):
    """Return the events that are not about the graph or the clearing of gradients."""
    return [e for e in monitor.history.events if not e.kind.startswith(("graph-", "gradients-"))]


def train(model, *, validate=None, every=10, steps=30, before=lambda model, step: None, lr=1e-2, accumulate=1):
    """Train as any loop would, and return what was found of modes as (step, severity, layer) and the events."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr)
    generator = torch.Generator().manual_seed(1)
    with gradwatch.watch(model, optimizer, accumulate=accumulate, schedule=Schedule(budget=0)) as monitor:
        for step in range(steps):
            before(model, step)
            for micro_step in range(accumulate):
                i = torch.randint(0, 256, (32,), generator=generator)
                loss = F.cross_entropy(model(X[i]), Y[i])
                loss.backward()
                if micro_step < accumulate - 1:
                    monitor.step(loss)
            optimizer.step()
            optimizer.zero_grad()
            is_due = validate and step % every == every - 1
            monitor.step(loss, val_loss=validate(model) if is_due else None)
    found = [f for f in monitor.findings() if f.kind == "train-eval-mismatch"]
    return [(f.step, str(f.severity), f.layer) for f in found], noted(monitor)


def test_a_model_that_nothing_puts_back_into_training_mode_is_found_within_ten_steps():
    ((step, severity, layer),), events = train(net(), validate=forgets)
    assert 10 <= step <= 20
    assert (severity, layer) == ("warning", None)
    (event,) = [e for e in events if e.kind == "mode-training"]
    assert event.text == "1 dropout and 1 normalization in evaluation mode while the model is trained"
    assert event.values["trained before"] == 2


def test_a_model_that_trains_in_evaluation_mode_from_the_start_is_found():
    found, events = train(net().eval())
    assert found == [(5, "warning", None)]
    assert events[0].values["never measured"] == 1, "it normalises with mean 0 and variance 1"


@pytest.mark.parametrize(
    ("is_pretrained", "dropout", "severity"),
    [(True, 0.0, "info"), (False, 0.0, "warning"), (True, 0.3, "warning")],
)
def test_frozen_statistics_are_for_information_if_they_were_measured_and_nothing_else_is_off(
    is_pretrained, dropout, severity
):
    model = net(dropout=dropout)
    if is_pretrained:
        model(X)

    found, _ = train(model.eval())

    assert found == [(5, severity, None)]


def test_an_encoder_that_came_in_evaluation_mode_is_for_information_until_it_overfits():
    model = Encoder()
    model.encoder[1] = nn.LayerNorm(16)
    model.encoder.eval()

    def worsens(model):
        return torch.tensor(30.0)

    found, _ = train(model)
    assert {severity for _, severity, _ in found} == {"info"}
    found, _ = train(model, validate=worsens)
    assert "warning" in {severity for _, severity, _ in found}


def test_a_part_that_is_left_in_evaluation_mode_is_named():
    model = Encoder()
    found, _ = train(model, before=lambda m, step: m.encoder.eval() if step >= 12 else None)
    assert found == [(found[0][0], "warning", "encoder")]
    assert 12 < found[0][0] <= 25


@pytest.mark.parametrize("validate", [without_gradients, with_gradients])
def test_validation_in_training_mode_is_found(validate):
    found, _ = train(net(), validate=validate)
    assert found == [(10, "warning", None)]


def evaluated(model, calls, *, at, steps=40, mode=lambda model: None):
    """Train without a validation loss, and evaluate after some steps; return the steps and severities that are found.

    The evaluation makes `calls` forward calls without gradients.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    monitor = gradwatch.watch(model, optimizer, on_finding=None)
    for step in range(steps):
        model.train()
        loss = F.cross_entropy(model(X[step : step + 32]), Y[step : step + 32])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss)
        if step in at:
            mode(model)
            for _ in range(calls):
                without_gradients(model)
    monitor.close()
    return [(f.onset, str(f.severity)) for f in monitor.findings() if f.kind == "train-eval-mismatch"]


@pytest.mark.parametrize(("at", "onset"), [((19, 29), 20), ((39,), 39)])
def test_an_evaluation_without_a_validation_loss_is_found_also_after_the_last_step(at, onset):
    assert evaluated(net(), 8, at=at) == [(onset, "warning")]


@pytest.mark.parametrize(
    ("calls", "at", "mode"),
    [
        (8, (19, 29), nn.Module.eval),
        (1, (19, 29), lambda model: None),  # one sample of a generator
        (4, range(40), lambda model: None),  # targets from the model itself, at each step
    ],
)
def test_other_passes_without_gradients_are_quiet(calls, at, mode):
    assert evaluated(net(), calls, at=at, mode=mode) == []


def test_a_model_with_one_mode_may_be_evaluated_in_training_mode():
    assert evaluated(net(dropout=0.0, norm=False), 8, at=(19,)) == []


def of_its_parts(model):
    with torch.no_grad():
        return F.cross_entropy(model.head(model.encoder(X)), Y)


def of_its_parts_in_evaluation_mode(model):
    model.eval()
    loss = of_its_parts(model)
    model.train()
    return loss


def test_validation_by_the_parts_of_a_model_is_found_too():
    found, _ = train(Encoder(), validate=of_its_parts)
    assert [(severity, layer) for _, severity, layer in found] == [("warning", None)]

    assert train(Encoder(), validate=of_its_parts_in_evaluation_mode)[0] == []


@pytest.mark.parametrize("momentum", [0.0, 0.99])
def test_a_momentum_that_lets_nothing_in_or_nothing_stay_is_found(momentum):
    assert train(net(momentum=momentum))[0] == [(0, "warning", "1")]


@pytest.mark.parametrize("validate", [right, forgets], ids=["train() after a validation", "train() before a step"])
def test_statistics_that_do_not_follow_are_found_where_they_harm(validate):
    model = net(momentum=1e-4, dropout=0)
    nn.init.normal_(model[0].weight, std=3)  # a spread that running statistics near 1 do not have
    found, events = train(model, validate=validate, before=set_training, every=20, steps=120, lr=3e-2)
    assert [(severity, layer) for _, severity, layer in found] == [("warning", "1")]
    assert {e.kind for e in events} == {"norm-distance"}


def set_training(model, step):
    model.train()


def eval_norms(model, step):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()


def frozen(model):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.requires_grad_(False)
    return model.eval()


FROZEN = {
    "normalisations alone": (net(), {"before": eval_norms}, "1"),
    "their scale too": (frozen(net(dropout=0)), {}, "1"),
}


@pytest.mark.parametrize("name", FROZEN)
def test_what_is_frozen_on_purpose_is_for_information(name):
    model, options, layer = FROZEN[name]
    assert train(model, **options)[0] == [(5, "info", layer)]


def test_a_pretrained_part_without_dropout_is_for_information():
    model = Encoder()
    model.encoder[3] = nn.Identity()
    train(model)
    assert train(model, before=lambda m, step: m.encoder.eval())[0] == [(5, "info", "encoder")]


def slips(model, step):
    model.train(step != 20)


HEALTHY = {
    "train() and eval() where they belong": (net(), {"validate": right}),
    "validation at every step": (net(), {"validate": right, "every": 1}),
    "an average of the weights": (net(), {"validate": average}),
    "MC dropout": (net(), {"validate": drops}),
    "accumulation": (net(), {"validate": right, "accumulate": 3}),
    "no validation": (net(), {}),
    "one step in the wrong mode": (net(), {"before": slips}),
    "nothing that has a mode": (net(norm=False, dropout=0), {"validate": forgets}),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_modes_raise_no_alarm(name):
    model, options = HEALTHY[name]
    assert train(model, **options) == ([], [])


def test_a_frozen_extractor_in_evaluation_mode_is_quiet():
    model = Encoder()
    model.encoder.requires_grad_(False)
    found, _ = train(model, before=lambda m, step: m.encoder.eval())
    assert found == []


def test_models_that_take_turns_are_quiet():
    """A GAN whose halves are in evaluation mode while the other one trains."""
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6))
    other = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizers = [torch.optim.Adam(m.parameters(), 1e-3) for m in (one, other)]
    with gradwatch.watch({"one": one, "other": other}, optimizers) as monitor:
        for step in range(30):
            one.eval()
            other.train()
            with torch.no_grad():
                made = one(torch.randn(16, 4))
            loss = F.softplus(-other(X[:16])).mean() + F.softplus(other(made)).mean()
            loss.backward()
            optimizers[1].step()
            one.train()
            other.eval()
            F.softplus(-other(one(torch.randn(16, 4)))).mean().backward()
            optimizers[0].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            monitor.step(loss, val_loss=without_turn(one) if step % 10 == 9 else None)
    assert [f for f in monitor.findings() if f.kind == "train-eval-mismatch"] == []


def without_turn(model):
    model.eval()
    with torch.no_grad():
        return model(torch.randn(16, 4)).square().mean()


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager")], ids=["parallel", "compiled"]
)
def test_a_wrapper_that_is_not_told_of_the_mode_is_no_matter(wrap):
    """Users keep the model and its wrapper, call the one and switch the other."""
    model = net()
    wrapped = wrap(model)
    optimizer = torch.optim.Adam(model.parameters())
    with gradwatch.watch(wrapped, optimizer) as monitor:
        for step in range(20):
            loss = F.cross_entropy(wrapped(X[:32]).cpu(), Y[:32])  # where there is a GPU, the wrapper moves to it
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            val_loss = None
            if step % 5 == 4:
                model.eval()
                with torch.no_grad():
                    val_loss = F.cross_entropy(wrapped(X).cpu(), Y)
                model.train()
            monitor.step(loss, val_loss=val_loss)
    torch._dynamo.reset()
    assert noted(monitor) == []
