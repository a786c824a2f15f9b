"""Choose the sinks of a user's own loop: the same names and settings as in the `sinks` section of a config."""

from __future__ import annotations

import pkgutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gradwatch.errors import GradwatchError, Problem, raised
from gradwatch.render import ON_REQUEST, SINKS, Sink
from gradwatch.render.packages import installation
from gradwatch.state.rng import preserved_random_state

Settings = dict[str, dict[str, Any]]
IN_DIRECTORY = ("tensorboard", "html")
"""Sinks that write to the run directory, and take part unless they are disabled."""
FUNCTION = "callable"
"""The sink that calls a function."""


def check_sinks(asked: Any, *, has_directory: bool) -> tuple[Settings, list[Problem]]:
    """Return the settings of all sinks that take part, by name, and the problems of `asked`.

    Args:
        asked: Settings by sink, as in the `sinks` section of a config; the target of `callable` may be a function.
        has_directory: Whether the run has a directory.
    """
    given, found = _checked(asked) if asked else ({}, [])
    chosen: Settings = {}
    for name in (*IN_DIRECTORY, *ON_REQUEST):
        options = dict(given.get(name, {"enabled": name not in ON_REQUEST and has_directory}))
        if not options.pop("enabled", True):
            continue
        chosen[name] = options
        if name in IN_DIRECTORY and not has_directory:
            text = "writes to a run directory, and there is none"
            found.append(Problem(("sinks", name), text, help="give run=..."))
        elif command := installation(name):
            found.append(Problem(("sinks", name), f"the package {name} is not installed", help=command))
    return chosen, found


def make_sinks(chosen: Settings, directory: Path | None, *, first_step: int | None = None) -> list[Sink]:
    """Return the sinks. A tracker that cannot start is left out with a warning, since the training must continue.

    Args:
        chosen: Result of `check_sinks`.
        directory: Run directory, or None.
        first_step: First step to record. TensorBoard drops the later steps of an earlier run.
    """
    made: list[Sink] = []
    for name in (name for name in SINKS if name in chosen):
        # nothing here may import rich, which draws a random number: the training may do so at a later step, and would
        # then draw nothing. Of the trackers, only Trackio imports it
        factory: Callable[..., Sink] = pkgutil.resolve_name(SINKS[name])
        options: dict[str, Any] = {} if name == FUNCTION else {"directory": directory}
        if name == "tensorboard":
            options["purge_step"] = first_step
        try:
            with preserved_random_state():
                made.append(factory(**options, **chosen[name]))
        except Exception as error:  # no network, no login, a full disk
            if name in IN_DIRECTORY or isinstance(error, GradwatchError):
                raise
            text = f"gradwatch: sinks.{name}: {raised(error)}; the run goes without it"
            warnings.warn(text, RuntimeWarning, stacklevel=3)
    return made


def _checked(asked: Any) -> tuple[Settings, list[Problem]]:
    # imported here, since most loops need no check of a config
    from gradwatch.config.names.checks import check_switches
    from gradwatch.config.names.registry import SINKS as VOCABULARY

    named, function = _without_function(asked)
    checked, below = check_switches(VOCABULARY, named)
    found = [problem.below("sinks") for problem in below]
    if "terminal" in checked:
        text = "shows a training from a config; here, on_finding prints the findings"
        found.append(Problem(("sinks", "terminal"), text))
    if function and FUNCTION in checked:
        checked[FUNCTION] = {**checked[FUNCTION], "target": function}
    return checked, found


def _without_function(asked: Any) -> tuple[Any, Callable[..., Any] | None]:
    """Return the settings as a config would have them, with the name of a function, and the function."""
    options = asked.get(FUNCTION) if isinstance(asked, Mapping) else None
    if not isinstance(options, Mapping) or not callable(function := options.get("target")):
        return asked, None
    return {**asked, FUNCTION: {**options, "target": "package.module:function"}}, function
