"""Steps that are laid behind a history and not recorded yet, as a glance at all of them at once sees them."""

# D = steps that are looked at, W = steps of a window, L = layers, K = samples of the activations, A = activations

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import numpy as np

from gradwatch.history.table import WINDOW, Floats, Steps

if TYPE_CHECKING:
    from gradwatch.history.store import History, Sample


@final
class Ahead:
    """What a history will hold at each of the next steps, of which every so many are looked at.

    Args:
        history: As it is before them. They have been laid.
        every: Look at steps that are multiples of it.
        samples: What some of the steps hold besides.

    Attributes:
        history: That history.
        places_D: Which of the next steps are looked at, counted from 0.
        steps_D: Their numbers.
        counts_D: How many recorded steps a window has at each of them, with it: at most `WINDOW`.
    """

    def __init__(self, history: History, *, every: int = 1, samples: Sequence[Sample] = ()) -> None:
        self.history = history
        self._acts = [sample.act_SL for sample in samples if sample.act_SL is not None]
        steps_T = history.run.ahead_steps()
        self._num_steps = len(steps_T)
        self.places_D = (steps_T % every == 0).nonzero()[0]
        self.steps_D: Steps = steps_T[self.places_D]
        self.counts_D = np.minimum(len(history.run.steps()) + 1 + self.places_D, WINDOW)

    def __len__(self) -> int:
        """Return how many steps are looked at."""
        return len(self.places_D)

    def scalar(self, statistic: str) -> Floats:
        """Return a statistic of the run at each step, of shape (D,)."""
        values_D: Floats = self.history.run.ahead(statistic)[self.places_D, 0]
        return values_D

    def scalars(self, statistic: str, length: int) -> Floats:
        """Return a statistic of the run over a window that ends at each step: shape (D, W), nan before the first."""
        return self._windows(self.history.run.ahead(statistic, before=length - 1)[:, 0], length)

    def newest(self, statistic: str) -> Floats:
        """Return a statistic of the layers at each step, of shape (D, L)."""
        values_DL: Floats = self.history.param.ahead(statistic)[self.places_D]
        return values_DL

    def windows(self, statistic: str, length: int, layer: int) -> Floats:
        """Return a statistic of one layer over a window that ends at each step: shape (D, W), nan before the first."""
        return self._windows(self.history.param.ahead(statistic, before=length - 1)[:, layer], length)

    def samples(self, statistic: str) -> Floats:
        """Return a statistic of the activations as it was last measured before these steps and at them: (K, A)."""
        table = self.history.act
        known = [table.newest(statistic)] if len(table.steps(1)) else []
        place = table.statistics.index(statistic)
        come = [act_SA[place] for act_SA in self._acts]
        return np.array([*known, *come]).reshape(len(known) + len(come), len(table.layers))

    def _windows(self, values_T: Floats, length: int) -> Floats:
        missing = length + self._num_steps - 1 - len(values_T)
        if missing:
            values_T = np.concatenate([np.full(missing, np.nan, values_T.dtype), values_T])
        windows_DW: Floats = values_T[self.places_D[:, None] + np.arange(length)]
        return windows_DW
