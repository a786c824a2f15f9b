"""The gradient of a step is judged right or wrong, and a wrong one is named with its place."""

import pytest
import torch
from gradient_cases.every_case import CASES
from torch import nn
from torch.autograd import Function

import gradwatch
from gradwatch.errors import GradwatchError
from gradwatch.gradcheck.check import run_check
from gradwatch.gradcheck.options import CheckOptions

# one case of each way in which a mistake is found, and of each way in which a right one misleads
WRONG = (
    "attention_without_its_inner_product",
    "leak_in_place_with_a_squared_slope",
    "penalty_through_a_backward_that_detaches",
    "dense_with_a_mean_for_the_bias",
    "square_map_transposed",
    "exponential_that_saves_its_input",
    "hinge_that_ignores_its_weight",
    "complex_product_without_conjugates",
    "square_that_reads_memory_in_order",
    "square_whose_input_is_clamped_later",
    "sigmoid_whose_output_is_scaled_later",
    "step_that_scales_by_its_rate",
    "accumulation_without_its_division",
    "tied_weight_counted_for_each_layer",
    "activation_with_a_hook",
    "module_with_a_backward_hook",
    "norm_with_a_detached_scale",
    "backprop_by_hand_transposed",
    "adjoint_solve_that_stops_early",
    "equilibrium_layer_without_an_adjoint_solve",
)
RIGHT = (
    "relu_at_zero",
    "gradients_per_sample",
    "batch_norm_in_training",
    "network_with_binary_weights",
    "penalty_of_the_slope_through_a_function",
    "reentrant_checkpoint",
    "sparse_embedding",
    "complex_weights",
    "large_offset",
    "spectral_norm_in_training",
    "straight_through_by_detach",
    "target_that_is_detached",
    "step_under_autocast",
    "counted_calls",
    "equilibrium_layer_with_a_hook",
    "estimate_that_is_fed_back_once",
)
BY_NAME = {case.name: case for case in CASES}


def checked(case):
    built = case.build()
    if isinstance(built[0], nn.Module):
        module, inputs, loss = built
        return run_check(lambda *given: loss(module(*given)), inputs, model=module, functions=(loss, module))
    step, model, batch = built
    return run_check(lambda given: step(model, given), (batch,), model=model, functions=(step,))


@pytest.mark.parametrize("name", WRONG)
def test_a_planted_mistake_is_found_and_named(name):
    case = BY_NAME[name]

    found = checked(case)

    assert found.is_wrong
    first = found.faults[0]
    assert first.kind == case.kind
    assert first.where in case.where
    assert (first.place.file, abs(first.place.line - case.line) <= 2) == (case.file, True)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_gradient_that_misleads_differences_is_no_alarm(name):
    found = checked(BY_NAME[name])

    assert not found.faults
    assert not found.is_wrong


class Doubled(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, grad):
        return grad * 6


def test_the_text_names_the_argument_the_function_the_line_and_the_ratio():
    layer = nn.Linear(4, 3)

    text = str(gradwatch.check(lambda x: Doubled.apply(layer(x)).sin().sum(), torch.randn(5, 4), model=layer))

    line = Doubled.backward.__code__.co_firstlineno + 2
    assert text.startswith("the gradient is wrong\n")
    place = f"(tests/gradcheck/test_check.py:{line})"
    assert f"the gradient of `x` in Doubled.backward {place} is 2 times too large" in text


def test_everything_is_put_back_bit_for_bit():
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 2))
    net[0].weight.grad = torch.ones(5, 4)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    batch = torch.randn(6, 4)
    state = torch.get_rng_state()

    found = gradwatch.check(lambda x: net(x).square().mean(), batch, model=net)

    assert found.verdict == "right"
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(value.dtype == before[name].dtype for name, value in net.state_dict().items())
    assert torch.equal(net[0].weight.grad, torch.ones(5, 4))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_custom_function_is_as_it_was_afterwards():
    kept = (Doubled.__dict__["forward"], Doubled.__dict__["backward"])
    layer = nn.Linear(4, 3)

    gradwatch.check(lambda x: Doubled.apply(layer(x)).sin().sum(), torch.randn(5, 4), model=layer)

    assert (Doubled.__dict__["forward"], Doubled.__dict__["backward"]) == kept


