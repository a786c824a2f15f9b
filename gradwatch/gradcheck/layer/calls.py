"""Judge the side effects of a layer: writes in place, randomness, state, and its two modes."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gradwatch.gradcheck.layer.recorder import first_difference, same
from gradwatch.gradcheck.layer.result import LayerProperty
from gradwatch.gradcheck.layer.trial import LayerTrial, Pass
from gradwatch.gradcheck.layer.values import gradients_of
from gradwatch.probe.nested import storage_id

DROPOUT = ("native_dropout", "bernoulli_")
"""Operations that implement dropout."""


def leaves_input(trial: LayerTrial) -> LayerProperty:
    """Judge whether the forward pass leaves its inputs unchanged."""
    for training in (True, False):
        batch = trial.batch(trial.size)
        given = [t for t in tree_leaves(batch) if isinstance(t, Tensor)]
        before = [t.clone() for t in given]
        memory = {storage_id(t): i for i, t in enumerate(given)}
        done = trial.run(trial.fresh(training=training), batch, lend=True)
        changed = [i for i, t in enumerate(given) if not same(t, before[i])]
        if changed:
            writer = next((o for o in done.operations if any(memory.get(w) in changed for w in o.writes)), None)
            by = f" by {writer.described}" if writer else ""
            text = f"input {changed[0]} is changed in place{by}"
            return LayerProperty(outcome="fails", text=text, **(writer.at if writer else {}))
    return LayerProperty(outcome="holds", text="the inputs are not changed in place")


def is_deterministic(trial: LayerTrial) -> LayerProperty:
    """Judge whether two runs from one random state give the same bits, forward and backward."""
    batch = trial.batch(trial.size)
    (one, grads), (other, again) = (
        gradients_of(trial, trial.fresh(training=True), batch, record=True) for _ in range(2)
    )
    if not _equal(one, other):
        at = first_difference(one.operations, other.operations)
        text = "two runs from the same random state differ" + (f", first in {at.described}" if at else "")
        return LayerProperty(outcome="fails", text=text, **(at.at if at else {}))
    if len(grads) != len(again) or not all(map(same, grads, again)):
        text = "two runs from the same random state have different gradients"
        return LayerProperty(outcome="fails", text=text)
    return LayerProperty(outcome="holds", text="runs from one random state are equal bit for bit, gradients too")


def keeps_no_state(trial: LayerTrial) -> LayerProperty:
    """Judge whether a call in evaluation depends on earlier calls, and find attributes that grow with each call."""
    first, second = trial.batch(trial.size), trial.with_changed_sample(trial.batch(trial.size), 0)
    used, unused = trial.fresh(training=False), trial.fresh(training=False)
    states = [_state(used)]
    for batch in (first, first):
        trial.run(used, batch)
        states.append(_state(used))
    after, alone = trial.run(used, second, keep=True), trial.run(unused, second, keep=True)
    changed = [n for n, v in states[2].items() if n not in states[0] or not _unchanged(states[0][n], v)]
    kept = ", ".join(f"`{n}`" for n in changed[:3])
    if not _equal(after, alone):
        at = first_difference(after.operations, alone.operations)
        text = "a call in eval mode depends on the calls before it" + (f"; they change {kept}" if kept else "")
        return LayerProperty(outcome="fails", text=text, **(at.at if at else {}))
    growing = [n for n in states[2] if _grows([s.get(n) for s in states])]
    if growing:
        text = f"`{growing[0]}` grows with every call in eval mode"
        return LayerProperty(outcome="fails", text=text, module=growing[0].rpartition(".")[0])
    buffers = {n for n, _ in used.named_buffers()} & set(changed)
    if buffers:
        text = f"eval mode changes the buffer `{min(buffers)}`"
        return LayerProperty(outcome="fails", text=text, module=min(buffers).rpartition(".")[0])
    text = "no call depends on another one" + (f"; {kept} keeps the last values" if kept else "")
    return LayerProperty(outcome="holds", text=text)


def modes(trial: LayerTrial) -> LayerProperty:
    """Judge whether every part follows `model.eval()`, and name the parts that behave differently in training."""
    module = trial.fresh(training=False)
    left = [n for n, m in _every_module(module).items() if m.training]
    if left:
        text = f"`{left[0]}` stays in training mode after model.eval()"
        return LayerProperty(outcome="fails", text=text, module=left[0])
    batch = trial.batch(trial.prime)
    fixed = trial.run(module, batch, keep=True, seed=0)
    other = trial.run(trial.fresh(training=False), batch, keep=True, seed=1)
    drawn = ""
    if not _equal(fixed, other):
        at = first_difference(fixed.operations, other.operations)
        if at is not None and at.name in (*DROPOUT, "bernoulli"):
            text = f"{at.described} drops values in eval mode too: pass training=self.training"
            return LayerProperty(outcome="fails", text=text, **at.at)
        drawn = "; eval mode draws random numbers" + (f" in {at.described}" if at else "")
    trained = trial.run(trial.fresh(training=True), batch, keep=True, seed=0)
    if _equal(trained, fixed):
        return LayerProperty(outcome="holds", text=f"the same in training and in evaluation{drawn}")
    at = first_difference(trained.operations, fixed.operations)
    differing = _differing(trained, fixed) or ([at.described] if at else [])
    by = f" by {', '.join(differing[:3])}" if differing else ""
    return LayerProperty(outcome="holds", text=f"training and evaluation differ{by}{drawn}")


def _equal(a: Pass, b: Pass) -> bool:
    return len(a.outputs) == len(b.outputs) and all(map(same, a.outputs, b.outputs))


def _differing(a: Pass, b: Pass) -> list[str]:
    """Return the modules that call other operations in one mode than in the other."""
    ours, theirs = ({(o.module, o.name): o for o in p.operations} for p in (a, b))
    found = [o for key, o in {**ours, **theirs}.items() if (key in ours) != (key in theirs)]
    names = [f"`{o.module}`" if o.module else o.module_class.__name__ for o in found if o.module_class]
    return list(dict.fromkeys(names))


def _state(module: nn.Module) -> dict[str, Any]:
    """Return copies of the tensors, and the numbers, containers' sizes and other plain values that a module holds."""
    found: dict[str, Any] = {n: b.detach().clone() for n, b in module.named_buffers()}
    for path, part in module.named_modules():
        for name, value in part.__dict__.items():
            full = f"{path}.{name}".lstrip(".")
            if isinstance(value, Tensor):
                found[full] = value.detach().clone()
            elif isinstance(value, (bool, int, float, str)):
                found[full] = value
            elif isinstance(value, Sized) and not name.startswith("_"):
                found[full] = _Size(len(value))
    return found


class _Size(int):
    """Number of elements of a container."""


def _unchanged(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return same(a, b)
    return type(a) is type(b) and a == b


def _grows(values: list[Any]) -> bool:
    """Return whether a container or a tensor is larger after each call."""
    sizes = [v.numel() if isinstance(v, Tensor) else v if isinstance(v, _Size) else None for v in values]
    known = [s for s in sizes if s is not None]
    return len(known) == len(sizes) and all(a < b for a, b in pairwise(known))


def _every_module(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by path, those in plain lists and dictionaries too."""
    found = dict(module.named_modules())
    for path, part in [*found.items()]:
        for name, value in part.__dict__.items():
            held = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
            if not name.startswith("_"):
                for i, child in enumerate(held):
                    if isinstance(child, nn.Module):
                        found[f"{path}.{name}.{i}".lstrip(".")] = child
    return found
