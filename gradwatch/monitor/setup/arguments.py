"""Check the arguments of `watch`, and report all mistakes at once: each with place, value, expectation and remedy."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gradwatch.errors import GradwatchError, Key, Problem, did_you_mean
from gradwatch.incident.step_snapshot import StepRecord
from gradwatch.monitor.budget import Schedule
from gradwatch.monitor.setup.own_sinks import Settings, check_sinks
from gradwatch.probe.device.dtensor import is_distributed

MAX_VALUE_CHARS = 60
"""Maximum length of a value in a message."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Arguments of `watch` in one form each, after the check.

    Args:
        models: The models by name; the name of a single model is empty.
        optimizers: The optimizers that take hooks. Empty if the loop moves the weights by hand.
        detect: Thresholds by kind, under the stored names.
        sinks: Settings of the sinks that take part, by name.
        accumulate: As in `watch`.
        total_steps: As in `watch`.
        resume: As in `watch`.
        is_sharded: Whether parameters are spread over processes.
    """

    models: dict[str, nn.Module]
    optimizers: list[Optimizer]
    detect: dict[str, dict[str, Any]]
    sinks: Settings
    accumulate: int
    total_steps: int | None
    resume: bool | int
    is_sharded: bool


def check_arguments(
    *,
    model: Any,
    optimizer: Any,
    run: Any,
    scaler: Any,
    accumulate: Any,
    loss_fn: Any,
    total_steps: Any,
    schedule: Any,
    detect: Any,
    record: Any,
    on_finding: Any,
    resume: Any,
    overwrite: Any,
    sinks: Any,
) -> Arguments:
    """Check the arguments of `watch`.

    Raises:
        GradwatchError: There are mistakes; one line for each.
    """
    if isinstance(model, Optimizer) and isinstance(optimizer, nn.Module):
        raise GradwatchError("model: got an optimizer, and optimizer a model; write watch(model, optimizer)")
    models, found = _models(model)
    optimizers, wrong = _optimizers(optimizer)
    checked, wrong_detect = _detect(detect)
    chosen, wrong_sinks = check_sinks(sinks, has_directory=run is not None)
    is_sharded = any(is_distributed(param) for each in models.values() for param in each.parameters())
    found += [
        *wrong,
        *_run(run),
        *_methods("scaler", scaler, ("is_enabled", "get_scale"), "a torch.amp.GradScaler, or None"),
        *_whole("accumulate", accumulate, least=1),
        *_methods("loss_fn", loss_fn, ("__call__",), "a function or a module, or None"),
        *(_whole("total_steps", total_steps, least=1, others=", or None") if total_steps is not None else ()),
        *_schedule(schedule),
        *wrong_detect,
        *wrong_sinks,
        *_record(record, run=run),
        *_on_finding(on_finding),
        *_existing_run(resume, overwrite, run=run, is_sharded=is_sharded),
    ]
    if found:
        raise GradwatchError("\n".join(map(str, found)))
    _warn_if_unrelated(models, optimizers)
    return Arguments(
        models=models,
        optimizers=optimizers,
        detect=checked,
        sinks=chosen,
        accumulate=int(accumulate),  # NumPy's numbers are not JSON
        total_steps=None if total_steps is None else int(total_steps),
        resume=resume if isinstance(resume, bool) else int(resume),
        is_sharded=is_sharded,
    )


def _models(model: Any) -> tuple[dict[str, nn.Module], list[Problem]]:
    if isinstance(model, nn.Module):
        return {"": model}, []
    if not isinstance(model, Mapping) or not model:
        hint = ""
        if isinstance(model, type):
            hint = f"create it first: {model.__name__}(...)"
        elif isinstance(model, Sequence):
            hint = "name several models: {'generator': ..., 'critic': ...}"
        text = f"got {_shown(model)}, expected a torch.nn.Module, or a dict of them by name"
        return {}, [Problem(("model",), text, help=hint)]
    found = [
        Problem(("model", str(name)), f"got {_shown(each)}, expected a torch.nn.Module")
        for name, each in model.items()
        if not isinstance(each, nn.Module)
    ]
    found += [
        Problem(("model",), f"got the name {_shown(name)}, expected text")
        for name in model
        if not isinstance(name, str)
    ]
    return {} if found else dict(model), found


def _optimizers(optimizer: Any) -> tuple[list[Optimizer], list[Problem]]:
    is_list = isinstance(optimizer, list | tuple) and not (optimizer and all(isinstance(o, Tensor) for o in optimizer))
    found: list[Problem] = []
    taken: list[Optimizer] = []
    for i, each in enumerate(optimizer if is_list else [optimizer]):
        key: Key = ("optimizer", i) if is_list else ("optimizer",)
        if not isinstance(each, Optimizer):
            text = f"got {_shown(each)}, expected a torch.optim.Optimizer" + ("" if is_list else ", or a list of them")
            found.append(Problem(key, text, help=_optimizer_hint(each)))
        elif (inner := _without_wrapper(each)) is None:
            name = type(each).__name__
            found.append(
                Problem(key, f"{name} takes no hooks; have {name}.__init__ call that of torch.optim.Optimizer")
            )
        elif inner in taken:
            found.append(Problem(key, f"the same {type(inner).__name__} is given twice", help="remove one"))
        else:
            taken.append(inner)
    return taken, found


def _optimizer_hint(value: Any) -> str:
    if isinstance(value, LRScheduler):
        return "a learning-rate schedule needs no watching: pass its optimizer"
    if isinstance(value, type):
        return f"create it first: {value.__name__}(model.parameters(), ...)"
    if isinstance(value, Mapping):
        return "pass a list: list(optimizers.values())"
    return "pass [] if the loop moves the weights by hand"


def _without_wrapper(optimizer: Optimizer) -> Optimizer | None:
    """Return the inner optimizer of a wrapper, or the optimizer itself; None if it takes no hooks."""
    # a wrapper such as the optimizer of Accelerate never calls `Optimizer.__init__`, so it has no table of hooks
    try:
        optimizer.register_step_pre_hook(_nothing).remove()
    except AttributeError:
        inner = getattr(optimizer, "optimizer", None)
        return _without_wrapper(inner) if isinstance(inner, Optimizer) else None
    return optimizer


def _nothing(*_: object) -> None:
    return None


def _warn_if_unrelated(models: Mapping[str, nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Warn if the optimizers hold no trainable parameter of the models: often the model was made again afterwards."""
    # not an error: some optimizers hold copies of the parameters, in another precision
    trainable = {param for model in models.values() for param in model.parameters() if param.requires_grad}
    held = {param for each in optimizers for group in each.param_groups for param in group["params"]}
    if trainable and optimizers and not trainable & held:
        names = " and ".join(type(each).__name__ for each in optimizers)
        text = f"optimizer: {names} holds none of the model's parameters; make the optimizer after the model"
        warnings.warn(f"gradwatch: {text}", RuntimeWarning, stacklevel=4)


