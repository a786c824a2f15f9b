"""The loss from which learning begins is that of guessing, where guessing means something."""

import pytest

from gradwatch.detect.features.baseline import baseline_loss, chance_losses
from gradwatch.events import CHANCE
from gradwatch.history.synthetic.builder import Synthetic


@pytest.mark.parametrize(("classes", "losses"), [(2, [pytest.approx(0.693, abs=1e-3)]), (1, [])])
def test_a_single_class_has_no_chance_level(classes, losses):
    history = Synthetic(steps=20).add_event(CHANCE, values={"nat": 1.0, "classes": classes}).history()
    assert list(chance_losses(history)) == losses
    assert baseline_loss(history)[0] > 0
