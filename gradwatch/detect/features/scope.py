"""Name affected tensors as briefly as the model allows: a tensor, a module, or the whole run."""

# L = parameter tensors

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect.features.structure import chain_key
from gradwatch.history.store import History
from gradwatch.records import Severity

Scope = tuple[str | None, list[int]]
"""A name, or None for the whole run, and the indices of the tensors that it stands for."""


Joined = tuple[tuple[str, ...], list[int]]
"""Names of several modules or tensors, empty for the whole run, and the indices of all their tensors."""


def affected_modules(
    history: History, affected_L: NDArray[np.bool_], *, kind: str, thawed: bool = False
) -> list[Scope]:
    """Group affected tensors into the largest modules in which every trainable tensor is affected.

    One finding for `encoder` says more than 30 findings for `encoder.layers.0.weight` and so on. For this reason a
    group is also left out if it lies inside or around a group that was named earlier for the same symptom.

    Args:
        history: History of the run.
        affected_L: Which tensors are affected, of shape (L,). Tensors that are not trainable do not count.
        kind: Kind of the symptom.
        thawed: Count affected tensors as trainable even if they were frozen when the monitor attached.

    Returns:
        The groups in model order. A group of one tensor has that tensor's name.
    """
    named = [name for f in history.findings if f.kind == kind for name in f.names or (None,)]
    groups = _groups(history, affected_L, thawed)
    return [(name, group) for name, group in groups if not any(_overlaps(name, n) for n in named)]


def _groups(history: History, affected_L: NDArray[np.bool_], thawed: bool) -> list[Scope]:
    if not affected_L.any():
        return []
    layers = history.info.layers
    trains = [layer.trainable or (thawed and bool(affected_L[i])) for i, layer in enumerate(layers)]
    affected = [i for i in np.flatnonzero(affected_L).tolist() if trains[i]]
    if not affected:
        return []
    # all trainable tensors: the whole run, unless the run has a single one, or most of the model is frozen
    if len(affected) == sum(trains) and (len(affected) == 1 or 2 * len(affected) > len(layers)):
        return [(None, affected)] if len(affected) > 1 else [(layers[i].name, [i]) for i in affected]
    of = Counter(m for i, layer in enumerate(layers) if trains[i] for m in _modules(layer.module))
    affected_of = Counter(m for i in affected for m in _modules(layers[i].module))
    groups: dict[str, list[int]] = {}
    for i in affected:
        # outermost first, so that the largest module wins; a module of one tensor is not a group
        whole = (m for m in _modules(layers[i].module) if affected_of[m] == of[m] > 1)
        groups.setdefault(next(whole, layers[i].name), []).append(i)
    return [(name if len(group) > 1 else layers[group[0]].name, group) for name, group in groups.items()]


def is_everything(history: History, group: list[int]) -> bool:
    """Return whether a group has every trainable tensor of the run."""
    return len(group) == sum(layer.trainable for layer in history.info.layers)


def joined_modules(
    history: History, affected_L: NDArray[np.bool_], *, kind: str, severity: Severity, thawed: bool = False
) -> list[Joined]:
    """Join the groups of `affected_modules`, which share one cause, so that they become one finding.

    Args:
        history: History of the run.
        affected_L: Which tensors are affected, of shape (L,).
        kind: Kind of the symptom.
        severity: Harm to the training. Names in an open finding that is as severe are left out.
        thawed: As for `affected_modules`.

    Returns:
        The names of all groups and their tensors, or an empty list. A finding for the whole run has no names.
    """
    known = {name for f in history.findings if f.kind == kind and f.severity >= severity for name in f.names}
    groups = [g for g in affected_modules(history, affected_L, kind=kind, thawed=thawed) if g[0] not in known]
    names = tuple(name for name, _ in groups if name is not None)
    return [(names, [i for _, group in groups for i in group])] if groups else []


def module_of(history: History, tensor: int) -> str:
    """Return the name of a tensor's module, or of the tensor if the module has no other trainable tensor.

    A tensor of a recurrent module of several layers keeps its own name: the module's name would stand for all layers.
    """
    layers = history.info.layers
    if len({chain_key(layer) for layer in layers if layer.module == layers[tensor].module}) > 1:
        return layers[tensor].name
    siblings = [layer for layer in layers if layer.module == layers[tensor].module and layer.trainable]
    return layers[tensor].module if len(siblings) > 1 and layers[tensor].module else layers[tensor].name


def _overlaps(name: str | None, other: str | None) -> bool:
    """Return whether one of two different names lies inside the other name."""
    if name == other:
        return False  # the same name may come again with a more severe finding
    if name is None or other is None:
        return other is None  # the whole run adds to single layers, not the other way round
    return name.startswith(f"{other}.") or other.startswith(f"{name}.")


def _modules(module: str) -> Iterator[str]:
    """Yield the names of a module and its parents, the outermost first, without the root."""
    parts = module.split(".") if module else []
    yield from (".".join(parts[: i + 1]) for i in range(len(parts)))