def _detect(detect: Any) -> tuple[dict[str, dict[str, Any]], list[Problem]]:
    if detect is None:
        return {}, []
    # imported here, since it reads the sources of detectors and takes half a second
    from gradwatch.config.names.checks import check_switches
    from gradwatch.config.names.registry import DETECTORS

    checked, found = check_switches(DETECTORS, detect)
    return checked, [problem.below("detect") for problem in found]


def _run(run: Any) -> list[Problem]:
    expected = "expected the path of a directory, or None"
    if run is None or (isinstance(run, str | os.PathLike) and str(run)):
        is_file = run is not None and Path(run).is_file()
        return [Problem(("run",), f"got {str(run)!r}, which is a file; {expected}")] if is_file else []
    return [Problem(("run",), f"got {_shown(run)}, {expected}")]


def _schedule(schedule: Any) -> list[Problem]:
    if not isinstance(schedule, Schedule):
        hint = ""
        if isinstance(schedule, LRScheduler):
            hint = "leave it out: learning rates are read from the optimizer"
        elif isinstance(schedule, Mapping):
            hint = f"write gradwatch.Schedule({', '.join(f'{k}={v!r}' for k, v in schedule.items())})"
        text = f"got {_shown(schedule)}, expected a gradwatch.Schedule, the steps between two measurements"
        return [Problem(("schedule",), text, help=hint)]
    steps = ("updates", "activations", "histograms")
    found = [p for name in steps for p in _whole("schedule", getattr(schedule, name), least=0, field=name)]
    budget = schedule.budget
    if isinstance(budget, bool) or not isinstance(budget, Real) or not 0 <= budget <= 1:
        found.append(Problem(("schedule", "budget"), f"got {_shown(budget)}, expected a fraction from 0 to 1"))
    return found


