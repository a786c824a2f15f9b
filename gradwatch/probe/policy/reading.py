"""Compute statistics of a policy from the tensors that its graph has saved for the backward pass."""

# N = samples, A = actions

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gradwatch.probe.graph.graph import Node, dimension, operation
from gradwatch.probe.policy.terms import Policy, clip_range

MAX_VALUES = 65536
"""Maximum number of values to read of one tensor, at equal distances."""

KEPT = {"Log": "self", "LogSoftmax": "result", "Logsumexp": "self", "Softmax": "result"}
"""Name under which each source keeps its values."""

Saved = Callable[[Node, str], Tensor | None]
"""Returns a tensor that a node saves, by name, or None if it is not in memory unchanged."""


def read_policy(policy: Policy, saved: Saved) -> Tensor | None:
    """Return entropy, KL divergence and clipped share of a policy, of shape (3,), float32, on its device.

    The entropy is nan unless the constants have both signs: with one sign, this may be a weighed classification.

    Args:
        policy: The nodes of the policy.
        saved: Returns what a node saves.

    Returns:
        The statistics in the order of the catalogue, nan if unknown; None if none is known.
    """
    probabilities_NA = _probabilities(policy.source, saved)
    ratio = None if policy.ratio is None else saved(policy.ratio, "result")
    weights = next((w for node in policy.weighings if (w := _constant(node, saved)) is not None), None)
    device = next((t.device for t in (ratio, probabilities_NA) if t is not None), None)
    if device is None:
        return None
    unknown = torch.full((), math.nan, device=device)
    entropy = unknown
    if probabilities_NA is not None and weights is not None:
        has_both_signs = (weights > 0).any() & (weights < 0).any()
        spread_N = torch.special.entr(probabilities_NA).sum(-1) / math.log(probabilities_NA.shape[-1])
        entropy = spread_N.mean().where(has_both_signs, unknown)
    if ratio is None or not ratio.numel():
        return torch.stack([entropy, unknown, unknown])
    ratio_N = _spread(ratio.reshape(-1)).float()
    return torch.stack([entropy, _divergence(ratio_N), _clipped(policy.clamp, ratio_N)])


def _divergence(ratio_N: Tensor) -> Tensor:
    """Return the estimate `k3` of a KL divergence, which is never negative: http://joschu.net/blog/kl-approx.html."""
    # infinity minus infinity is nan
    return torch.where(ratio_N.isinf(), math.inf, ratio_N - 1 - ratio_N.log()).mean()


def _clipped(clamp: Node | None, ratio_N: Tensor) -> Tensor:
    bounds = clip_range(clamp)
    if bounds is None:
        return torch.full((), math.nan, device=ratio_N.device)
    return ((ratio_N < bounds[0]) | (ratio_N > bounds[1])).mean(dtype=torch.float32)


def _probabilities(source: Node | None, saved: Saved) -> Tensor | None:
    """Return the probabilities of all actions for some samples, or None."""
    if source is None:
        return None
    name = operation(source)
    kept = saved(source, KEPT[name])
    if kept is None or not kept.ndim or kept.shape[-1] < 2 or not kept.numel() or not _is_along_last(source, kept):
        return None
    kept_NA = kept.reshape(-1, kept.shape[-1])
    kept_NA = kept_NA[:: -(-kept_NA.numel() // MAX_VALUES)].float()
    if name == "LogSoftmax":
        return kept_NA.exp()
    return kept_NA.softmax(-1) if name == "Logsumexp" else kept_NA / kept_NA.sum(-1, keepdim=True)


def _is_along_last(source: Node, kept: Tensor) -> bool:
    dims = getattr(source, "_saved_dim", -1)
    dims = [dims] if isinstance(dims, int) else [*dims]
    return [dimension(d, kept.ndim) for d in dims] == [kept.ndim - 1]


def _constant(weighing: Node, saved: Saved) -> Tensor | None:
    """Return the constants of a product, or None if there is only one for all samples."""
    has_first = weighing.next_functions[0][0] is not None
    constant = saved(weighing, "other" if has_first else "self")
    return None if constant is None or constant.numel() < 2 else _spread(constant.reshape(-1))


def _spread(values_N: Tensor) -> Tensor:
    return values_N[:: -(-len(values_N) // MAX_VALUES)]
