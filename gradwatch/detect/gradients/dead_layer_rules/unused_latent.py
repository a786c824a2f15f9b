"""Find a latent that carries no information on its samples: an autoencoder's posterior has collapsed to the prior.

The decoder ignores the latent, often because it sees the outputs before, and the divergence pulls every dimension to
the prior. The encoder then has nothing to learn, and its gradient is noise.

Not seen: deviations that are not an exponential, and latents of fewer than eight samples.
"""

from __future__ import annotations

from collections.abc import Iterator

from gradwatch.detect.features.finding import Sign
from gradwatch.events import LATENT_UNUSED, LATENT_USED
from gradwatch.history.store import History
from gradwatch.records import Event, Quantity, Severity

NATS = "latent.nats"
"""Key of the information of a latent."""


def find_unused_latent(history: History, *, patience: int) -> Iterator[Sign]:
    """Yield a sign if the newest reading of a latent shows that it carries no information.

    Args:
        history: History of the run.
        patience: Steps from the start of the run that a latent has to learn.
    """
    event = newest_read(history)
    if event is not None and event.kind == LATENT_UNUSED.name and history.step >= patience:
        yield Sign(
            f"the decoder ignores the latent of {event.layer or 'the encoder'}: {event.text}",
            (Quantity(key=NATS, label="information of the latent", value=event.values["nats"], unit="nats"),),
            event.step,
            layer=event.layer,
            severity=Severity.WARNING,
        )


def newest_read(history: History) -> Event | None:
    """Return the newest event about a latent, or None."""
    kinds = (LATENT_UNUSED.name, LATENT_USED.name)
    return next((e for e in reversed(history.events) if e.kind in kinds and e.step <= history.step), None)
