"""Predictions that fit other samples as well as their own are told, whatever the loss is made of; others are not."""

# N = samples, C = classes

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradwatch.probe.batches.loss_forms import MIN_SAMPLES
from gradwatch.probe.batches.target_fit import WINDOW_SAMPLES
from gradwatch.probe.batches.target_match import MAX_VALUES, TargetMatch, slices_of
from gradwatch.probe.device.sync import Arrival
from gradwatch.probe.gradients.recurrence import RecurrenceProbe
from gradwatch.probe.output_reader import ForwardCall

N, C = 256, 4


def seen(knowledge, loss_of, targets_of, *, looks=WINDOW_SAMPLES, shape=(N, C), saved_at=None):
    """Return the kinds that are told of steps whose predictions are noise and so much of the target."""
    match, found = TargetMatch(nn.Identity()), []
    torch.manual_seed(0)
    for look in range(looks):
        if look == saved_at:
            saved, match = match.state(), TargetMatch(nn.Identity())
            match.restore(saved)
        targets, values = targets_of()
        known = knowledge(look) if callable(knowledge) else knowledge
        scores = (0.3 * torch.randn(shape) + known * values + 1.5).requires_grad_()
        match.watch(ForwardCall(scores))
        loss = loss_of(scores, targets)
        loss.backward()
        found += [kind for kind, *_ in match.find(loss)]
    return found


def classes():
    labels = torch.randint(0, C, (N,))
    return labels, F.one_hot(labels, C)


def flags():
    labels = (torch.rand(N, C) < 0.1).float()
    return labels, labels


def numbers():
    targets = 3 + torch.randn(N, C)
    return targets, targets


LOSSES = [
    pytest.param(F.cross_entropy, classes, id="cross entropy"),
    pytest.param(lambda z, y: F.nll_loss(z.log_softmax(1), y), classes, id="likelihood"),
    pytest.param(F.binary_cross_entropy_with_logits, flags, id="binary cross entropy"),
    pytest.param(lambda z, y: F.binary_cross_entropy(z.sigmoid(), y, reduction="sum"), flags, id="of probabilities"),
    pytest.param(F.mse_loss, numbers, id="squared error"),
    pytest.param(lambda z, y: 0.5 * (z - y).square().sum(1).mean(), numbers, id="half of it, by hand"),
]


@pytest.mark.parametrize(("loss_of", "targets_of"), LOSSES)
def test_predictions_that_know_nothing_of_their_targets_are_reported_once(loss_of, targets_of):
    assert seen(0.0, loss_of, targets_of, looks=2 * WINDOW_SAMPLES) == ["outputs-unpaired"]


@pytest.mark.parametrize(("loss_of", "targets_of"), LOSSES)
def test_predictions_that_know_a_little_are_not(loss_of, targets_of):
    assert seen(0.4, loss_of, targets_of, looks=2 * WINDOW_SAMPLES) in ([], ["outputs-paired"])


def test_that_they_begin_to_fit_is_reported():
    found = seen(lambda look: float(look >= WINDOW_SAMPLES), F.cross_entropy, classes, looks=2 * WINDOW_SAMPLES)

    assert found == ["outputs-unpaired", "outputs-paired"]


def test_places_of_a_map_that_are_ignored_do_not_count():
    def of_maps():
        labels = torch.randint(0, C, (8, 6, 6))
        values = F.one_hot(labels, C).movedim(-1, 1)
        labels[:, 0] = -100
        return labels, values

    assert seen(0.0, F.cross_entropy, of_maps, shape=(8, C, 6, 6)) == ["outputs-unpaired"]
    assert seen(0.6, F.cross_entropy, of_maps, shape=(8, C, 6, 6)) in ([], ["outputs-paired"])


@pytest.mark.parametrize("dim", [1, -1])
@pytest.mark.parametrize("shape", [(8, 300), (8, 40, 30), (20, 1, 700)], ids=str)
def test_of_large_outputs_places_are_read_wherever_the_classes_are(shape, dim):
    labels = 40

    def of_places():
        targets = torch.randint(0, labels, shape)
        return targets, F.one_hot(targets, labels).movedim(-1, dim)

    def loss_of(scores, targets):
        return F.cross_entropy(scores.movedim(dim, 1), targets)

    output = torch.zeros(*shape, labels).movedim(-1, dim).shape
    assert seen(0.0, loss_of, of_places, shape=output) == ["outputs-unpaired"]
    assert seen(0.6, loss_of, of_places, shape=output) in ([], ["outputs-paired"])


def test_a_squared_error_is_known_where_all_of_the_output_is_read():
    def images():
        targets = torch.rand(64, 784)
        return targets, targets

    assert seen(0.0, F.mse_loss, images, shape=(64, 784)) == ["outputs-unpaired"]


LARGE = [(8,), (500_000,), (64, 1000), (4096, 50_257), (8, 1024, 50_257), (64, 21, 512, 512), (9, 2, 90, 90, 90)]


