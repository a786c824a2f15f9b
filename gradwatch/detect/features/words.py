"""Numbers as they stand in the sentence of a finding: exact ones are in its evidence."""

from __future__ import annotations


def factor(ratio: float) -> str:
    """Return a factor with three significant digits, such as `1.2`, `528` or `2,060`."""
    return f"{float(f'{ratio:.3g}'):,.10g}"
