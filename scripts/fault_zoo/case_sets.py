"""List the sets of cases and load their scripts."""

from __future__ import annotations

import importlib
import pkgutil

from scripts.fault_zoo import protocol
from scripts.fault_zoo.protocol import Case

SETS = (
    "dev",
    "opened",
    "published",
    "reports",
    "practice",
    "forums",
    "mailing",
    "trackers",
    "questions",
    "threads",
    "fixes",
    "stories",
    "advice",
    "diaries",
)
"""`dev` was open while gradwatch was written, `opened` judged an earlier version first, `published` holds reported
bugs, and so do the sets after it, by people who had not read gradwatch.
"""


def load_set(name: str) -> list[Case]:
    """Return the cases of one set, faulty ones first.

    Raises:
        ValueError: Two cases have the same name.
    """
    package = importlib.import_module(f"scripts.fault_zoo.cases.{name}")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    # a script may import a model from a script of another set, which registers the cases of both
    cases = [case for case in protocol.REGISTRY if case.module.startswith(f"{package.__name__}.")]
    names = [case.name for case in cases]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{package.__name__}: two cases have the same name: {sorted(repeated)}")
    return sorted(cases, key=lambda case: (case.fault is None, case.module, case.name))
