"""What no optimizer holds is an alarm where it cannot be meant to be frozen, and for information where it can."""

from dataclasses import replace

import numpy as np
import pytest

from gradwatch.detect.updates.not_optimized import NotOptimized
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Severity


@pytest.mark.parametrize(
    ("frozen", "left", "severity"),
    [
        ((), (0, 1), Severity.INFO),
        ((0,), (1, 2), Severity.INFO),
        ((0, 1, 2), (3,), Severity.WARNING),
        ((), (5,), Severity.WARNING),
    ],
)
def test_who_has_frozen_more_than_is_left_out_has_forgotten_it(frozen, left, severity, replay):
    made, out = Synthetic(steps=20), [*frozen, *left]
    infos = [replace(info, group=None if i in out else 0) for i, info in enumerate(made.info.layers)]
    infos = [replace(info, trainable=i not in frozen) for i, info in enumerate(infos)]
    made.info = replace(made.info, layers=tuple(infos))
    made.grad_l2_TL[:, list(frozen)] = np.nan
    made.update_factor_TL[:, out] = 0

    assert {f.severity for f in replay(made.history(), [NotOptimized()])} == {severity}
