"""Put a monitor on a model: in the training loop of this package, and with `watch` in anybody's own."""

from __future__ import annotations

import datetime
import functools
import platform
import random
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradwatch._version import __version__
from gradwatch.detect import detectors
from gradwatch.errors import GradwatchError
from gradwatch.history.disk.header import Header, Status
from gradwatch.history.disk.writer import Writer, claim_free
from gradwatch.history.store import History
from gradwatch.incident.step_snapshot import StepRecord, StepSnapshotter
from gradwatch.monitor import Monitor, Schedule
from gradwatch.monitor.best_effort import switch_off
from gradwatch.pipeline.pipeline import Pipeline
from gradwatch.probe.activations.probe import ActivationProbe
from gradwatch.probe.device.dtensor import is_distributed
from gradwatch.probe.gradients.zero_grad import Leftovers
from gradwatch.probe.inspections import Facts
from gradwatch.probe.parameters import describe, named_modules
from gradwatch.records import ActivationInfo, Event, Finding, RunInfo
from gradwatch.render import Sink

PRECISION = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def watch(
    model: nn.Module | Mapping[str, nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    run: str | Path | None = None,
    scaler: torch.amp.GradScaler | None = None,
    accumulate: int = 1,
    loss_fn: Callable[..., Any] | None = None,
    total_steps: int | None = None,
    schedule: Schedule = Schedule(),  # noqa: B008 - frozen
    detect: Mapping[str, Mapping[str, Any]] | None = None,
    record: bool | StepRecord = False,
) -> Monitor:
    """Watch a model in your own loop; call `monitor.step(loss)` once per optimizer step, after it.

    That call may be the only one: gradients are read by the optimizer's own hooks. A loop that clips calls
    `monitor.observe()` before it clips, or hands over what clipping returned: `monitor.step(loss, grad_norm=norm)`.
    With several optimizers, `monitor.observe(optimizer)` says whose gradients are complete.

    Where parameters are spread over processes (FSDP2, tensor parallelism), each process watches, and reads the
    statistics of whole tensors: all of them must call this alike. What is sampled then keeps to the schedule at any
    cost, since all must measure at the same steps, and `record` is left out.

    The training stays what it was, to the last bit. Nothing that goes wrong here stops it: what raised, a full disk
    too, is named in one RuntimeWarning and left out. What is watched is settled by this call: parameters and groups
    that come later are not in the history, and a warning says so.

    Args:
        model: The model, or several by name (a GAN's generator and discriminator).
        optimizer: The optimizer that moves it, or several. Of a wrapper, such as that of Accelerate, what it wraps.
        run: Run directory to write, which `gradwatch diagnose` and TensorBoard read; None keeps the history in memory.
            Where it holds a run already, the next free name is taken (`mine-2`, `mine-3`) and named on stderr;
            `monitor.run_dir` is what was taken. Where torch.distributed is initialised, only rank 0 writes it, and all
            others keep their histories in memory, with None as their `run_dir`.
        scaler: The loop's GradScaler, if it has one.
        accumulate: Micro-batches per optimizer step. `monitor.step` may be called for each of them.
        loss_fn: The loss function: its name stands in the run, and where it is a module and the loop hands its loss
            over as a plain number, the tape is read behind it.
        total_steps: Planned optimizer steps, where known.
        schedule: When the sampled statistics are measured.
        detect: Thresholds by kind, as in a config's `detect` section.
        record: Keep what each step began with (batch, random states, weights, optimizer), and write it to
            `incidents/` of the run directory when something critical is found. It copies the model at every step, or
            as often as a `StepRecord` says.

    Returns:
        A monitor, to be closed: use it in a `with` statement, or call `close()`.

    Raises:
        GradwatchError: The run directory cannot be made, a parameter has no shape yet, or an optimizer takes no hooks.
    """
    if record and run is None:
        raise GradwatchError("record: incidents are written into a run directory, and there is none; give run=...")
    models = dict(model) if isinstance(model, Mapping) else {"": model}
    if is_sharded := any(is_distributed(param) for each in models.values() for param in each.parameters()):
        schedule = replace(schedule, budget=0.0)  # which each process would keep to by its own clock
    optimizers = [_bare(o) for o in ([optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer)]
    loss_scaling = scaler is not None and scaler.is_enabled()
    activations = _activations(models) if schedule.activations else None
    params, info = inspect(
        models,
        optimizers,
        activations=activations,
        name=Path(run).name if run else "watch",
        precision="fp16" if loss_scaling else _format(models),
        loss_scaling=loss_scaling,
        accumulate=accumulate,
        total_steps=total_steps,
        loss_fn=loss_fn,
    )
    directory = claim_free(Path(run)) if run and _is_first_rank() else None
    if directory:
        info = replace(info, name=directory.name)
    history = History(info, groups=sum(len(o.param_groups) for o in optimizers))
    pipeline, recorder = _pipeline(history, directory, detect)
    if activations:
        activations.find_functions(functools.partial(lay_out, history, pipeline, recorder))
    keeper = _keeper(record, directory, models, optimizers=optimizers, scaler=scaler, is_sharded=is_sharded)
    names = {param: layer.name for param, layer in zip(params, info.layers, strict=True)}
    leftovers = Leftovers(optimizers, pipeline.note, names=names)
    return Monitor(
        params,
        optimizers=optimizers,
        pipeline=pipeline,
        activations=activations,
        scaler=scaler,
        schedule=schedule,
        accumulate=accumulate,
        measure_clipped=True,
        facts=_facts(models, params, info, optimizers, loss_fn=loss_fn, activations=activations, leftovers=leftovers),
        hooks=[
            *_AutocastHook(functools.partial(_change_precision, history, recorder)).attach(models),
            *(keeper.attach() if keeper else ()),
        ],
        keeper=keeper,
        run_dir=directory,
    )


def _is_first_rank() -> bool:
    """Say whether this process writes a run directory: of the processes of one training, rank 0 does."""
    return not (dist.is_available() and dist.is_initialized() and dist.get_rank())


def _bare(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return what makes the updates: a wrapper such as Accelerate's is an optimizer that was never initialised as one.

    Raises:
        GradwatchError: It takes no hooks, and wraps nothing that does.
    """
    try:
        optimizer.register_step_pre_hook(_nothing).remove()
    except AttributeError:
        inner = getattr(optimizer, "optimizer", None)
        if isinstance(inner, torch.optim.Optimizer):
            return _bare(inner)
        name = type(optimizer).__name__
        raise GradwatchError(
            f"optimizer: {name} takes no hooks; have {name}.__init__ call that of torch.optim.Optimizer"
        ) from None
    return optimizer


def _nothing(*_: object) -> None:
    """Do nothing, as a hook."""


def _pipeline(
    history: History, directory: Path | None, detect: Mapping[str, Mapping[str, Any]] | None
) -> tuple[Pipeline, _Recorder | None]:
    """Return what takes in the rows, and what writes them down where there is a run directory."""
    asked = detectors(detect)
    if not directory:
        return Pipeline(history, detectors=asked, sinks=[], writer=None), None
    recorder = _Recorder(directory, history)
    return Pipeline(history, detectors=asked, sinks=_sinks(directory), writer=recorder), recorder


def inspect(
    models: Mapping[str, nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    activations: ActivationProbe | None,
    name: str,
    precision: str,
    loss_scaling: bool,
    accumulate: int,
    total_steps: int | None,
    loss_fn: Callable[..., Any] | None = None,
) -> tuple[list[Tensor], RunInfo]:
    """Return the parameters to watch, and what their history is a history of."""
    params, layers = describe(models, optimizers)
    info = RunInfo(
        name=name,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        layers=layers,
        activations=activations.infos if activations else (),
        precision=precision,
        loss_scaling=loss_scaling,
        accumulate=accumulate,
        optimizer="+".join(type(o).__name__ for o in optimizers),
        loss=_name(loss_fn),
        device=str(params[0].device) if params else "cpu",
        total_steps=total_steps,
        versions={
            "gradwatch": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    )
    return list(params), info


def _activations(models: Mapping[str, nn.Module]) -> ActivationProbe | None:
    """Return a probe of the models' activations, or None and a warning where they take no hooks."""
    try:
        return ActivationProbe(models)
    except Exception as error:  # a module of a kind that nobody here has seen; the gradients tell enough
        warnings.warn(
            f"gradwatch: the probe of activations is switched off: {type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=3,
        )
        return None


def _keeper(
    record: bool | StepRecord,
    directory: Path | None,
    models: Mapping[str, nn.Module],
    *,
    optimizers: Sequence[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler | None,
    is_sharded: bool,
) -> StepSnapshotter | None:
    """Return what keeps the beginning of each step, where that is asked for."""
    if not record or not directory:
        return None
    if is_sharded:  # a copy of the whole state takes all processes
        text = "no incident is recorded of a model whose parameters are spread over processes"
        warnings.warn(f"gradwatch: {text}", RuntimeWarning, stacklevel=3)
        return None
    settings = record if isinstance(record, StepRecord) else StepRecord()
    return StepSnapshotter(directory, models, optimizers=optimizers, scaler=scaler, settings=settings)


def _facts(
    models: Mapping[str, nn.Module],
    params: Sequence[Tensor],
    info: RunInfo,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    loss_fn: Callable[..., Any] | None,
    activations: ActivationProbe | None,
    leftovers: Leftovers,
) -> Facts | None:
    """Return a probe of tape and modes, or None and a warning where the model takes no hooks."""
    try:
        return Facts(
            models,
            params=params,
            layers=info.layers,
            optimizers=optimizers,
            loss_fn=loss_fn,
            recurrences=activations.recurrences if activations else None,
            pairings=activations.pairings if activations else None,
            leftovers=leftovers,
        )
    except Exception as error:  # as above
        text = f"the look at tape and modes is switched off: {type(error).__name__}: {error}"
        warnings.warn(f"gradwatch: {text}", RuntimeWarning, stacklevel=3)
        return None


def _name(loss_fn: Callable[..., Any] | None) -> str:
    """Return the name of a loss function: that of its class, or its own."""
    if loss_fn is None:
        return ""
    return str(getattr(loss_fn, "__name__", type(loss_fn).__name__))


def _sinks(directory: Path) -> list[Sink]:
    """Return what shows a run on disk. Importing it is put off until here, since rich draws a random number for it."""
    state = random.getstate()
    from gradwatch.render.report.sink import Html
    from gradwatch.render.tensorboard.sink import TensorBoard

    random.setstate(state)
    return [TensorBoard(directory=directory), Html(directory=directory)]


def _format(models: Mapping[str, nn.Module]) -> str:
    """Return the format of most parameters: that of the forward pass, unless autocast changes it."""
    counts = Counter(p.dtype for model in models.values() for p in model.parameters())
    return PRECISION.get(max(counts, key=lambda dtype: counts[dtype]), "fp32") if counts else "fp32"


@final
class _Recorder:
    """Writes a run down until that fails: then it says so once, and the training goes on.

    Args:
        directory: The run directory.
        history: What is written.

    Raises:
        RunError: The directory holds a run, or cannot be written.
    """

    def __init__(self, directory: Path, history: History) -> None:
        self.warned: set[str] = set()
        self._directory = directory
        self._history = history
        self._writer = Writer(directory, history)

    def append(self) -> None:
        """Write the newest step of the history."""
        self._attempt(self._writer.append)

    def report(self, finding: Finding) -> None:
        """Write a finding."""
        self._attempt(functools.partial(self._writer.report, finding))

    def note(self, event: Event) -> None:
        """Write an event."""
        self._attempt(functools.partial(self._writer.note, event))

    def close(self, status: Status) -> None:
        """Note how the run ended, and let go of its files."""
        self._attempt(functools.partial(self._writer.close, status), always=True)

    def lay_out(self) -> None:
        """Write down how the rows of the history lie."""
        self._attempt(self._writer.lay_out)

    def rewrite_header(self) -> None:
        """Write down again what the history is a history of."""
        self._attempt(lambda: Header.of(self._history, "running").write(self._directory))

    def _attempt(self, action: Callable[[], None], *, always: bool = False) -> None:
        if self.warned and not always:
            return
        try:
            action()
        except (GradwatchError, OSError) as error:
            switch_off(self, f"writing to {self._directory}", error)


@final
class _AutocastHook:
    """Looks once at each module, in its first training forward, for the format that autocast gives it.

    Args:
        tell: Called with that format, at most once.
    """

    def __init__(self, tell: Callable[[str], None] | None) -> None:
        self._tell = tell
        self._handles: dict[nn.Module, RemovableHandle] = {}

    def attach(self, models: Mapping[str, nn.Module]) -> list[RemovableHandle]:
        """Hook every module that has parameters, and return the hooks."""
        for _, module in named_modules(models):
            if next(module.parameters(recurse=False), None) is not None:
                self._handles[module] = module.register_forward_pre_hook(self)
        return list(self._handles.values())

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling() or not module.training or not torch.is_grad_enabled():
            return
        if (handle := self._handles.pop(module, None)) is None or self._tell is None:
            return
        handle.remove()
        kind = next(module.parameters(recurse=False)).device.type
        if torch.is_autocast_enabled(kind) and (seen := PRECISION.get(torch.get_autocast_dtype(kind))):
            self._tell(seen)
            self._tell = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _AutocastHook, (None,)  # copied or saved with the model, it does nothing


class LayoutWriter(Protocol):
    """Writes down how the rows of a history lie: see `gradwatch.history.disk.writer.Writer`."""

    def lay_out(self) -> None:
        """Write it down anew."""
        ...


def lay_out(
    history: History, pipeline: Pipeline, writer: LayoutWriter | None, activations: tuple[ActivationInfo, ...]
) -> bool:
    """Make room in a history for activations that showed in its first step; say whether there is any."""
    is_on_its_way = pipeline.next_step > history.step + 1  # a row
    has_room = not is_on_its_way and history.lay_out(activations)
    if has_room and writer:
        writer.lay_out()
    return has_room


def _change_precision(history: History, recorder: _Recorder | None, precision: str) -> None:
    """Correct what was assumed of the format of the forward pass."""
    if precision != history.info.precision:
        history.info = replace(history.info, precision=precision)
        if recorder:
            recorder.rewrite_header()
