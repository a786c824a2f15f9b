"""Losses that a script evaluates without gradients are its validation losses."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import gradwatch

EPOCHS, STEPS = 4, 5
BATCHES = (16, 16, 8)


def train(loss_of, evaluate, *, labels=3):
    """Train with a loss, and return what `evaluate` gives for the model and the held-out batches of each epoch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held_out = [(torch.randn(size, 4), torch.randint(labels, (size,))) for size in BATCHES]
    evaluated = []
    for _ in range(EPOCHS):
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss_of(model(torch.randn(16, 4)), torch.randint(labels, (16,))).backward()
            optimizer.step()
        with torch.no_grad():
            evaluated.append(evaluate(model, held_out))
    return evaluated


def mean_over_samples(model, batches):
    """As the example of PyTorch with MNIST does."""
    losses = [functional.cross_entropy(model(x), y, reduction="sum") for x, y in batches]
    return float(sum(losses)) / sum(BATCHES)


def mean_of_module(model, batches):
    losses = [nn.CrossEntropyLoss()(model(x), y) * len(y) for x, y in batches]
    return float(sum(losses)) / sum(BATCHES)


def mean_in_inference_mode(model, batches):
    with torch.inference_mode():
        return mean_of_module(model, batches)


def recorded(folder):
    val_loss = gradwatch.load_run(folder).history["val_loss"]
    return val_loss[np.isfinite(val_loss)]


@pytest.mark.parametrize("evaluate", [mean_over_samples, mean_of_module, mean_in_inference_mode])
def test_the_mean_over_all_held_out_samples_is_recorded(evaluate, unedited, monitors, tmp_path):
    with unedited(run=str(tmp_path / "run")):
        evaluated = train(nn.CrossEntropyLoss(), evaluate)
    monitors[-1].close()

    # what follows the last update belongs to no step
    np.testing.assert_allclose(recorded(tmp_path / "run"), evaluated[:-1], rtol=1e-6)


def test_the_step_after_a_validation_has_its_loss(unedited, monitors, tmp_path):
    with unedited(run=str(tmp_path / "run")):
        train(functional.cross_entropy, mean_of_module)
    monitors[-1].close()
    history = gradwatch.load_run(tmp_path / "run").history

    assert history.steps("val_loss")[np.isfinite(history["val_loss"])].tolist() == [5, 10, 15]


def of_two_terms(outputs, labels):
    return functional.cross_entropy(outputs, labels) + functional.mse_loss(outputs, torch.zeros(16, 3))


def summed(outputs, labels):
    return functional.cross_entropy(outputs, labels, reduction="sum")


def losses_without_a_pass(model, batches):
    return functional.cross_entropy(torch.zeros(8, 3), batches[-1][1])


@pytest.mark.parametrize(
    ("loss_of", "evaluate"),
    [
        (of_two_terms, mean_of_module),
        (summed, mean_of_module),
        (functional.cross_entropy, losses_without_a_pass),
        (functional.cross_entropy, lambda model, batches: model(batches[0][0])),
    ],
)
def test_what_may_be_another_loss_is_not_recorded(loss_of, evaluate, unedited, monitors, tmp_path):
    with unedited(run=str(tmp_path / "run")):
        train(loss_of, evaluate)
    monitors[-1].close()

    assert recorded(tmp_path / "run").size == 0


class Mean(nn.Module):
    def forward(self, x, y):
        return functional.mse_loss(x, y)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
def test_loss_functions_can_still_be_scripted_and_compiled(unedited):
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    with unedited():
        scripted = torch.jit.script(Mean())(x, y)
        compiled = torch.compile(Mean(), backend="eager", fullgraph=True)(x, y)

    assert scripted == compiled == Mean()(x, y)


def test_loss_functions_are_those_of_torch_afterwards(unedited):
    before = functional.cross_entropy
    with unedited():
        assert functional.cross_entropy is not before

    assert functional.cross_entropy is before


@pytest.mark.parametrize("shape", [(8, 3), (8, 3, 5)])
def test_soft_labels_are_averaged_over_samples(shape, unedited, monitors, tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(4, 3) if len(shape) == 2 else nn.Conv1d(4, 3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with unedited(run=str(tmp_path / "run")):
        for step in range(6):
            inputs, labels = torch.randn(8, 4, *shape[2:]), torch.rand(shape).softmax(1)
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            if step == 3:
                with torch.no_grad():
                    mean = functional.cross_entropy(model(inputs), labels)
                    functional.cross_entropy(model(inputs), labels, reduction="sum")
    monitors[-1].close()

    np.testing.assert_allclose(recorded(tmp_path / "run"), [float(mean)], rtol=1e-6)
