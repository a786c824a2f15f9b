"""Explain wrong gradients: hold, remove or undo one suspect at a time, and see which leaves become right."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor
from torch.autograd import Function

from gradwatch.gradcheck.explain.hooks import GradientHook, without_hooks
from gradwatch.gradcheck.explain.kinds import name_mistake
from gradwatch.gradcheck.explain.nodes import NodeCheck, WrongArgument
from gradwatch.gradcheck.explain.saved_tensors import unchanged
from gradwatch.gradcheck.explain.second import second_derivatives
from gradwatch.gradcheck.explain.statements import shared_ratio, step_fault
from gradwatch.gradcheck.explain.wording import Named, function_text, listed, phrase
from gradwatch.gradcheck.judge import Examined, Judge
from gradwatch.gradcheck.result import Fault
from gradwatch.gradcheck.stepping.cuts import Cut, GraphCuts, function_at, positions_at
from gradwatch.gradcheck.stepping.function_calls import CallLog, RecordedCall, followed, method
from gradwatch.gradcheck.stepping.step import CheckedStep
from gradwatch.probe.place import NOWHERE, Place

MAX_CALLS = 40
"""Calls of one custom Function to check."""


@final
@dataclass(slots=True)
class Explanation:
    """The explanation of wrong leaves.

    Args:
        faults: Mistakes.
        on_purpose: Leaves that differ on purpose, or cannot be judged, with the reason.
    """

    faults: list[Fault] = field(default_factory=list)
    on_purpose: dict[str, str] = field(default_factory=dict)


@final
class Explainer:
    """Explain the wrong leaves of an examination.

    Args:
        judge: Examines again under an experiment.
        found: The examination.
        wrong: Names of the wrong leaves.
    """

    def __init__(self, judge: Judge, found: Examined, wrong: Sequence[str]) -> None:
        self._judge, self._found = judge, found
        self._open = list(wrong)
        self._held: set[type[Function]] = set()
        self._result = Explanation()
        model = judge.step.model
        self._names = {id(m): n or type(m).__name__ for n, m in (model.named_modules() if model else ())}
        self._names.update({id(p): n for n, p in (model.named_parameters() if model else ())})

    def explain(self) -> Explanation:
        """Return the mistakes, and the leaves that differ on purpose."""
        experiments = (self._functions, self._second, self._hooks, self._graph_cuts, self._saved, self._inexact_hooks)
        for experiment in (*experiments, self._step):
            if not self._open:
                break
            # an experiment runs the user's code in unintended ways, and may fail; the verdict does not need it
            with contextlib.suppress(Exception):
                experiment()
        return self._result

    def _examine(self, cuts: list[Cut] | None = None, held: Collection[int] = ()) -> Examined:
        """Compare the open leaves again."""
        return self._judge.examine(
            self._open,
            self._found.point,
            hold=lambda function: function in self._held,
            cuts=cuts,
            held_cuts=held,
            grads=self._found.grads,
        )

    def _close(self, names: Collection[str]) -> None:
        self._open = [n for n in self._open if n not in names]

    def _functions(self) -> None:
        """Check each call of a custom Function alone, and let wrong ones count as their backward declares."""
        nodes = NodeCheck(self._judge.generator, self._judge.step.epsilon)
        wrong: dict[type[Function], tuple[RecordedCall, list[WrongArgument]]] = {}
        for call in self._found.calls:
            if call.function in wrong or self._judge.is_allowed(call.function) or self._judge.is_late:
                continue
            if call.index < MAX_CALLS and (bad := nodes.wrong_arguments(call)):
                wrong[call.function] = (call, bad)
        if not wrong:
            return
        self._held |= set(wrong)
        explained = self._examine().names("right") or list(self._open)
        for function, (call, bad) in wrong.items():
            if all(w.is_step for w in bad):
                reason = f"the forward of {function.__name__} is a step function; `deliberate = True` says it is meant"
                self._result.on_purpose.update(dict.fromkeys(explained, reason))
                continue
            named = name_mistake(call, bad, nodes, self._judge.step.modules)
            if named.kind == "inplace" and call.given:
                named = Named("inplace", _writer_of(self._judge.step, self._found, call) or named.place, named.ratio)
            arguments = [_argument(call, w.index) for w in bad]
            self._result.faults.append(
                Fault(
                    kind=named.kind,
                    where=function.__name__,
                    text=function_text(named, function.__name__, arguments),
                    tensors=tuple(explained),
                    place=named.place,
                    ratio=named.ratio,
                )
            )
        self._close(explained)

    def _second(self) -> None:
        """Check the second derivative of each custom Function, if the step takes one."""
        if not self._found.grads.is_second:
            return
        faults = second_derivatives(self._judge, self._found.calls, tuple(self._open)).faults
        self._result.faults += faults
        if faults:
            self._open = []

    def _hooks(self) -> None:
        """Run without gradient hooks, and find the one whose absence makes a leaf right."""
        removed = self._right_without(None)
        if not removed[0]:
            return
        fixed, hooks = removed
        for key in dict.fromkeys(h.key for h in hooks):
            alone, taken = self._right_without(key)
            if not alone:
                continue
            self._add_hook(taken[0], alone)
        if self._open and any(n in self._open for n in fixed):
            self._add_hook(hooks[0], [n for n in fixed if n in self._open])

    def _add_hook(self, hook: GradientHook, names: Sequence[str], *, how: str = "") -> None:
        ratio = _ratio(self._found, names)
        owner = f" of `{hook.owner}`" if hook.owner else ""
        self._result.faults.append(
            Fault(
                kind="hook",
                where=hook.owner or hook.name,
                text=f"the hook {hook.name}{owner} changes the gradient{f', which is {how}' if how else phrase(ratio)}",
                tensors=tuple(names),
                place=hook.place,
                ratio=ratio,
            )
        )
        self._close(names)

    def _inexact_hooks(self) -> None:
        """Name the hook that changes the gradient of all wrong leaves and of no right one, as an adjoint solve does."""
        judge, right = self._judge, self._found.names("right")
        judge.step.move(self._found.point)
        with without_hooks(judge.step.modules, self._names) as removed:
            plain = judge.step.gradients().by_name
        given = self._found.grads.by_name
        changed = [n for n in (*self._open, *right) if not torch.equal(plain[n], given[n])]
        if removed and set(changed) == set(self._open):
            self._add_hook(removed[0], changed, how="wrong with it and without it")

    def _right_without(self, key: int | None) -> tuple[list[str], list[GradientHook]]:
        """Return the open leaves that are right without a hook, and the hooks that were removed."""
        judge = self._judge
        judge.step.move(self._found.point)
        with without_hooks(judge.step.modules, self._names, only=key) as removed:
            grads = judge.step.gradients()
        if not removed:
            return [], []
        found = judge.examine(self._open, self._found.point, hold=lambda function: function in self._held, grads=grads)
        return found.names("right"), removed

    def _graph_cuts(self) -> None:
        """Keep the values of detached tensors, and find the line whose cut explains a leaf."""
        mode = self._judge.recorded_cuts(self._found.point)
        if not mode.cuts:
            return
        all_held = self._examine(mode.cuts, range(len(mode.cuts)))
        explained = all_held.names("right")
        places = list(dict.fromkeys(c.place for c in mode.cuts))
        guilty = self._guilty(mode, places, explained) if explained else []
        for place, names in guilty:
            reasons = {c.on_purpose for c in mode.cuts if c.place == place}
            shown = f"{place.file.rpartition('/')[2]}:{place.line}"
            lost = [n for n in names if n in self._found.grads.absent]
            if "" not in reasons and not lost:
                reason = f"left out of the graph on purpose at {shown}: {next(iter(reasons))}"
                self._result.on_purpose.update(dict.fromkeys(names, reason))
            elif all(o.slope.flat for n, o in self._found.outcomes.items() if n in names):
                self._result.on_purpose.update(dict.fromkeys(names, f"a step function with a path around it, {shown}"))
            else:
                self._result.faults.append(_cut_fault(self._judge.step, mode.cuts, place, names))
            self._close(names)

    def _guilty(
        self, mode: GraphCuts, places: Sequence[Place], explained: Sequence[str]
    ) -> list[tuple[Place, list[str]]]:
        """Return the lines whose cuts explain leaves: each alone, or else every line that is necessary."""
        guilty: list[tuple[Place, list[str]]] = []
        rest = list(explained)
        for place in places:
            found = self._examine(mode.cuts, positions_at(mode.cuts, {place})).outcomes
            names = [n for n in rest if n in found and found[n].state == "right"]
            if names:
                guilty.append((place, names))
                rest = [n for n in rest if n not in names]
        for place in places if rest else ():
            found = self._examine(mode.cuts, positions_at(mode.cuts, set(places) - {place})).outcomes
            names = [n for n in rest if n in found and found[n].state != "right"]
            if names:
                guilty.append((place, names))
                rest = [n for n in rest if n not in names]
        return guilty

    def _saved(self) -> None:
        """Let every backward read what its forward saved: a leaf that becomes right was changed in place."""
        step = self._judge.step
        step.move(self._found.point)
        log = CallLog(copies=False)
        mode = GraphCuts(log)
        with followed(log), unchanged(mode) as saved, step.inside(mode.watching):
            grads = step.gradients()
        if not saved.changed:
            return
        found = self._judge.examine(self._open, self._found.point, grads=grads)
        if not (names := found.names("right")):
            return
        memories = dict(saved.changed)
        writes = [w for w in mode.writes if w.memory in memories and w.saved_before > memories[w.memory]]
        place = writes[-1].place if writes else NOWHERE
        where = function_at(place, _functions_of_step(self._judge.step)) or names[0]
        self._result.faults.append(
            Fault(
                kind="inplace",
                where=where,
                text=f"a tensor that the backward of {listed(names)} reads is changed in place after it was saved",
                tensors=tuple(names),
                place=place,
            )
        )
        self._close(names)

    def _step(self) -> None:
        """Name a mistake of the step itself."""
        right = [n for n, o in self._found.outcomes.items() if o.state == "right"]
        comparison = self._judge.comparison(self._found)
        self._result.faults += step_fault(self._judge.step, comparison, self._open, right)
        self._open = []


def _cut_fault(step: CheckedStep, cuts: Sequence[Cut], place: Place, names: Sequence[str]) -> Fault:
    """Return the mistake of a line that takes values out of the graph."""
    shown = f"{place.file.rpartition('/')[2]}:{place.line}"
    text = f"a path to {listed(names)} is cut at {shown}: its gradient lacks that term"
    if fed_back := next((c for c in cuts if c.place == place and c.feeds_back), None):
        text = (
            f"a module iterates without a graph, and its result goes back into it: the gradient of {listed(names)} "
            "lacks those iterations; let autograd follow them, or solve the adjoint equation in the backward pass"
        )
        place = fed_back.entered or place
    where = function_at(place, _functions_of_step(step)) or type(step.model).__name__
    return Fault(
        kind="detach",
        where=where,
        text=text,
        tensors=tuple(names),
        place=place,
    )


def _writer_of(step: CheckedStep, found: Examined, call: RecordedCall) -> Place | None:
    """Return the last line that wrote in place into an argument of a call."""
    step.move(found.point)
    log = CallLog()
    mode = GraphCuts(log)
    with followed(log), step.inside(mode.watching):
        step.gradients()
    same = next((c for c in log.calls if c.index == call.index), None)
    memories = {t.untyped_storage().data_ptr() for t in (same.given if same else ()) if isinstance(t, Tensor)}
    return next((w.place for w in reversed(mode.writes) if w.memory in memories), None)


def _functions_of_step(step: CheckedStep) -> list[object]:
    forwards = [type(m).forward for m in step.modules if inspect.isfunction(type(m).forward)]
    return [*step.functions, *dict.fromkeys(forwards)]


def _argument(call: RecordedCall, index: int) -> str:
    names = list(inspect.signature(method(call.function, "forward")).parameters)
    offset = len(names) - len(call.args)
    return names[index + offset] if offset >= 0 and index + offset < len(names) else f"argument {index}"


def _ratio(found: Examined, names: Sequence[str]) -> float:
    """Return the ratio of the gradient to the right one, if it is the same for some leaves."""
    return shared_ratio([o.analytic / o.slope.value for n, o in found.outcomes.items() if n in names and o.slope.value])
