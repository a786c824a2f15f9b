"""Predictions of nothing but the majority class are reported, and so is the end of it; other predictions are not."""

# N = samples, C = classes

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradwatch.probe.batches.predicted_classes import MAX_OTHERS, MAX_VARIED, MIN_OTHERS, MIN_STEPS
from gradwatch.probe.batches.target_match import TargetMatch
from gradwatch.probe.output_reader import ForwardCall

STEPS = 2 * MIN_STEPS


def observed(scores_of, labels_of, loss_of=F.cross_entropy, *, steps=STEPS, saved_at=None):
    """Return the observations about predicted classes in some sampled steps."""
    match, found = TargetMatch(nn.Identity()), []
    torch.manual_seed(0)
    for step in range(steps):
        if step == saved_at:
            saved, match = match.state(), TargetMatch(nn.Identity())
            match.restore(saved)
        labels = labels_of()
        scores = scores_of(step, labels).requires_grad_()
        match.watch(ForwardCall(scores))
        loss = loss_of(scores, labels)
        loss.backward()
        found += [o for o in match.find(loss) if o.kind.startswith("predictions-")]
    return found


def rare_labels(share, *, shape=(64,)):
    """Return labels of which a fraction are 1, exactly."""

    def make():
        labels = torch.zeros(shape)
        labels.view(-1)[: round(share * labels.numel())] = 1
        return labels

    return make


def of_majority(step, labels):
    """Return noisy scores of a binary cross entropy, all below 0."""
    return -2 - 0.3 * torch.rand(labels.shape)


def test_a_single_predicted_class_is_reported_once_with_its_share():
    (found,) = observed(of_majority, rare_labels(1 / 16), F.binary_cross_entropy_with_logits)

    assert found.kind == "predictions-majority"
    assert found.values == {"class": 0, "share": 15 / 16, "others": MIN_STEPS * 4}
    assert found.text == f"every prediction is class 0; {MIN_STEPS * 4} labels that were read are others"


@pytest.mark.parametrize("saved_at", [MIN_STEPS - 2, MIN_STEPS + 2])
def test_a_state_in_between_changes_nothing(saved_at):
    whole = observed(of_majority, rare_labels(1 / 16), F.binary_cross_entropy_with_logits)
    resumed = observed(of_majority, rare_labels(1 / 16), F.binary_cross_entropy_with_logits, saved_at=saved_at)

    assert resumed == whole


@pytest.mark.parametrize("shape", [(16, 1, 8, 8), (8, 500)], ids=["a map", "many labels of a sample"])
def test_all_labels_of_a_sample_count(shape):
    (found,) = observed(of_majority, rare_labels(0.004, shape=shape), F.binary_cross_entropy_with_logits, steps=40)

    assert found.values["others"] >= MIN_OTHERS


def test_the_classes_of_a_cross_entropy_count():
    def scores(step, labels):
        return 0.3 * torch.rand(64, 5) + 2 * F.one_hot(torch.tensor(3), 5)

    def labels():
        return torch.tensor([0, 1, 2, 4] + 60 * [3])

    (found,) = observed(scores, labels)

    assert (found.values["class"], found.values["share"]) == (3, 60 / 64)


def test_another_class_that_is_predicted_later_is_reported_and_ends_the_reading():
    def scores(step, labels):
        found = of_majority(step, labels)
        found[0] = 1.0 if step == MIN_STEPS + 1 else -1.0
        return found

    found = observed(scores, rare_labels(1 / 16), F.binary_cross_entropy_with_logits, steps=4 * MIN_STEPS)

    assert [o.kind for o in found] == ["predictions-majority", "predictions-minority"]


@pytest.mark.parametrize(("num_varied", "is_reported"), [(MAX_VARIED - 1, True), (MAX_VARIED, False)])
def test_a_model_may_predict_both_classes_before_it_has_learned_which_one_is_rare(num_varied, is_reported):
    def scores(step, labels):
        found = of_majority(step, labels)
        found[0] = 1.0 if step < num_varied else -1.0
        return found

    found = observed(scores, rare_labels(1 / 16), F.binary_cross_entropy_with_logits, steps=MAX_VARIED + 2 * MIN_STEPS)

    assert [o.kind for o in found] == ["predictions-majority"] * is_reported


def test_a_single_prediction_of_another_class_starts_the_count_again():
    def scores(step, labels):
        found = of_majority(step, labels)
        found[0] = 1.0 if step % MIN_STEPS == 0 else -1.0
        return found

    assert not observed(scores, rare_labels(1 / 16), F.binary_cross_entropy_with_logits, steps=4 * MIN_STEPS)


@pytest.mark.parametrize(
    "labels",
    [rare_labels(0.0), rare_labels(1 / 64, shape=(64,)), rare_labels(1.5 * MAX_OTHERS)],
    ids=["a single class", "too few of them", "no class is rare"],
)
def test_a_single_predicted_class_of_other_labels_is_not_reported(labels):
    assert not observed(of_majority, labels, F.binary_cross_entropy_with_logits, steps=MIN_OTHERS - 1)


def test_a_language_model_that_predicts_one_token_is_not_reported():
    def scores(step, labels):
        return 0.3 * torch.rand(256, 50) + 2 * F.one_hot(torch.tensor(3), 50)

    assert not observed(scores, lambda: torch.randint(0, 50, (256,)) * (torch.rand(256) < 0.9))


def test_a_loss_with_class_weights_does_not_reveal_its_labels():
    def weighted(scores, labels):
        return F.binary_cross_entropy_with_logits(scores, labels, pos_weight=torch.tensor(15.0))

    assert not observed(of_majority, rare_labels(1 / 16), weighted)
