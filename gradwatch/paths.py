"""Expand `~` in the paths that users write, which only this module does, and name the config file of a run."""

from __future__ import annotations

import os
from pathlib import Path

from gradwatch.errors import GradwatchError

RUN_CONFIG = "config.yaml"
"""File of a run directory that only a training from a config has."""


def user_path(path: str | os.PathLike[str]) -> Path:
    """Return a path with `~` and `~user` at its start expanded. Every path of a user goes through this function.

    Raises:
        GradwatchError: There is no home folder for `~user`.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        name = Path(path).parts[0]
        raise GradwatchError(
            f"{os.fspath(path)}: there is no home folder for '{name}'; write the path in full, or ./{name} for a "
            "folder of that name"
        ) from error
