"""Two weights that are drawn too large multiply, whether they belong to two modules or to one."""

from dataclasses import replace

import pytest

from gradwatch.detect.activations.poor_initialization import PoorInitialization
from gradwatch.events import MATRIX
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.history.synthetic.edit import with_statistic
from gradwatch.records import Severity


@pytest.mark.parametrize(
    ("large", "severity"), [((3, 4), Severity.WARNING), ((3,), Severity.INFO)], ids=["both", "one of them"]
)
def test_weights_of_one_module_count_each(large, severity, replay):
    made = Synthetic(steps=20)
    infos = [replace(info, module="mixer", module_type="Mixer") for info in made.info.layers]
    made.info = replace(made.info, layers=tuple(infos))
    for i in range(12):
        made.add_event(MATRIX, layer=infos[i].name, values={"weight": i, "inputs": 64})
    history = with_statistic(made.history(), "weight.l2", 8.0 * 8, layers=large)
    history = with_statistic(history, "weight.l2", 8.0, layers=tuple(i for i in range(12) if i not in large))

    found = replay(history, [PoorInitialization()])

    assert {finding.severity for finding in found} == {severity}
    assert len(found) == len(large)
