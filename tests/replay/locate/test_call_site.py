"""The line that is named is one that a person wrote for the model: not torch's, not Python's, not ours."""

import contextlib
import sysconfig
from pathlib import Path

import pytest
import torch

from gradwatch.errors import PACKAGE
from gradwatch.replay.locate.call_site import find_call_site, is_user_code

INSTALLED = Path(sysconfig.get_path("purelib"))


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("/home/me/project/model.py", True),
        (str(INSTALLED / "timm" / "layers.py"), True),
        (str(PACKAGE / "models" / "mlp.py"), True),
        (str(Path(torch.__file__).parent / "nn" / "functional.py"), False),
        (str(INSTALLED / "einops" / "einops.py"), False),
        (str(PACKAGE / "train" / "step.py"), False),
        (contextlib.__file__, False),
        ("<string>", False),
    ],
)
def test_whose_line_it_is(file, told):
    assert is_user_code(file) is told


def test_the_innermost_line_is_reported_with_its_text():
    def inner():
        return find_call_site(None)  # this one

    place, again = inner()

    assert place.text == "return find_call_site(None)  # this one"
    assert (place.function, Path(place.file)) == ("inner", Path(__file__))
    assert not again


def test_the_search_ends_at_the_frame_that_runs_the_step():
    def step():
        return find_call_site(step.__code__)

    place, _ = step()

    assert not place
