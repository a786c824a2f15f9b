"""Detect that a copy is evaluated whose weights follow the model and whose running statistics do not."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TypeGuard, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase as Norm
from torch.utils.hooks import RemovableHandle

from gradwatch.events import COPY_STATISTICS, Observation
from gradwatch.probe.copies.pairs import Pair
from gradwatch.probe.device.sync import to_host
from gradwatch.probe.inert_hook import inert_hook, remove_hooks, takes_hooks
from gradwatch.probe.modules.batch_norm import MAX_NORMS, MIN_DISTANCE, has_statistics
from gradwatch.probe.updates.outside_moves import fingerprints


@final
class CopiedStatistics:
    """Compare the running statistics of a copy with those of the trained module.

    They matter only if the copy is called in evaluation mode. An average of weights often has none until the end of the
    training, and the target of a contrastive loss normalizes by its batches.

    Args:
        pair: The copy and the trained module.
    """

    def __init__(self, pair: Pair) -> None:
        trained = dict(pair.trained.named_modules())
        norms = [(copy, trained.get(path)) for path, copy in pair.copy.named_modules()]
        both = [(copy, other) for copy, other in norms if _is_tracking(copy) and _is_tracking(other)]
        both = both[:: max(1, -(-len(both) // MAX_NORMS))]
        # weak: a probe must not keep a discarded model alive
        self._norms = [(weakref.ref(copy), weakref.ref(other)) for copy, other in both]
        self._what = f"`{pair.name}`" if pair.name else f"a copy of the model ({type(pair.copy).__name__})"
        self._name = pair.name
        self._marks = fingerprints(_statistics([copy for copy, _ in both]))
        self._marks_trained = fingerprints(_statistics([other for _, other in both]))
        self._is_evaluated = False
        self._handles: list[RemovableHandle] = []
        if both and takes_hooks(both[0][0]):
            self._handles.append(both[0][0].register_forward_pre_hook(inert_hook(self._before_call)))

    def find(self) -> Iterator[Observation]:
        """Yield the farthest statistics if the copy was evaluated with those that it had at the start."""
        if not self._handles or not self._is_evaluated:
            return
        self._is_evaluated = False
        both = [(copy, other) for one, two in self._norms if (copy := one()) and (other := two())]
        copies, trained = [copy for copy, _ in both], [other for _, other in both]
        if len(both) < len(self._norms) or fingerprints(_statistics(copies)) != self._marks:
            self.close()  # something updates them
            return
        if fingerprints(_statistics(trained)) == self._marks_trained:
            return  # frozen on purpose
        far_N2 = to_host(torch.stack([_distance(copy, other) for copy, other in both]))
        shift, spread = max(far_N2, key=max)
        if max(shift, spread) >= MIN_DISTANCE:
            values = {"shift": float(shift), "log of spread": float(spread)}
            yield COPY_STATISTICS.observe(self._name, values=values, what=self._what)

    def close(self) -> None:
        """Remove the hook."""
        remove_hooks(self._handles)

    def _before_call(self, norm: nn.Module, *_: object) -> None:
        self._is_evaluated |= not norm.training


def _is_tracking(module: nn.Module | None) -> TypeGuard[Norm]:
    return isinstance(module, Norm) and has_statistics(module)


def _statistics(norms: list[Norm]) -> list[Tensor]:
    both = [(norm.running_mean, norm.running_var) for norm in norms]
    return [tensor for tensors in both for tensor in tensors if tensor is not None]


def _distance(copy: Norm, trained: Norm) -> Tensor:
    """Return the shift in deviations and the log of the spread, as medians over the channels, of shape (2,)."""
    mean_C, var_C, other_mean_C, other_var_C = _statistics([copy, trained])
    wide = other_var_C.clamp_min(trained.eps)
    shift = ((mean_C - other_mean_C).abs() / wide.sqrt()).median()
    spread = (var_C.clamp_min(copy.eps) / wide).log().abs().median()
    return torch.stack([shift, spread]).float()
