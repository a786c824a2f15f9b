"""A fraction lasts if it is that large in each of the newest samples."""

import numpy as np

from gradwatch.detect.features.lasting_frac import lasting_frac
from gradwatch.history.synthetic.builder import Synthetic


def sampled(*dead_frac_per_sample):
    made = Synthetic(steps=10 * len(dead_frac_per_sample), activations=2)
    made.dead_frac_TA[:] = np.repeat(dead_frac_per_sample, 10, axis=0)
    return made.history()


def test_the_smallest_of_the_newest_samples_counts():
    history = sampled((0.9, 0.1), (0.5, 0.2), (0.7, 0.3))

    found = lasting_frac(history, "act.dead_frac", samples=2, at_least=0.7)

    np.testing.assert_allclose(found, [0.5, 0.2], rtol=1e-6)


def test_too_few_samples_and_low_fractions_are_not_looked_at():
    history = sampled((0.9, 0.1), (0.5, 0.2))

    assert lasting_frac(history, "act.dead_frac", samples=3, at_least=0.1) is None
    assert lasting_frac(history, "act.dead_frac", samples=2, at_least=0.6) is None
    assert lasting_frac(Synthetic(steps=20).history(), "act.dead_frac", samples=2, at_least=0.1) is None
