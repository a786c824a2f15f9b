"""Growth over depth must show in single steps, not only in the median of several."""

import numpy as np
import pytest

from gradwatch.detect.gradients.exploding_gradient_rules.over_depth import find_growth_over_depth
from gradwatch.history.synthetic.builder import Synthetic


@pytest.mark.parametrize("noise", [0.3, 8.0])
def test_the_median_step_must_rise_as_well(noise):
    made = Synthetic(steps=40)
    modules = made.grad_l2_TL.shape[1]
    made.grad_l2_TL *= 10 ** np.linspace(8, 0, modules)
    # at each step, other modules get few samples, as experts do
    for step in range(40):
        made.grad_l2_TL[step, [step % modules, (5 * step + 3) % modules, (7 * step + 1) % modules]] *= 10.0**-noise

    sign = find_growth_over_depth(made.history(), modules=5, decades=4.0, critical_rise=1.5)

    assert (sign is not None) == (noise < 1)
