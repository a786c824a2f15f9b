"""Check which settings may change when a run is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradwatch.config.load import load_config
from gradwatch.config.sections.root import Config
from gradwatch.errors import RunError
from gradwatch.history.disk import atomic
from gradwatch.paths import RUN_CONFIG
from gradwatch.render.common.config_patch import flat

KEPT = ("run.seed", "model", "data", "loss", "optim", "schedule", "watch.enabled")
"""Parts of the config that the checkpoint, the order of the data or the recorded layers depend on."""
# exceptions within KEPT: they change neither the batches nor their order
FREE = ("data.workers", "data.pin_memory", "data.eval_batch_size")


def check(directory: Path, config: Config) -> Config:
    """Check that a run can continue with a config, and return the config of the run so far.

    Args:
        directory: The run directory, which holds the config of the run so far.
        config: Config to continue with.

    Raises:
        RunError: A fixed setting differs; the message shows each such setting with both values.
    """
    # loaded again, not compared as text: an older config may spell its settings differently
    before = load_config(directory / RUN_CONFIG)
    then, now = flat(before.model_dump()), flat(config.model_dump())
    changed = [key for key in then | now if _is_kept(key) and then.get(key) != now.get(key)]
    if changed:
        differences = "; ".join(
            f"{key}: the run has {_shown(then.get(key))}, got {_shown(now.get(key))}" for key in changed
        )
        raise RunError(
            f"--resume: {differences}; a run continues with the model, data, loss, optimizer and schedule that it "
            "began with. Leave these settings as they are, or train again from the start"
        )
    return before


def note(directory: Path, config: Config) -> None:
    """Save the config with which a run continues, so that the next resume needs no overrides."""
    atomic.replace(directory / RUN_CONFIG, config.to_yaml().encode())


def _is_kept(key: str) -> bool:
    return any(_below(key, part) for part in KEPT) and not any(_below(key, part) for part in FREE)


def _below(key: str, part: str) -> bool:
    return key == part or key.startswith(f"{part}.")


def _shown(value: Any) -> str:
    return "nothing" if value is None else str(list(value) if isinstance(value, tuple) else value)
