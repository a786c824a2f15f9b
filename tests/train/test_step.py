"""An optimizer step is that of the full batch, whatever is accumulated, and leaves out what must be left out."""

import math

import pytest
import torch
from torch import nn

from gradwatch.config.sections.train import ClipSection
from gradwatch.errors import GradwatchError
from gradwatch.train.objective import Objective
from gradwatch.train.step import Stepper

CPU = torch.device("cpu")


def make_stepper(model, loss=None, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    defaults = {"scaler": None, "precision": "fp32", "clip": None, "on_nonfinite": "skip"}
    return Stepper(
        model=model,
        objective=Objective(function=loss or nn.CrossEntropyLoss()),
        optimizer=optimizer,
        observe=lambda: float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])),
        device=CPU,
        **defaults | options,
    )


def classifier(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))


def samples(n, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 5, generator=generator), torch.randint(3, (n,), generator=generator)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("sizes", [[4, 4, 4, 4], [6, 6, 4], [1, 15]])
def test_accumulation_equals_the_full_batch_also_where_micro_batches_differ_in_size(sizes):
    x, y = samples(16)
    whole, parts = classifier(), classifier()

    make_stepper(whole).run([(x, y)])
    result = make_stepper(parts).run(list(zip(x.split(sizes), y.split(sizes), strict=True)))

    torch.testing.assert_close(weights(parts), weights(whole), rtol=1e-6, atol=1e-7)
    assert result.samples == 16


def test_accumulation_weighs_micro_batches_by_the_targets_that_are_not_ignored():
    x, y = samples(12)
    y[:5] = -100
    whole, parts = classifier(), classifier()

    full = make_stepper(whole).run([(x, y)])
    split = make_stepper(parts).run(list(zip(x.split(4), y.split(4), strict=True)))

    torch.testing.assert_close(weights(parts), weights(whole), rtol=1e-6, atol=1e-7)
    assert split.loss == pytest.approx(full.loss, rel=1e-6)


def test_accumulation_weighs_micro_batches_by_class_weights():
    x, y = samples(12)
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 10.0, 0.1]))
    whole, parts = classifier(), classifier()

    make_stepper(whole, loss).run([(x, y)])
    make_stepper(parts, loss).run(list(zip(x.split(4), y.split(4), strict=True)))

    torch.testing.assert_close(weights(parts), weights(whole), rtol=1e-6, atol=1e-7)


def test_accumulation_of_a_summed_loss_adds_it_up():
    x, y = samples(12)
    loss = nn.CrossEntropyLoss(reduction="sum")
    whole, parts = classifier(), classifier()

    make_stepper(whole, loss).run([(x, y)])
    make_stepper(parts, loss).run(list(zip(x.split(4), y.split(4), strict=True)))

    torch.testing.assert_close(weights(parts), weights(whole), rtol=1e-5, atol=1e-6)


def test_a_loss_that_is_not_finite_is_never_differentiated_and_the_weights_stay():
    model = classifier()
    before = weights(model)
    x, y = samples(4)
    x[0] = math.nan

    result = make_stepper(model).run([(x, y)])

    assert (result.skipped, result.finite) == (True, False)
    assert math.isnan(result.loss)
    assert torch.equal(weights(model), before)


def test_a_gradient_that_is_not_finite_moves_nothing_either():
    model = classifier()
    before = weights(model)
    x, y = samples(4)

    def root_of_zero(outputs, targets):
        return (outputs.sum() * 0).sqrt()  # finite, and its derivative is not

    result = make_stepper(model, root_of_zero).run([(x, y)])

    assert (result.skipped, result.finite, result.loss) == (True, False, 0.0)
    assert torch.equal(weights(model), before)


def test_continue_lets_a_nan_through():
    model = classifier()
    x, y = samples(4)
    x[0] = math.nan

    result = make_stepper(model, on_nonfinite="continue").run([(x, y)])

    assert not result.skipped
    assert weights(model).isnan().any()


def test_clipping_limits_the_norm_and_reports_both():
    x, y = samples(8)
    free, clipped = classifier(), classifier()

    before = make_stepper(free).run([(x, y)])
    result = make_stepper(clipped, clip=ClipSection(norm=before.norm / 4)).run([(x, y)])

    assert result.norm == before.norm
    assert result.clipped_norm == pytest.approx(before.norm / 4)
    start = weights(classifier())
    torch.testing.assert_close(weights(clipped) - start, (weights(free) - start) / 4, rtol=1e-4, atol=1e-7)


def test_clipping_by_value_limits_every_element():
    model = classifier()
    stepper = make_stepper(model, clip=ClipSection(value=1e-4))
    before = weights(model)

    stepper.run([samples(8)])

    assert (weights(model) - before).abs().max() <= 1e-4 * 0.1 * 1.01


def test_the_scaler_skips_and_halves_on_overflow_and_the_norms_are_those_of_the_loss():
    plain, scaled = classifier(), classifier()
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    x, y = samples(8)

    expected = make_stepper(plain).run([(x, y)])
    stepper = make_stepper(scaled, scaler=scaler)
    result = stepper.run([(x, y)])
    start = weights(scaled)
    stepper.objective.function = lambda outputs, targets: (outputs.sum() * 0).sqrt()
    overflow = stepper.run([(x, y)])

    assert result.norm == pytest.approx(expected.norm, rel=1e-6)
    assert result.loss_scale == 65536.0
    assert overflow.skipped
    assert overflow.finite, "an overflow under a scaler is the scaler's affair"
    assert scaler.get_scale() == 32768.0
    assert torch.equal(weights(scaled), start)


def test_lbfgs_takes_the_loss_again_at_each_point_of_its_search():
    torch.manual_seed(0)
    model = nn.Linear(5, 1)
    x, _ = samples(32)
    y = x @ torch.arange(5.0)[:, None] + 2
    stepper = make_stepper(model, nn.MSELoss())
    stepper.optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0)

    losses = [stepper.run([(x, y)]).loss for _ in range(3)]

    assert losses[-1] < 1e-6 * losses[0], "least squares takes a quasi-Newton method a few steps"


def test_a_model_that_returns_a_tuple_is_told_what_to_do():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(5, 3)

        def forward(self, x):
            return self.head(x), x

    with pytest.raises(GradwatchError, match=r"model: returned a tuple of 2, expected one tensor .* return the logits"):
        make_stepper(Two()).run([samples(4)])


def test_a_target_is_never_broadcast_against_a_prediction():
    model = nn.Linear(5, 1)
    x, _ = samples(4)

    with pytest.raises(GradwatchError, match=r"outputs of shape \(4, 1\) and targets of shape \(4, 2\)"):
        make_stepper(model, nn.MSELoss()).run([(x, torch.zeros(4, 2))])


def test_targets_of_the_same_size_take_the_shape_of_the_prediction():
    model = nn.Linear(5, 1)
    x, _ = samples(4)
    y = torch.arange(4.0)
    with torch.no_grad():
        expected = (model(x)[:, 0] - y).square().mean().item()

    result = make_stepper(model, nn.MSELoss()).run([(x, y)])

    assert result.loss == pytest.approx(expected, rel=1e-6)


def test_a_loss_per_sample_is_refused():
    with pytest.raises(GradwatchError, match=r"loss: returned a tensor of shape \(4,\), expected a scalar"):
        make_stepper(classifier(), nn.CrossEntropyLoss(reduction="none")).run([samples(4)])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_computes_in_the_format_asked_for(precision):
    model = classifier()
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))

    make_stepper(model, precision=precision).run([samples(4)])

    assert seen == [{"bf16": torch.bfloat16, "fp16": torch.float16}[precision]]
