"""Find settings that make no sense with a stream: a dataset that is read in its own order, and whose end is unknown."""

from __future__ import annotations

from gradwatch.config.sections.root import Config
from gradwatch.errors import Problem

STREAMS = ("text_stream",)
"""Names of datasets that are streams. Whether a target is one, only its result shows."""


def stream_problems(config: Config, *, has_validation: bool) -> list[Problem]:
    """Return a problem for each setting that a training on a stream cannot have.

    Args:
        config: Config whose data are a stream.
        has_validation: Whether there is a validation part.
    """
    train = config.train
    found: list[tuple[str, str, str]] = []
    if config.data.shuffle:
        text = "got true, but a stream is read in its own order, and has no numbered samples to draw from"
        found.append(("data.shuffle", text, "leave it out, and shuffle the files or within the dataset"))
    if train.epochs is not None:
        text = "got a number of epochs, but the length of a stream is not known"
        found.append(("train.epochs", text, "set train.steps"))
    if config.schedule.name and config.schedule.per == "epoch":
        text = "got 'epoch', but where a pass over a stream ends is known only at its end"
        found.append(("schedule.per", text, "expected step"))
    if has_validation and train.eval_every is None:
        text = "is not set, and without it evaluations come at the ends of epochs, which a stream does not know"
        found.append(("train.eval_every", text, "set a number of steps, such as 500"))
    if train.on_critical in ("skip", "rewind"):
        text = f"got '{train.on_critical}', but the batches of a stream cannot be left out by number"
        found.append(("train.on_critical", text, "expected continue or stop"))
    return [Problem(tuple(key.split(".")), text, help=help) for key, text, help in found]
