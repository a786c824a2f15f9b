"""Draw a finding: as a profile over depth if its kind has one, else as a statistic over the steps."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.history.store import History
from gradwatch.records import Finding
from gradwatch.render.common import format as units
from gradwatch.render.common.depth_profile import DepthProfile, depth_profile
from gradwatch.render.common.series import series_of
from gradwatch.render.common.sparkline import UNICODE

TREND_WIDTH = 64
LABELS = {
    "grad.l2": "L2 norm of the gradient",
    "update.ratio": "update / weight",
    "act.dead_frac": "dead units",
    "act.saturated_frac": "saturated outputs",
    "attention.max_logit": "largest attention logit",
}
"""Meaning of the height of a profile, by statistic."""

Floats = NDArray[np.floating[Any]]


def picture(findings: Sequence[Finding], history: History) -> str:
    """Return the picture of findings of one kind, or an empty string if nothing recorded shows the first of them."""
    profile = depth_profile(findings, history)
    return _profile(profile) if profile else _trend(findings[0], history)


def _profile(profile: DepthProfile) -> str:
    """Return a figure for the script to draw in, whose caption says in words what it shows."""
    drawn = escape(json.dumps(_data(profile), allow_nan=False, separators=(",", ":")))
    about = f"{LABELS[profile.statistic]} of each layer, input side first; {_extremes(profile)}"
    return f'<figure class="profile" data-profile="{drawn}"><figcaption>{escape(about)}</figcaption></figure>'


def _extremes(profile: DepthProfile) -> str:
    """Return the lowest and the highest layer at the end of the run."""
    show = units.percent if profile.statistic.endswith("_frac") else units.number
    known = [m for m, value in enumerate(profile.end_M.tolist()) if math.isfinite(value)]
    if not known:
        return f"NaN or Inf at step {profile.end:,}"
    low, high = (pick(known, key=profile.end_M.__getitem__) for pick in (min, max))
    ends = f"{show(float(profile.end_M[low]))} in {profile.layers[low]}"
    if low != high:
        ends += f", {show(float(profile.end_M[high]))} in {profile.layers[high]}"
    return f"at step {profile.end:,} from {ends}" if low != high else f"at step {profile.end:,} {ends}"


def _data(profile: DepthProfile) -> dict[str, Any]:
    is_log = not profile.statistic.endswith("_frac")
    lines = [{"name": f"at step {profile.onset:,}", **_values(profile.onset_M)}]
    if profile.end != profile.onset:
        lines.append({"name": f"at step {profile.end:,}", **_values(profile.end_M)})
    data: dict[str, Any] = {
        "layers": profile.layers,
        "affected": profile.affected,
        "label": LABELS[profile.statistic],
        "log": is_log,
        "lines": lines,
    }
    if profile.usual_M:
        low_M, high_M = profile.usual_M
        name = f"range of the {units.plural(profile.before, 'step')} before"
        data["usual"] = {"name": name, "low": _values(low_M)["values"], "high": _values(high_M)["values"]}
    elif is_log and math.isfinite(profile.median):
        data["median"] = profile.median
    return data


def _values(values_M: Floats) -> dict[str, Any]:
    """Return values for JSON: null without a finite value, and the indexes of NaN or Inf."""
    finite = [value if math.isfinite(value) else None for value in values_M.tolist()]
    return {"values": finite, "broken": np.flatnonzero(np.isinf(values_M)).tolist()}


def _trend(finding: Finding, history: History) -> str:
    """Return the series of a finding as a line of bars, with its onset marked."""
    series = series_of(finding, history)
    if series is None:
        return ""
    bars, onset = series.draw(finding.since, width=TREND_WIDTH, signs=UNICODE)
    about = escape(f"{series.caption}; {finding.when}")
    mark = f'{" " * onset}<span class="onset">{UNICODE.onset} step {finding.since:,}</span>'
    # role and label: a screen reader would spell out the bars
    picture = f'<pre class="bars" role="img" aria-label="{about}">{bars}\n{mark}</pre>'
    return f'<figure class="trend">{picture}<figcaption>{about}</figcaption></figure>'
