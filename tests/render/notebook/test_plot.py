"""A statistic of a run as a figure."""

import io
import sys

import matplotlib.pyplot as plt
import numpy as np
import pytest

from gradwatch.errors import GradwatchError
from gradwatch.render.notebook.plot import plot


def _lines(figure):
    """Return the lines of the layers: those that are no mark."""
    return [line for line in figure.axes[0].lines if line.get_transform() == figure.axes[0].transData]


def _legend(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_each_layer_is_a_line_of_its_values_coloured_from_early_to_late(healthy):
    figure = plot(healthy.history, "grad.l2")

    lines = _lines(figure)
    assert len(lines) == len(healthy.history.param.layers)
    np.testing.assert_array_equal(lines[1].get_ydata(), healthy.history["grad.l2"][:, 1])
    np.testing.assert_array_equal(lines[1].get_xdata(), healthy.history.steps("grad.l2"))
    light = [sum(line.get_color()[:3]) for line in lines]
    assert light == sorted(light), "from dark to light"
    assert figure.axes[0].get_yscale() == "log"
    assert _legend(figure) == list(healthy.history.param.layers)


def test_many_layers_are_told_by_a_colour_bar(vanishing):
    figure = plot(vanishing.history, "grad.l2")

    first, *_, last = vanishing.history.param.layers
    assert [t.get_text() for t in figure.axes[1].get_yticklabels()] == [f"input: {first}", f"output: {last}"]
    assert not any(name in _legend(figure) for name in vanishing.history.param.layers)


def test_findings_are_marked_once_a_kind_the_gravest_first(vanishing):
    figure = plot(vanishing.history, "grad.l2")

    assert _legend(figure) == ["vanishing-gradient, step 44", "saturated-activation, step 35"]


def test_a_linear_statistic_stays_linear_and_a_sampled_one_has_its_points(healthy):
    assert plot(healthy.history, "val_accuracy").axes[0].get_yscale() == "linear"
    (line,) = _lines(plot(healthy.history, "val_loss"))
    assert line.get_xdata().tolist() == [23, 47, 71, 95, 119]


def test_nan_and_inf_are_marked_and_break_no_axis(broken):
    for statistic in ("loss", "grad.l2"):
        figure = plot(broken.history, statistic)
        assert "NaN or Inf" in _legend(figure)
        assert np.isfinite(figure.axes[0].get_ylim()).all()


def test_chosen_layers_alone_are_drawn(vanishing):
    name = vanishing.history.param.layers[3]

    figure = plot(vanishing.history, "grad.l2", layers=[name])

    assert len(_lines(figure)) == 1
    assert name in _legend(figure)


def test_a_figure_can_be_saved_and_none_stays_open(healthy):
    before = plt.get_fignums()
    file = io.BytesIO()

    plot(healthy.history, "loss").savefig(file)

    assert file.getvalue().startswith(b"\x89PNG")
    assert plt.get_fignums() == before


@pytest.mark.parametrize(
    ("statistic", "layers", "message"),
    [
        ("grad.l3", None, "no statistic is called 'grad.l3'; did you mean 'grad.l2'?"),
        ("grad.l2", ["layers.0.wight"], "has no layer 'layers.0.wight'; did you mean 'layers.0.weight'?"),
    ],
)
def test_an_unknown_name_is_a_mistake_with_the_nearest_known(healthy, statistic, layers, message):
    with pytest.raises(GradwatchError) as caught:
        plot(healthy.history, statistic, layers=layers)

    assert message in str(caught.value)


def test_without_matplotlib_the_way_to_it_is_reported(healthy, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)

    with pytest.raises(GradwatchError, match="pip install matplotlib"):
        plot(healthy.history, "grad.l2")
