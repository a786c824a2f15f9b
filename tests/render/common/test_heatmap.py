"""The picture of layers by steps."""

import io
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageFont

from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Severity
from gradwatch.render.common import heatmap as picture
from gradwatch.render.common.layers import Layer, layers, norms_over_run

SHORT = Layer(name="0", columns=(0,), names=frozenset("0"), size=4, is_matrix=True)


def _draw(history, findings=()):
    of = layers(history.info.layers)
    png, size = picture.draw(*norms_over_run(history, of), of, findings=findings)
    image = Image.open(io.BytesIO(png)).convert("RGB")
    assert image.size == size
    # as TensorBoard shows it: every second pixel
    return np.asarray(image).astype(int)[1 :: picture.ENLARGED, 1 :: picture.ENLARGED]


def _x(history, step):
    left = picture._left(layers(history.info.layers), ImageFont.load_default(picture.FONT))
    return left + (picture.SIZE[0] - left - picture.RIGHT) * step / history.step


def _close(pixels, colour):
    return np.abs(pixels - np.array(colour)).sum(axis=-1) < 40


def test_a_vanishing_run_fades_from_output_to_input(vanishing):
    pixels = _draw(vanishing.history)

    top = picture.TOP
    late = pixels[top + 4 : top + picture.HEIGHT - 4, pixels.shape[1] // 2]
    brightness = late.sum(axis=-1)
    assert brightness[: len(late) // 6].mean() + 150 < brightness[-len(late) // 6 :].mean(), "bright is large"


def test_broken_dead_and_missing_gradients_are_drawn_and_explained(broken, healthy):
    pixels, well = _draw(broken.history), _draw(healthy.history)

    for colour in (picture.BROKEN, picture.ZERO, picture.NONE):
        assert _close(pixels, colour).sum() > 120, colour
        assert _close(pixels[-picture.FONT - 8 :], colour).sum() > 20, f"{colour} in the legend"
    assert _close(well, picture.BROKEN).sum() == 0


def test_a_single_broken_step_of_a_long_run_is_seen():
    history = Synthetic(layers=3, steps=3000).non_finite(step=1717, layers=1).history()

    assert _close(_draw(history), picture.BROKEN).sum() > 10


def test_findings_are_marked_at_their_layer_and_step(healthy, make_finding):
    found = make_finding("any", layer="layers.2.weight", step=60, severity=Severity.WARNING, code="GW1")

    changed = (_draw(healthy.history) != _draw(healthy.history, [found])).any(axis=-1)

    y, x = (np.flatnonzero(changed.any(axis=axis)).mean() for axis in (1, 0))
    assert y == pytest.approx(picture.TOP + picture.HEIGHT * 2.5 / 4, abs=3)
    assert x == pytest.approx(_x(healthy.history, 60), abs=3)


def test_a_finding_of_no_layer_is_marked_above_its_onset(healthy, make_finding):
    found = make_finding("any", layer=None, step=70, severity=Severity.WARNING, code="GW1")
    mild = make_finding("mild", layer=None, step=20, severity=Severity.INFO, code="GW2")

    marked = _draw(healthy.history, [replace(found, onset=50), mild])
    # the palette of each picture differs a little
    changed = np.abs(_draw(healthy.history) - marked).sum(axis=-1) > 150

    y, x = (np.flatnonzero(changed.any(axis=axis)) for axis in (1, 0))
    assert y.max() < picture.TOP
    assert x.mean() == pytest.approx(_x(healthy.history, 50), abs=3)


def test_the_word_for_the_axis_is_whole_though_names_are_short():
    font = ImageFont.load_default(picture.FONT)

    assert picture._left([SHORT], font) >= font.getlength("step") + 8


def test_a_picture_in_tensorboard_has_no_pixel_in_between():
    png, size = picture.draw(np.arange(3), np.ones((3, 1)), [SHORT])
    image = Image.open(io.BytesIO(png)).convert("RGB")

    smaller = image.resize(picture.SIZE, Image.Resampling.NEAREST)

    assert smaller.resize(size, Image.Resampling.NEAREST).tobytes() == image.tobytes()


@pytest.mark.parametrize(("layer_count", "steps"), [(1, 1), (2, 2), (700, 3)])
def test_any_number_of_layers_and_steps_can_be_drawn(layer_count, steps):
    pixels = _draw(Synthetic(layers=layer_count, steps=steps).history())

    assert pixels.shape[0] < 420
    assert pixels.shape[1] < 860


def test_a_run_without_one_usable_norm_can_be_drawn():
    pixels = _draw(Synthetic(layers=2, steps=5).no_gradient([0, 1]).history())

    assert pixels.std() > 0, "the picture is blank"


@pytest.mark.parametrize(
    ("norms", "scale"),
    [([0.02, 0.5], (-2, 0)), ([3.0, 4.0], (-1, 1)), ([1e-40, 1.0], (-24, 0)), ([], (-1, 1)), ([0.0, np.inf], (-1, 1))],
)
def test_the_scale_spans_whole_powers_of_ten(norms, scale):
    assert picture.limits(np.array(norms)) == scale


@pytest.mark.parametrize(
    ("first", "last", "shown"),
    [
        (0, 600, [0, 200, 400, 600]),
        (0, 99, [0, 20, 40, 60, 80]),
        (950, 2100, [1000, 1500, 2000]),
        (0, 3, [0, 1, 2, 3]),
        (5, 5, [5]),
        (0, 100_000, [0, 20_000, 40_000, 60_000, 80_000, 100_000]),
    ],
)
def test_steps_are_marked_at_round_numbers(first, last, shown):
    assert picture.ticks(first, last) == shown