@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_what_is_read_of_an_output_does_not_grow_with_it(shape):
    output = torch.zeros(1).expand(shape)
    for part in slices_of(shape):
        read = output[part.slices]
        classes = [shape[dim] for dim in part.dims]

        assert len(read) >= MIN_SAMPLES, "samples to compare with"
        assert [read.shape[dim] for dim in part.dims] == classes, "all classes"
        assert read.numel() <= max(MAX_VALUES, MIN_SAMPLES * max(classes, default=1)), "no more than is needed for that"


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda z, y: F.l1_loss(z, y),
        lambda z, y: F.mse_loss(z, y) + 0.1 * z.exp().mean(),
        lambda z, y: F.mse_loss(z.tanh(), y),
        lambda z, y: -(z.log_softmax(1)[:, 0] * y[:, 0]).mean(),  # of a policy, with returns of either sign
    ],
)
def test_a_loss_of_another_form_says_nothing(loss_of):
    assert seen(0.0, loss_of, numbers) == []


def test_real_and_made_up_samples_in_two_calls_are_taken_together():
    match, found = TargetMatch(nn.Identity()), []
    for _ in range(WINDOW_SAMPLES):
        real, noise = ((torch.randn(N, 1) + shift).requires_grad_() for shift in (1.0, -1.0))
        match.watch(ForwardCall(real))
        match.watch(ForwardCall(noise))
        loss = F.softplus(-real).mean() + F.softplus(noise).mean()
        loss.backward()
        found += match.find(loss)

    assert found == []


@pytest.mark.parametrize("reader", [TargetMatch, RecurrenceProbe])
def test_what_reads_gradients_leaves_them_and_goes_with_the_step(reader):
    model, inputs = nn.Linear(3, C), torch.randn(N, 3)
    model(inputs).square().mean().backward()
    expected, model.weight.grad = model.weight.grad, None

    readers = reader(model)
    output = model(inputs)
    readers.watch(ForwardCall(output))
    output.square().mean().backward()
    readers.clear()

    assert torch.equal(model.weight.grad, expected)
    assert not output._backward_hooks


@pytest.mark.parametrize("saved_at", [1, WINDOW_SAMPLES - 1, WINDOW_SAMPLES, WINDOW_SAMPLES + 3])
def test_looks_go_on_from_a_saved_state_as_if_nothing_had_been(saved_at):
    knowledge = [0.0] * (WINDOW_SAMPLES + 2) + [0.5] * WINDOW_SAMPLES
    context = {"loss_of": F.cross_entropy, "targets_of": classes, "looks": len(knowledge)}

    found = seen(knowledge.__getitem__, saved_at=saved_at, **context)

    assert found == seen(knowledge.__getitem__, **context) == ["outputs-unpaired", "outputs-paired"]


def test_values_that_arrive_late_are_judged_when_they_are_there(monkeypatch):
    step = -1

    def knowledge(look):
        nonlocal step
        step = look
        return 0.0 if look < WINDOW_SAMPLES + 2 else 0.5

    monkeypatch.setattr(Arrival, "is_ready", property(lambda _: step % 4 == 3))
    found = seen(knowledge, F.cross_entropy, classes, looks=3 * WINDOW_SAMPLES)

    assert found == ["outputs-unpaired", "outputs-paired"]


def test_values_that_never_arrive_are_waited_for_at_the_first_step_only(monkeypatch):
    waits, values = [], Arrival.values
    monkeypatch.setattr(Arrival, "is_ready", property(lambda _: False))
    monkeypatch.setattr(Arrival, "values", lambda it: waits.append(it) or values(it))

    assert seen(0.0, F.cross_entropy, classes) == []
    assert len(waits) == 1


def test_first_outputs_that_are_far_larger_than_their_targets_are_recorded_once():
    assert seen(0.0, lambda z, y: F.mse_loss(1e3 * z, y), numbers, looks=2) == []
    assert seen(0.0, F.mse_loss, lambda: (0.01 * torch.randn(N, C), torch.zeros(N, C)), looks=2) == ["outputs-first"]
    assert seen(0.0, F.mse_loss, lambda: (torch.zeros(N, C), torch.zeros(N, C)), looks=2) == [], "a penalty"


def test_a_state_that_is_returned_too_does_not_hide_the_prediction():
    match, found = TargetMatch(nn.Identity()), []
    torch.manual_seed(0)
    for _ in range(WINDOW_SAMPLES):
        targets, _ = classes()
        scores, state = (0.3 * torch.randn(N, C)).requires_grad_(), torch.randn(N, 6, requires_grad=True)
        match.watch(ForwardCall((scores, state)))
        loss = F.cross_entropy(scores, targets)
        loss.backward()
        found += [kind for kind, *_ in match.find(loss)]

    assert found == ["outputs-unpaired"]


def test_two_outputs_with_a_gradient_are_not_judged():
    match, found = TargetMatch(nn.Identity()), []
    torch.manual_seed(0)
    for _ in range(WINDOW_SAMPLES):
        targets, _ = classes()
        scores, other = ((0.3 * torch.randn(N, C)).requires_grad_() for _ in range(2))
        match.watch(ForwardCall((scores, other)))
        loss = F.cross_entropy(scores, targets) + other.square().mean()
        loss.backward()
        found += [kind for kind, *_ in match.find(loss)]

    assert found == []
