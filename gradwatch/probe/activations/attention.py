"""Measure the largest logit and the entropy of attention for a few queries, from tensors that autograd has saved."""

# B = samples, H = heads, Q = sampled queries, K = keys, D = width of a head

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gradwatch.probe.graph.graph import FUSED_ATTENTIONS, LAYOUT, SOFTMAX, TRANSPOSING, Node, operation

COMPOSED = "SafeSoftmax"
"""Softmax of `scaled_dot_product_attention` if no fused kernel applies; no other function uses it."""

MAX_SAMPLES = 4
"""Maximum number of samples to read of a batch."""

MAX_QUERIES = 8
"""Maximum number of queries to read of a sample. 12 heads and 1,024 keys of width 64 then take 25 million products."""

MAX_STEPS = 16
"""Maximum number of operations from a softmax to its product: a scale, masks, biases and changes of layout."""

FACTORS = {"Bmm": ("self", "mat2"), "Baddbmm": ("batch1", "batch2")}
"""Names of the factors that a batched product saves."""

OPEN = -1e4
"""Numbers below this that a mask adds to a logit hide the key: `-inf`, or the lowest numbers of half precision."""

MOST_POSITIONS = 0.9
"""Minimum fraction of positions that attend to the next one. A prompt that all positions see is only a part."""

Saved = Callable[[Node, str], Tensor | None]
"""Returns a tensor that a node saves, by name, or None if it is not in memory unchanged."""


def read_attention(node: Node, saved: Saved) -> Tensor | None:
    """Return the largest logit and the smallest entropy of a head, of shape (2,), float32.

    The entropy of a head is the mean over queries, each relative to the log of its number of keys: 1 for attention that
    is spread evenly, 0 for a single key. Both come from the last queries of a few samples, which have the most keys.

    Args:
        node: A softmax, or attention in one kernel.
        saved: Returns what a node saves.

    Returns:
        The two numbers on the device of the queries, nan if unknown; None if the node computes no attention, or its
        tensors are not in memory.
    """
    if operation(node) in FUSED_ATTENTIONS:
        return _of_kernel(node, saved)
    return _of_softmax(node, saved) if operation(node) in SOFTMAX else None


def queries_and_keys(node: Node, saved: Saved) -> tuple[Node, Node] | None:
    """Return the operations that computed the queries and the keys of an attention, or None for another node."""
    product = node if operation(node) in FUSED_ATTENTIONS else _product_below(node, saved)[0]
    operands = [child for child, _ in product.next_functions] if product is not None else []
    # the summand of a fused sum precedes its factors
    query, key = operands[:2] if product is node else operands[-2:] if len(operands) > 1 else (None, None)
    return None if query is None or key is None else (query, key)


def sees_next_position(node: Node, saved: Saved, *, positions: int) -> bool:
    """Return whether most queries of an attention of a sequence to itself use the key after them.

    Args:
        node: A softmax, or attention in one kernel.
        saved: Returns what a node saves.
        positions: Length of the sequence. Further keys may precede it, such as those of a prompt.
    """
    is_used = used_keys(node, saved) if positions > 1 else None  # a single position has no next key
    if is_used is None or not is_used.shape[-1] == is_used.shape[-2] >= positions:
        return False
    next_keys = is_used.diagonal(1, -2, -1)[..., 1 - positions :]
    return bool(next_keys.reshape(-1, positions - 1).any(0).float().mean() > MOST_POSITIONS)


def used_keys(node: Node, saved: Saved) -> Tensor | None:
    """Return which keys each query of an attention uses, of shape (..., Q, K), or None if it is unknown.

    Args:
        node: A softmax, or attention in one kernel.
        saved: Returns what a node saves.
    """
    if operation(node) not in FUSED_ATTENTIONS:
        weights = saved(node, "result")
        return None if weights is None or weights.ndim < 3 else weights > 0
    query, key, name = saved(node, "query"), saved(node, "key"), _mask_name(node)
    if query is None or key is None:
        return None
    queries, keys = query.shape[2], key.shape[2]
    if name and getattr(node, f"_saved_{name}") is not None:
        mask = saved(node, name)
        is_used = None if mask is None else mask.expand(*mask.shape[:-2], queries, keys) > OPEN
    else:
        is_used = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
    return is_used.tril() if is_used is not None and node._saved_is_causal else is_used


def _mask_name(node: Node) -> str | None:
    return next((name for name in ("attn_mask", "attn_bias") if hasattr(node, f"_saved_{name}")), None)