def test_gradients_by_hand_are_compared_with_numbers():
    layer = nn.Linear(4, 3)
    x = torch.randn(6, 4)
    by_hand = {"weight": 2 * layer(x).detach().t() @ x, "bias": 2 * layer(x).detach().mean(0)}

    found = gradwatch.check(lambda x: layer(x).square().sum(), x, model=layer, gradients=by_hand)

    assert {t.name: t.verdict for t in found.tensors} == {"weight": "right", "bias": "wrong"}
    assert found.faults[0].kind == "bias_mean"
    assert found.faults[0].ratio == pytest.approx(1 / 6, rel=1e-3)


def test_a_function_that_differs_on_purpose_can_be_allowed_by_name():
    layer = nn.Linear(4, 3)

    found = gradwatch.check(
        lambda x: Doubled.apply(layer(x)).sin().sum(), torch.randn(5, 4), model=layer, allow=["Doubled"]
    )

    assert found.verdict == "right"
    assert any("Doubled" in note for note in found.notes)


def test_the_law_of_the_batch_is_reported():
    layer = nn.Linear(4, 3)
    norm = nn.BatchNorm1d(4)
    batch = torch.randn(8, 4)

    by_mean = gradwatch.check(lambda x: layer(x).square().mean(), batch, model=layer)
    by_sum = gradwatch.check(lambda x: layer(x).square().sum(), batch, model=layer)
    mixed = gradwatch.check(lambda x: norm(x).sin().sum(), batch, model=norm)

    assert by_mean.coverage.batches == (8, 4)
    assert by_mean.coverage.batch == "the loss is the mean over its halves, and so is the gradient"
    assert by_sum.coverage.batch == "the loss is the sum over its halves, and so is the gradient"
    assert "samples affect each other" in mixed.coverage.batch


class Floats(Function):
    @staticmethod
    def forward(ctx, x):
        if x.dtype != torch.float32:
            raise RuntimeError("expected float32")
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad / x.cosh() ** 2


def test_a_step_that_needs_float32_is_checked_in_it():
    layer = nn.Linear(4, 3)

    found = gradwatch.check(lambda x: Floats.apply(layer(x)).square().sum(), torch.randn(5, 4), model=layer)

    assert found.coverage.dtype == "float32"
    assert found.verdict == "right"


def test_a_mistake_in_the_call_says_what_was_expected():
    layer = nn.Linear(4, 3)

    def step(x):
        return layer(x).sum()

    with pytest.raises(GradwatchError, match="no tensor 'wieght'; did you mean 'weight'"):
        gradwatch.check(step, torch.randn(5, 4), model=layer, gradients={"wieght": torch.ones(3, 4)})
    with pytest.raises(GradwatchError, match=r"'weight' has shape \(4, 3\), expected \(3, 4\)"):
        gradwatch.check(step, torch.randn(5, 4), model=layer, gradients={"weight": torch.ones(4, 3)})
    with pytest.raises(GradwatchError, match="without a graph"):
        gradwatch.check(lambda x: layer(x).detach().sum(), torch.randn(5, 4), model=layer)


def test_of_a_gradient_that_is_0_the_absolute_size_of_a_visible_mistake_is_said():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))  # the normalization takes any bias away

    found = gradwatch.check(lambda x: (model(x) - 1).square()[:, 0].sum(), torch.randn(8, 4), model=model)

    bias, weight = (next(t for t in found.tensors if t.name == name) for name in ("0.bias", "0.weight"))
    assert bias.verdict == "right"
    assert bias.visible == float("inf")
    assert 0 < bias.visible_norm < 1e-6
    assert weight.visible < 1e-2
    assert "the gradient of `0.bias` is 0 next to the others: only a mistake of norm" in str(found)
    seen = next(line for line in str(found).splitlines() if "would have been seen" in line)
    assert float(seen.split()[3]) < 1, "percent"


def test_the_progress_is_reported_before_each_direction():
    torch.manual_seed(0)
    model, told = nn.Linear(4, 2), []

    found = run_check(
        lambda x: model(x).square().mean(),
        (torch.randn(8, 4),),
        model=model,
        functions=(),
        options=CheckOptions(within=20, progress=told.append),
    )

    assert told[0] == "direction 1, 0 of at most 20 s"
    assert len(told) == found.coverage.directions
