"""The digits that a step keeps are measured, and the operation that loses them is named with its line."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradwatch
from gradwatch.errors import GradwatchError

LABELS = torch.arange(16) % 4


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


class SpreadByHand(nn.Module):
    """Divides by a standard deviation as E[x^2] - E[x]^2."""

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        spread = x.square().mean(1, keepdim=True) - mean**2
        return (x - mean) / (spread.abs() + 1e-3).sqrt()


class Centered(nn.Module):
    def forward(self, x):
        return (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, correction=0) + 1e-3).sqrt()


def model_of(norm, offset=300.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), norm, nn.Linear(16, 4), nn.Dropout(0.2))
    with torch.no_grad():
        model[0].bias.add_(offset)
    return model


def step_of(model):
    return lambda x, y: F.cross_entropy(model(x), y)


def test_the_subtraction_that_cancels_is_first_with_its_line_and_module():
    model = model_of(SpreadByHand())

    report = gradwatch.precision(step_of(model), torch.randn(16, 8), LABELS, model=model, formats=["fp32"])["fp32"]

    first = report.lost[0]
    assert (first.operation, first.phase, first.module) == ("sub", "forward", "1")
    assert first.place.line == line_of(SpreadByHand, "spread = ")
    # the mean of squares is about 300^2 and its spread about 1: 5 digits cancel
    assert 4 < first.digits < 6.5
    assert report.kept(report.loss) < 4


def test_the_stable_form_of_it_keeps_the_digits():
    batch = torch.randn(16, 8), LABELS
    by_hand, stable = (
        gradwatch.precision(step_of(m), *batch, model=m, formats=["fp32"])["fp32"]
        for m in (model_of(SpreadByHand()), model_of(Centered()))
    )

    assert max(o.digits for o in stable.lost) < 3 < max(o.digits for o in by_hand.lost)
    assert stable.loss < 1e-4  # values near 300 are rounded by 2e-5, and centered to about 1


def test_a_plain_step_loses_nothing_worth_a_line_and_the_errors_are_those_of_the_formats():
    model = model_of(nn.ReLU(), offset=0.0)

    found = gradwatch.precision(step_of(model), torch.randn(16, 8), LABELS, model=model)

    assert not found["fp32"].lost
    errors = {report.format: report.worst_gradient[1] for report in found.formats}
    assert errors["fp32"] < 1e-5 < errors["fp16"] < errors["bf16"] < 0.1, "bfloat16 has three bits less than float16"
    assert found["fp32"].loss < 1e-6
    assert [r.digits for r in found.formats] == pytest.approx([7.2, 2.4, 3.3], abs=0.05)
    assert not found.formulas


def test_the_loss_in_float64_is_the_reference():
    model = model_of(SpreadByHand())
    x = torch.randn(16, 8)
    report = gradwatch.precision(lambda x: model[1](model[0](x)).square().sum(), x, model=model, formats=["fp32"])

    with torch.no_grad():
        plain = float(model[1](model[0](x)).square().sum())
        exact = float(model.double()[1](model[0](x.double())).square().sum())

    assert report["fp32"].loss == pytest.approx(abs(plain - exact) / exact, rel=1e-3)


def test_weights_gradients_buffers_and_random_numbers_are_put_back():
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model[0].weight.grad = torch.ones(4, 8)
    before = {n: v.clone() for n, v in model.state_dict().items()}
    state = torch.get_rng_state()

    gradwatch.precision(
        step_of(model), torch.randn(16, 8, generator=torch.Generator()), LABELS, model=model, whole=True
    )

    assert all(torch.equal(v, before[n]) and v.dtype == before[n].dtype for n, v in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(4, 8))
    assert model[0].bias.grad is None
    assert torch.equal(torch.get_rng_state(), state)


def test_an_overflow_of_fp16_is_named_and_float32_says_how_near_it_is():
    layer = nn.Linear(8, 8)

    def step(x):
        return (layer(x) * 3000.0).square().mean()

    found = gradwatch.precision(step, torch.randn(16, 8), model=layer, whole=True)

    assert found["fp32"].is_finite
    assert found["fp32"].reach.place.startswith(("pow", "mul", "sum"))
    assert 30 < found["fp32"].reach.decades < 35, "a square of thousands, and 3e38"
    assert not found["fp16"].is_finite
    assert found["fp16"].lost[0].error == math.inf
    assert found["fp16"].lost[0].place.line == line_of(step, "3000")
    assert found["fp16"].reach.decades < 0


def test_small_gradients_that_fp16_rounds_to_0_are_counted_and_a_scaler_saves_them():
    layer = nn.Linear(8, 8)

    def step(x):
        return (layer(x) * 1e-7).sum() / 16

    batch = torch.randn(16, 8)
    plain = gradwatch.precision(step, batch, model=layer, formats=["fp16"], scaler=False)["fp16"]
    scaled = gradwatch.precision(step, batch, model=layer, formats=["fp16"])["fp16"]

    assert plain.flushed > 0.5
    assert scaled.flushed == 0
    assert scaled.loss_scale == 65536


def test_the_unstable_formulas_are_named_with_line_and_stable_form():
    model = nn.Linear(8, 4)

    def step(x, y):
        chances = torch.softmax(model(x), 1)
        return F.nll_loss(chances.log(), y)

    (formula,) = gradwatch.precision(step, torch.randn(16, 8), LABELS, model=model, formats=["fp32"]).formulas

    assert formula.place.line == line_of(step, "nll_loss")
    assert formula.stable == "torch.log_softmax(x, -1)"


def test_a_gradient_that_is_0_by_cancellation_has_no_digits_to_lose():
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))

    report = gradwatch.precision(step_of(model), torch.randn(16, 8), LABELS, model=model, formats=["fp32"])["fp32"]

    assert math.isnan(report.gradients["0.bias"]), "batch normalization takes any bias away"
    assert report.worst_gradient[1] < 1e-5
    assert not any(o.digits > 3 for o in report.lost)


def own_backward(model):
    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return step


def checkpointed(model):
    return lambda x, y: F.cross_entropy(checkpoint(model, x, use_reentrant=False), y)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.layer(x[:, None].expand(-1, 3, -1)).mean(1)[:, :4]


class Recurs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(8, 4, batch_first=True)

    def forward(self, x):
        return self.layer(x[:, None].expand(-1, 3, -1))[0][:, -1]


class Convolves(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.MaxPool1d(2))

    def forward(self, x):
        return self.net(x[:, None]).mean(2)


STEPS = {
    "a step with its own backward pass": (lambda: nn.Linear(8, 4), own_backward),
    "checkpointing": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 4)), checkpointed),
    "attention": (Attends, step_of),
    "recurrence": (Recurs, step_of),
    "convolution": (Convolves, step_of),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_gradients_of_any_step_keep_the_digits_of_their_format(name):
    torch.manual_seed(0)
    make, wrap = STEPS[name]
    model = make()

    found = gradwatch.precision(wrap(model), torch.randn(16, 8), LABELS, model=model, formats=["fp32", "bf16"])

    fp32, bf16 = found.formats
    assert set(fp32.gradients) == {n for n, _ in model.named_parameters()}
    assert fp32.worst_gradient[1] < 2e-4
    assert 1e-5 < bf16.loss < 0.1
    assert not fp32.unfollowed


def test_the_result_is_plain_data_and_text():
    model = model_of(SpreadByHand())
    found = gradwatch.precision(step_of(model), torch.randn(16, 8), LABELS, model=model)

    data = found.to_json()
    assert [f["format"] for f in data["formats"]] == ["fp32", "bf16", "fp16"]
    assert data["formats"][0]["lost"][0]["operation"] == "sub"
    assert "digits lost: sub in `1`" in str(found)
    assert "use x.var(-1, correction=0)" in str(found)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gradwatch.precision(step_of(nn.Linear(8, 4)), torch.ones(2, 8), formats=["f32"]), "no format 'f32'"),
        (lambda: gradwatch.precision(lambda x: x.sum(), torch.ones(2, 8)), "nothing requires a gradient"),
        (lambda: gradwatch.precision(3, torch.ones(2, 8)), "step is a int"),
    ],
)
def test_a_mistake_in_the_call_is_one_clear_error(call, message):
    with pytest.raises(GradwatchError, match=message):
        call()
