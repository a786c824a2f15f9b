"""Detectors say from when on they can judge a run."""

import pytest

from gradwatch.detect import detectors, waiting
from gradwatch.events import OPTIMIZERS_OPPOSED
from gradwatch.history.synthetic.builder import Synthetic


def waits(made):
    return waiting(made.history(), detectors())


def test_a_long_run_with_a_falling_loss_has_been_judged():
    assert waits(Synthetic(layers=2, steps=200)) == ()


def test_a_flat_loss_is_judged_after_the_wait_and_a_falling_one_at_once():
    def made(steps, *, is_flat):
        run = Synthetic(layers=2, steps=steps)
        if is_flat:
            run.loss_T[:] = 2.3
        return run

    assert "loss-plateau" in waits(made(120, is_flat=True))
    assert "loss-plateau" not in waits(made(120, is_flat=False))
    assert "loss-plateau" not in waits(made(200, is_flat=True))


@pytest.mark.parametrize(("validations", "is_judged"), [(0, True), (1, False), (4, False), (5, True)])
def test_overfitting_takes_more_validations_than_its_patience_unless_there_are_none(validations, is_judged):
    run = Synthetic(layers=2, steps=200)
    run.val_loss_T[20 : 20 + validations] = 1.0

    assert ("overfitting" not in waits(run)) == is_judged


@pytest.mark.parametrize("kind", ["rising-sparsity", "oscillating-gradient"])
def test_what_cannot_judge_finds_nothing(kind):
    (detector,) = [d for d in detectors() if d.kind == kind]
    histories = [example.history for example in detector.examples()]
    # two optimizers that undo each other are proved by an event, whenever it comes
    histories = [h for h in histories if not any(event.kind == OPTIMIZERS_OPPOSED.name for event in h.events)]
    early = [h for h in histories if not detector.can_judge(h)]

    assert len(early) < len(histories)
    assert all(not list(detector.detect(h)) for h in early)
