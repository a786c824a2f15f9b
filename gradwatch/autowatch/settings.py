"""Pass the options of `gradwatch run` to the processes of its command, in an environment variable."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self, final

VARIABLE = "GRADWATCH_RUN"
"""Name of the environment variable. `startup/sitecustomize.py` repeats it, since it may find no gradwatch."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptSettings:
    """The options of `gradwatch run`.

    Args:
        run: Run directory, absolute: the script may change the working directory. None keeps histories in memory.
        record: As for `watch`.
        total_steps: As for `watch`.
        in_place: Whether to record every operation, for the lines of an error about a tensor changed in place.
        unseen: File that a process removes when it watches, or has reported why it does not; None without a command.
    """

    run: str | None
    record: bool = False
    total_steps: int | None = None
    in_place: bool = False
    unseen: str | None = None

    def to_text(self) -> str:
        """Return the settings as text for the environment variable."""
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> Self:
        """Return the settings of the text of the environment variable."""
        return cls(**json.loads(text))

    @property
    def shown_run(self) -> Path | None:
        """The run directory, relative if it is below the working directory."""
        if self.run is None:
            return None
        path = Path(self.run)
        return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path

    def mark_seen(self) -> None:
        """Record that a process watches, or has reported why it does not."""
        if self.unseen is not None:
            Path(self.unseen).unlink(missing_ok=True)


def is_first_rank() -> bool:
    """Return whether this process is the only one of a distributed training, or the first: it alone prints."""
    return os.environ.get("RANK", "0") == "0"
