"""A map comes with evidence that tells a right map from one that misleads."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.attribution.attribute import attribute
from gradwatch.data import digits
from gradwatch.errors import GradwatchError


class Saturated(nn.Module):
    """Grows with the sum of its inputs until 1, and is flat above."""

    def forward(self, x):
        return 1 - torch.relu(1 - x.sum(1))


class Product(nn.Module):
    """The product of the first two inputs, plus a little of the others."""

    def forward(self, x):
        return x[:, 0] * x[:, 1] + 0.01 * x[:, 2:].sum(1)


class Bag(nn.Module):
    """Adds up a number for each token."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 3)

    def forward(self, tokens):
        return self.embedding(tokens).sum((1, 2))


SATURATED = torch.tensor([[1.0, 2.0, 0.5, 0.8]])


@pytest.fixture(scope="module")
def trained():
    """Return a network that has learned the digits, and their training and validation inputs."""
    splits = digits.build()
    inputs, targets = splits.train.inputs, splits.train.targets
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    optimizer.zero_grad()
    return SimpleNamespace(model=model, inputs=inputs, val=splits.val.inputs)


def predicted(model, inputs):
    with torch.no_grad():
        return int(model(inputs).argmax())


def test_the_name_at_the_root_is_this_function():
    assert gradwatch.attribute is attribute


def test_integrated_gradients_of_a_trained_network_are_complete_and_hold(trained):
    found = []
    for number in range(5):
        sample = trained.val[number : number + 1]
        target = predicted(trained.model, sample)
        result = attribute(trained.model, sample, target, data=trained.inputs)
        with torch.no_grad():
            mean = trained.inputs.mean(0, keepdim=True)
            change = trained.model(sample)[0, target] - trained.model(mean)[0, target]
        size = result.values.abs().sum()
        assert result.values.sum() == pytest.approx(float(change), abs=0.01 * float(size))
        found.append(result.verdict)

    assert "misleads" not in found
    assert found.count("holds") >= 4


def test_the_methods_agree_with_weight_times_input_on_a_linear_model():
    torch.manual_seed(1)
    model, x = nn.Linear(6, 3), torch.randn(1, 6)
    expected = model.weight.detach()[2] * x

    for method in ("saliency", "smoothgrad", "integrated", "occlusion"):
        result = attribute(model, x, 2, method=method)
        torch.testing.assert_close(result.contributions, expected, rtol=1e-4, atol=1e-5)
        assert result.evidence.gap < 1e-4
        assert result.evidence.interaction < 1e-4
    assert attribute(model, x, 2).verdict == "holds"
    torch.testing.assert_close(attribute(model, x, 2, method="saliency").values, model.weight.detach()[2:3].abs())


def test_grad_cam_weighs_the_channels_of_a_convolution_by_their_mean_gradient():
    convolution, head = nn.Conv2d(1, 1, 1, bias=False), nn.Linear(16, 1, bias=False)
    nn.init.constant_(convolution.weight, 2.0)
    sample = torch.rand(1, 1, 4, 4)

    found = attribute(nn.Sequential(convolution, nn.Flatten(), head), sample, 0, method="gradcam")

    torch.testing.assert_close(found.values, head.weight.mean().detach() * 2 * sample)


@pytest.mark.parametrize("method", ["saliency", "occlusion"])
def test_a_local_map_of_a_saturated_score_misleads_and_says_so(method):
    result = attribute(Saturated(), SATURATED, method=method)

    assert result.values.abs().max() == 0
    assert result.verdict == "misleads"
    assert [reason.kind for reason in result.reasons] == ["saturation"]
    assert "why: saturation: near this sample the score hardly changes" in str(result)


def test_integrated_gradients_see_past_saturation_with_more_steps():
    result = attribute(Saturated(), SATURATED)

    # the score grows in the same way with each input, so that its change of 1 is shared by size
    torch.testing.assert_close(result.values, SATURATED / SATURATED.sum(), atol=0.01, rtol=0)
    assert result.evaluations > 16
    assert result.verdict == "holds"


def test_a_baseline_within_the_saturation_is_reported():
    result = attribute(Saturated(), SATURATED, baseline=SATURATED - 0.1)

    assert (result.verdict, result.reasons[0].kind) == ("misleads", "saturation")
    assert "from the baseline 'zeros'" in result.reasons[0].text


