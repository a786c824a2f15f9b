"""Read numbers of bytes, such as `8GB` or `512 MiB`."""

from __future__ import annotations

import re

from gradwatch.errors import GradwatchError

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", re.IGNORECASE)


def parse_size(text: str, *, key: str) -> int:
    """Return the number of bytes that a text names: GB is 10^9, GiB is 2^30.

    Raises:
        GradwatchError: The text is not a size above 0.
    """
    found = _SIZE.fullmatch(text.strip())
    unit = (_UNITS | _BINARY).get(found[2].lower()) if found else None
    size = int(float(found[1]) * unit) if found and unit else 0
    if not size:
        raise GradwatchError(f"{key}: got '{text}', expected a size above 0 such as 8GB, 24GiB or 512MB")
    return size
