"""Run a script until it has made two updates, and audit them."""

from __future__ import annotations

import contextlib
import runpy
import sys
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import dataloader

from gradwatch.autowatch.loops import leaves_of
from gradwatch.autowatch.search import find_models, find_outermost, params_of
from gradwatch.errors import GradwatchError, is_users, raised
from gradwatch.gradcheck.audit.audit import check_allowed
from gradwatch.gradcheck.audit.case import AuditedStep, named_tensors
from gradwatch.gradcheck.audit.judging import judged
from gradwatch.gradcheck.audit.losses import LossCalls
from gradwatch.gradcheck.audit.recorder import EventRecorder
from gradwatch.gradcheck.audit.result import StepAudit
from gradwatch.gradcheck.audit.windows import is_zero, windows
from gradwatch.gradcheck.stepping.engine import backward_engine, is_inner_pass, put_engine
from gradwatch.probe.objects import live

NUM_UPDATES = 2
"""Updates to record: the second shows the gradients that the first leaves."""
MAX_PASSES = 128
"""Backward passes to record at most: each keeps copies of the gradients."""


def audit_script(script: Path, arguments: Sequence[str], *, allow: Collection[str]) -> StepAudit:
    """Run an unedited script until it has made two updates, and audit these.

    The script runs in this process, and ends at the pass after them. Its output goes to standard error.

    Args:
        script: The Python file.
        arguments: Its arguments.
        allow: Kinds of differences that are on purpose.

    Raises:
        GradwatchError: The script fails, or ends without a backward pass for an optimizer.
    """
    check_allowed(allow)
    recording = _Recording()
    with _process_of(script, arguments), recording.prepared():
        try:
            runpy.run_path(str(script), run_name="__main__")
        except (_Enough, SystemExit):
            pass
        except Exception as error:  # the user's code may raise anything
            raise GradwatchError(f"check: {script} failed: {raised(error)}") from error
    return replace(judged(recording.cases(script), allow), notes=(f"the first updates of {script}",))


@final
class _Enough(BaseException):
    """End a script after enough is recorded. It is not an `Exception`, which the script could catch."""


@final
class _Recording:
    """Records the updates of the script that runs, from its first backward pass on."""

    def __init__(self) -> None:
        self._recorder: EventRecorder | None = None
        self._engine: Any = backward_engine()
        self._calls = LossCalls()
        self._drawn: list[Any] = []
        self._stack = contextlib.ExitStack()
        self._others = weakref.WeakSet(live(Optimizer))  # gradwatch's own, not the script's
        self._optimizers: list[Optimizer] = []
        self._models: list[nn.Module] = []
        self._names: list[str] = []

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """Begin to record at the first backward pass inside the context."""
        loaders: Any = dataloader._BaseDataLoaderIter
        engine, draw = self._engine, loaders.__next__

        def drawn(loader: Any) -> Any:
            batch = draw(loader)
            if len(self._drawn) < MAX_PASSES:  # kept, so that no other tensor gets their memory
                self._drawn.append([*batch] if isinstance(batch, tuple) else batch)
            return batch

        with self._calls, self._stack:
            self._stack.callback(put_engine, engine)
            self._stack.callback(setattr, loaders, "__next__", draw)
            put_engine(self._backward)
            loaders.__next__ = drawn
            yield

    def cases(self, script: Path) -> list[AuditedStep]:
        """Return the recorded updates, once for each optimizer that made any.

        Args:
            script: The script, for the message if nothing was recorded.
        """
        recorder = self._recorder
        if recorder is None:
            raise GradwatchError(f"check: {script} ended without a backward pass for an optimizer of torch")
        index, events = recorder.index, recorder.events
        # a model that the script has replaced gets no gradients
        used = [m for m in self._models if any(_has_gradient(events, index[id(p)]) for p in m.parameters())]
        own = [*dict.fromkeys(index[id(p)] for m in used for p in m.parameters())]
        held = [[index[key] for key in params_of([o]) if key in index] for o in self._optimizers]
        found = [
            AuditedStep(
                optimizer=optimizer,
                batch=self._drawn,
                watched=recorder.watched,
                names=self._names,
                held=mine,
                own=own,
                elsewhere=frozenset(i for other in held if other is not mine for i in other) - {*mine},
                events=events,
                windows=windows(events, mine),
                losses_move=None,
            )
            for optimizer, mine in zip(self._optimizers, held, strict=True)
        ]
        return [case for case in found if case.windows] or found[:1]

    def _backward(self, roots: Any, *args: Any, **options: Any) -> Any:
        if not is_inner_pass() and options.get("accumulate_grad", False):
            if self._recorder is None:
                self._begin(roots)
            elif self._is_complete(self._recorder):
                raise _Enough
        return self._engine(roots, *args, **options)

    def _begin(self, roots: Sequence[Tensor]) -> None:
        """Find models and optimizers, and record from now on."""
        self._optimizers = find_outermost([o for o in live(Optimizer) if o not in self._others])
        if not self._optimizers:
            return
        leaves = {id(leaf): leaf for root in roots for leaf in leaves_of(root)}
        params = leaves | params_of(self._optimizers)
        models = find_models(params, running=None)
        self._models = [*models.values()]
        named = named_tensors(models, self._optimizers)
        self._names = [name for name, _ in named.values()]
        self._recorder = EventRecorder(
            [tensor for _, tensor in named.values()],
            models=self._models,
            spaces=[vars(m) for m in [*sys.modules.values()] if is_users(getattr(m, "__file__", None) or "<none>")],
            caller=audit_script.__code__,
            calls=self._calls,
        )
        put_engine(self._engine)
        self._stack.enter_context(self._recorder.recording())
        self._engine = backward_engine()
        put_engine(self._backward)

    def _is_complete(self, recorder: EventRecorder) -> bool:
        passes = sum(e.kind == "backward" for e in recorder.events)
        made = [e.owner for e in recorder.events if e.kind == "update"]
        return passes >= MAX_PASSES or all(sum(o is owner for owner in made) >= NUM_UPDATES for o in self._optimizers)


def _has_gradient(events: Sequence[Any], index: int) -> bool:
    return any(not is_zero(e.after.grads[index]) for e in events if e.kind == "backward")


@contextlib.contextmanager
def _process_of(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Give the script its arguments and its folder, and keep standard output for the report."""
    argv, path = sys.argv, [*sys.path]
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.argv, sys.path[:] = argv, path