def test_features_that_act_only_together_leave_doubt():
    result = attribute(Product(), torch.tensor([[2.0, 3.0, 1.0, 1.5, 0.5]]))

    assert result.verdict == "cannot tell"
    assert "interaction" in [reason.kind for reason in result.reasons]
    # without one factor the product is lost, and without both no more than that
    assert result.evidence.interaction == pytest.approx(1.0, abs=0.02)


def test_a_score_that_does_not_depend_on_the_sample_is_reported():
    model = nn.Linear(5, 1)
    nn.init.zeros_(model.weight)

    result = attribute(model, torch.ones(1, 5))

    assert (result.verdict, result.reasons[0].kind) == ("cannot tell", "constant")


def test_tokens_are_explained_by_their_embeddings():
    torch.manual_seed(0)
    model, tokens = Bag(), torch.tensor([[1, 4, 4, 0, 5]])
    expected = model.embedding.weight.detach().sum(1)[tokens[0]]

    result = attribute(model, tokens)

    assert result.totals == pytest.approx(expected.tolist(), rel=1e-4)
    assert "token 5" in str(result)
    assert "'fish'" in str(attribute(model, tokens, names=["a", "b", "c", "d", "fish"]))


def test_smoothgrad_takes_samples_until_its_standard_error_is_small(trained):
    sample = trained.val[:1]

    result = attribute(trained.model, sample, 3, method="smoothgrad", data=trained.inputs)

    assert result.evaluations >= 16
    assert result.standard_error <= 0.1 or result.evaluations == 256


def test_a_call_leaves_modes_gradients_and_random_numbers_alone(trained):
    model = nn.Sequential(trained.model, nn.Dropout()).train()
    torch.manual_seed(5)
    expected = torch.rand(3)

    torch.manual_seed(5)
    first, second = (attribute(model, trained.val[:1], 3, method="smoothgrad") for _ in range(2))

    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)
    assert all(module.training for module in model)
    assert all(p.grad is None for p in model.parameters())
    assert first.to_json() == second.to_json()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: attribute(nn.Linear(4, 3), torch.ones(2, 4), 0), r"inputs: got shape \(2, 4\).*inputs\[3:4\]"),
        (lambda: attribute(nn.Linear(4, 3), torch.ones(1, 4)), "target: got None.*such as target=3"),
        (lambda: attribute(nn.Linear(4, 3), torch.ones(1, 4), 7), r"target: got \(7,\)"),
        (lambda: attribute(nn.Linear(4, 3), torch.ones(1, 5), 0), r"model: does not take inputs of shape \(1, 5\)"),
        (lambda: attribute(nn.Linear(4, 3), torch.ones(1, 4), 0, method="salience"), "did you mean 'saliency'"),
        (
            lambda: attribute(nn.Linear(4, 3), torch.ones(1, 4), 0, method="gradcam"),
            "gradcam needs a model with a Conv2d",
        ),
        (lambda: attribute(nn.Linear(4, 3), torch.full((1, 4), torch.nan), 0), "inputs: the sample has NaN or Inf"),
        (lambda: attribute(nn.Linear(4, 3), torch.ones(1, 4, dtype=torch.long), 0), "type torch.int64"),
        (lambda: attribute(Product(), torch.ones(1, 4, dtype=torch.long)), "no nn.Embedding"),
        (lambda: attribute(nn.Linear(4, 3), torch.ones(1, 4), 0, data=torch.ones(8, 5)), r"data: got \(8, 5\)"),
        (lambda: attribute(nn.Linear(4, 3), torch.ones(1, 4), 0, baseline=torch.ones(4)), "baseline: expected"),
        (lambda: attribute(nn.Linear(4, 3), torch.ones(1, 4), 0, names=["a"]), "names: got 1, expected 4"),
        (lambda: attribute(torch.sin, torch.ones(1, 4), 0), "model: got a builtin_function_or_method"),
    ],
)
def test_a_wrong_argument_is_one_error_that_says_what_is_expected(call, message):
    with pytest.raises(GradwatchError, match=message):
        call()


def test_without_captum_the_error_names_the_extra(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "captum" else find(name, *rest)
    )

    with pytest.raises(GradwatchError, match=r"pip install 'gradwatch\[attribute\]'"):
        attribute(nn.Linear(4, 3), torch.ones(1, 4), 0)
