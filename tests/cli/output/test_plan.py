"""The table of modules stays readable where there is little room."""

import io
import math

import pytest
from rich.console import Console

from gradwatch.cli.output.plan import print_plan
from gradwatch.planning.result import ModuleRow, Plan

NAMES = ("layers.0.attention", "layers.0.feedforward")


def row(name: str, ms: float) -> ModuleRow:
    """Return a row whose type is longer than its share of 80 characters."""
    return ModuleRow(
        name=name,
        type="TransformerEncoderLayer",
        inputs=((32, 128, 128),),
        outputs=((32, 128, 128),),
        parameters=198_272,
        saved_bytes=63_000_000,
        saved_tensors=9,
        saved_views=8,
        input_bytes=1,
        flops=1.88e9,
        moved_bytes=1,
        forward_ms=ms,
        backward_ms=ms,
        order=0,
        is_repeatable=True,
    )


@pytest.mark.parametrize("ms", [math.nan, 12.3])
def test_names_and_numbers_are_never_broken_at_80_columns(ms):
    printed = io.StringIO()
    parts = {"weights": 1000, "activations": 2000}
    plan = Plan(
        peak_bytes=3000,
        parameters=250,
        parts=parts,
        modules=tuple(row(name, ms) for name in NAMES),
        at_peak=parts,
        phase="forward",
        flops=1000,
        moved_bytes=1000,
        device="cpu",
        is_traced=True,
    )
    print_plan(Console(file=printed, width=80), plan, limit=10_000, measured=None)
    for name, line in zip(NAMES, printed.getvalue().splitlines()[-2:], strict=True):
        assert line.startswith(name + " ")
        assert "198,272  63 MB (8 shared)  1.88e9" in line
