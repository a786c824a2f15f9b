"""Accept the British spelling of a setting if gradwatch or torch uses the American one."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

_ALIKE = "".join(f"(?<!{stem})" for stem in ("adv", "exerc", "no", "otherw", "prom", "ra", "rev", "surpr"))
_ENDINGS = re.compile(rf"(?<=[a-z]{{3}}){_ALIKE}is(?=(?:e|ed|er|es|ing|ation|ations)(?:_|$))")
"""Words such as `normalise` and `normalisation`, but not words with the same American spelling, such as `surprise`."""


def american(name: str) -> str:
    """Return `normalization` for `normalisation`, and a name without a British word unchanged."""
    return _ENDINGS.sub("iz", name)


def known_spelling(name: str, known: Collection[str]) -> str:
    """Return the American spelling of a name if only that is known, else the name itself."""
    return spelled if name not in known and (spelled := american(name)) in known else name


def american_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with the American spelling of every key, at all depths."""
    return {american(k): american_keys(v) if isinstance(v, dict) else v for k, v in config.items()}
