"""The slow, obvious twins of what gradwatch computes fast, in float64, one line per quantity."""

import numpy as np
import torch
from numpy.typing import NDArray


def values(tensor: torch.Tensor) -> NDArray[np.float64]:
    """Every value of a tensor, sparse zeros included, complex ones by magnitude."""
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    real = dense.abs() if dense.is_complex() else dense
    return real.resolve_neg().double().flatten().numpy()


def gradient_statistics(grad: torch.Tensor | None) -> NDArray[np.float64]:
    """The six statistics in the order of the catalogue."""
    if grad is None:
        return np.full(6, np.nan)
    x = values(grad)
    if not x.size:
        return np.array([0, 0, np.nan, np.nan, np.nan, 0])
    with np.errstate(all="ignore"):
        l2 = np.sqrt(np.sum(x**2))
        absmax = np.max(np.abs(x))
        mean = np.mean(x)
        std = np.sqrt(np.mean((x - mean) ** 2))
    return np.array([l2, absmax, mean, std, np.mean(x == 0), np.sum(~np.isfinite(x))])


def update_statistics(before: torch.Tensor, after: torch.Tensor) -> NDArray[np.float64]:
    """Norm of the weight, and that of its change divided by it where that is a number."""
    dense = [torch.view_as_real(t) if t.is_complex() else t for t in (before.detach(), after.detach())]
    w, v = (values(t) for t in dense)
    with np.errstate(all="ignore"):
        norm, ratio = np.sqrt(np.sum(w**2)), np.sqrt(np.sum((v - w) ** 2) / np.sum(w**2))
    return np.array([norm, ratio if np.isfinite(ratio) else np.nan])


def histogram(tensor: torch.Tensor, edges: NDArray[np.float64]) -> NDArray[np.int64]:
    """Counts of the values as float32; an edge is in the bin farther from zero, Inf in the outermost, NaN in none."""
    with np.errstate(over="ignore"):
        x = np.clip(values(tensor).astype(np.float32).astype(np.float64), edges[0], edges[-1])
    middle = len(edges) // 2
    upwards = np.searchsorted(edges, x[x >= 0], side="right") - 1
    downwards = np.searchsorted(edges, x[x < 0], side="left") - 1 + np.isin(x[x < 0], edges[middle:])
    bins = np.concatenate([upwards, np.maximum(downwards, 0)])
    return np.bincount(np.minimum(bins, len(edges) - 2), minlength=len(edges) - 1)


def activation_statistics(outputs: list[torch.Tensor], unit_dim: int, dead: tuple[float, float]) -> NDArray[np.float64]:
    """Dead fraction, nan, mean, std, nan and nan over the outputs of all calls; a dead unit never leaves `dead`."""
    units = np.concatenate([o.detach().double().movedim(unit_dim, -1).flatten(0, -2).numpy() for o in outputs])
    is_dead = np.all((units >= dead[0]) & (units <= dead[1]), axis=0)
    # the last two are of attention
    return np.array([np.mean(is_dead), np.nan, np.mean(units), np.std(units), np.nan, np.nan])


def silent_since(dead_TU: NDArray[np.bool_], first: int) -> int:
    """How many units were dead at every sample from one on."""
    return int(dead_TU[first:].all(axis=0).sum())


def newest_row(table):
    """What a table of the history holds of its newest step, of shape (S, L)."""
    return table.since(table.last_step - 1)[1][0]