def _of_kernel(node: Node, saved: Saved) -> Tensor | None:
    query, key = saved(node, "query"), saved(node, "key")
    if query is None or key is None or query.ndim != 4 or query.is_nested or not query.numel() or not key.numel():
        return None
    rows = _rows(query.shape[2])
    q_BHQD, k_BHKD = query[:MAX_SAMPLES, :, rows].float(), key[:MAX_SAMPLES].float()
    # several heads of queries may share a head of keys
    k_BHKD = k_BHKD.repeat_interleave(q_BHQD.shape[1] // k_BHKD.shape[1], dim=1)
    scale = node._saved_scale
    logits_BHQK = q_BHQD @ k_BHKD.mT * (1 / math.sqrt(query.shape[3]) if scale is None else float(scale))
    if node._saved_is_causal:
        positions_Q = torch.arange(query.shape[2], device=query.device)[rows]
        positions_K = torch.arange(key.shape[2], device=query.device)
        logits_BHQK = logits_BHQK.masked_fill(positions_K > positions_Q[:, None], -math.inf)
    # the kernel gets an additive mask: booleans have become 0 and -inf
    name = _mask_name(node)
    mask = saved(node, name) if name else None
    if mask is not None:
        whole = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        logits_BHQK = logits_BHQK + whole[:MAX_SAMPLES, :, rows].float()
    is_open_BHQK = logits_BHQK > -math.inf
    weights_BHQK = logits_BHQK.softmax(-1)
    return torch.stack([logits_BHQK.amax(), _smallest_entropy(weights_BHQK, is_open_BHQK.sum(-1))])


def _of_softmax(node: Node, saved: Saved) -> Tensor | None:
    product, factor = _product_below(node, saved)
    weights = saved(node, "result")
    if product is None or weights is None or weights.ndim not in (3, 4) or not weights.numel():
        return None
    heads = weights.shape[1] if weights.ndim == 4 else 1
    weights_BHQK = weights.reshape(-1, heads, *weights.shape[-2:])[:MAX_SAMPLES, :, _rows(weights.shape[-2])].float()
    # a weight of 0 is masked, or too small: a key is masked for a query if no sample and no head uses it
    open_Q = (weights_BHQK > 0).any(dim=0).any(dim=0).sum(-1)
    entropy = _smallest_entropy(weights_BHQK, open_Q.expand(weights_BHQK.shape[:-1]))
    largest = _largest_logit(product, factor, weights_BHQK, saved)
    return torch.stack([torch.full_like(entropy, math.nan) if largest is None else largest, entropy])


def _largest_logit(product: Node, factor: Tensor | None, weights_BHQK: Tensor, saved: Saved) -> Tensor | None:
    """Return the largest of the scaled products that have some weights, or None if it is unknown."""
    left, right = (saved(product, name) for name in FACTORS[operation(product)])
    if factor is None or left is None or right is None:
        return None
    samples, heads, queries, keys = weights_BHQK.shape
    number = samples * heads
    rows_NQD, right_NDK = left[:number, _rows(left.shape[1])].float(), right[:number].float()
    if rows_NQD.shape[:2] != (number, queries) or right_NDK.shape[2] != keys:
        return None
    logits_BHQK = factor * (rows_NQD @ right_NDK).reshape(weights_BHQK.shape)
    # masked keys have logits too, which nothing uses
    return logits_BHQK.masked_fill(weights_BHQK == 0, -math.inf).amax()


def _product_below(node: Node, saved: Saved) -> tuple[Node | None, Tensor | None]:
    """Return the batched product whose softmax a node computes, and the factor on it; None if the factor is unknown."""
    factor: Tensor | None = torch.ones(())
    for _ in range(MAX_STEPS):
        # a mask is a constant without a node; a bias that is learned comes second
        below = next((child for child, _ in node.next_functions if child is not None), None)
        if below is None:
            return None, None
        node, name = below, operation(below)
        if name in FACTORS:
            return node, factor
        if name in ("Div", "Mul"):
            other = saved(node, "other")
            if factor is not None and other is not None and not other.ndim:
                factor = factor / other if name == "Div" else factor * other
            else:
                factor = None
        elif name in TRANSPOSING:
            factor = None
        elif name not in LAYOUT and name not in ("Add", "MaskedFill", "Sub", "Where"):
            return None, None
    return None, None


def _rows(count: int) -> slice:
    """Return the last of some queries, at most `MAX_QUERIES`, at equal distances within their second half."""
    half = (count + 1) // 2
    number = min(MAX_QUERIES, half)
    stride = half // number
    return slice(count - 1 - (number - 1) * stride, None, stride)


def _smallest_entropy(weights_BHQK: Tensor, keys_BHQ: Tensor) -> Tensor:
    """Return the smallest entropy of a head relative to an even spread; nan if no query has a choice."""
    entropy_BHQ = torch.special.entr(weights_BHQK).sum(-1) / keys_BHQ.float().log()
    # a single key leaves no choice: 0 / 0
    entropy_H = entropy_BHQ.where(keys_BHQ > 1, math.nan).nanmean(dim=(0, 2))
    smallest: Tensor = entropy_H.where(~entropy_H.isnan(), math.inf).amin()
    return smallest.where(smallest.isfinite(), math.nan)