def _record(record: Any, *, run: Any) -> list[Problem]:
    if isinstance(record, StepRecord):
        limits = {"every": 1, "memory_mb": 0, "incidents": 1}  # without memory, the state is not copied
        found = [p for name, n in limits.items() for p in _whole("record", getattr(record, name), least=n, field=name)]
    elif isinstance(record, bool):
        found = []
    else:
        found = [Problem(("record",), f"got {_shown(record)}, expected True, False or a StepRecord")]
    if record and run is None:
        text = "incidents are written into a run directory, and there is none; give run=..."
        found.append(Problem(("record",), text))
    return found


def _on_finding(on_finding: Any) -> list[Problem]:
    if on_finding is None or callable(on_finding) or (isinstance(on_finding, str) and on_finding in ("print", "raise")):
        return []
    near = did_you_mean(on_finding, ("print", "raise")).removeprefix("; ") if isinstance(on_finding, str) else ""
    text = f"got {_shown(on_finding)}, expected 'print', 'raise', a function or None"
    return [Problem(("on_finding",), text, help=near)]


def _existing_run(resume: Any, overwrite: Any, *, run: Any, is_sharded: bool) -> list[Problem]:
    found = []
    if not isinstance(resume, bool):
        found += _whole("resume", resume, least=0, others=" (the steps of your checkpoint), True or False")
    elif resume and is_sharded:
        text = "got True, expected the number of steps of your checkpoint: sharded processes must begin at one step"
        found.append(Problem(("resume",), text))
    if not isinstance(overwrite, bool):
        found.append(Problem(("overwrite",), f"got {_shown(overwrite)}, expected True or False"))
    if resume is not False and overwrite is True:
        found.append(Problem(("overwrite",), "a run that is replaced cannot be resumed", help="give one of them"))
    for name, value in (("resume", resume), ("overwrite", overwrite)):
        if value is True and run is None:  # a number alone is the first step of a history in memory
            found.append(Problem((name,), "there is no run directory", help="give run=..."))
    return found


def _whole(name: str, value: Any, *, least: int, others: str = "", field: str = "") -> list[Problem]:
    """Return the problem of a value that is not a whole number of at least `least`."""
    if isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least:
        return []
    hint = f"write {int(value)}" if isinstance(value, float) and value.is_integer() and value >= least else ""
    key: Key = (name, field) if field else (name,)
    return [Problem(key, f"got {_shown(value)}, expected a whole number of at least {least}{others}", help=hint)]


def _methods(name: str, value: Any, methods: Sequence[str], expected: str) -> list[Problem]:
    """Return the problem of a value that is not None and lacks methods."""
    if value is None or (not isinstance(value, type) and all(hasattr(value, method) for method in methods)):
        return []
    return [Problem((name,), f"got {_shown(value)}, expected {expected}")]


def _shown(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
        return text if len(text) <= MAX_VALUE_CHARS else f"{text[: MAX_VALUE_CHARS - 3]}..."
    return f"an object of type {type(value).__name__}"
