"""Run the training loop: wait for batches, step, evaluate, record, move the schedule, save, end."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch.optim import lr_scheduler

from gradwatch import catalogue
from gradwatch.config.sections.root import Config
from gradwatch.errors import GradwatchError, RunError
from gradwatch.events import MEMORY_PLANNED
from gradwatch.history.ending import Ending, Kind
from gradwatch.history.store import History
from gradwatch.paths import RUN_CONFIG
from gradwatch.records import Diagnosis
from gradwatch.render import LogFormat
from gradwatch.train import early_stop, resume_check
from gradwatch.train.data_position import Position, numbered
from gradwatch.train.evaluate import Evaluation, evaluate
from gradwatch.train.parallel import recording
from gradwatch.train.parallel.parts import StandIn
from gradwatch.train.parallel.ranks import Ranks, any_of, is_first, joined_ranks
from gradwatch.train.recovery import failures, incidents, recover
from gradwatch.train.recovery.interrupt import Interrupt
from gradwatch.train.reproducible import reproducible, seed_all
from gradwatch.train.session import Session
from gradwatch.train.step import Batch, StepResult
from gradwatch.train.training_state import TrainingState

UNWATCHED_EVERY = 10
"""Steps between two recorded rows if watching is off: enough for a curve, at almost no overhead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a training ended.

    Args:
        directory: The run directory.
        ending: `finished`, `early-stop`, `non-finite` (`train.on_nonfinite: stop`), `critical` (`train.on_critical`) or
            `interrupted` (to be resumed).
        history: Everything that was recorded.
        diagnoses: Diagnoses of the run, most severe first.
    """

    directory: Path
    ending: Kind
    history: History
    diagnoses: tuple[Diagnosis, ...]


Forecast = Callable[[TrainingState], int | None]
"""Returns the planned peak bytes of a step of a training that has ended, or None."""


def train(
    config: Config,
    *,
    resume: Path | None = None,
    directory: Path | None = None,
    log_format: LogFormat = "auto",
    forecast: Forecast | None = None,
) -> Outcome:
    """Train from a config with monitoring, and save everything to a run directory.

    Args:
        config: The run's config.
        resume: Run directory to continue from its last checkpoint, with bit-identical numbers.
        directory: Run directory from `new_directory`; by default, it is created.
        log_format: `auto`, `rich`, `plain` or `json`.
        forecast: Plans the memory of a step, for the summary; or None.

    Returns:
        How the training ended, with its history and diagnoses.

    Raises:
        GradwatchError: A mistake that the user can fix; everything saved before it is intact.
    """
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(joined_ranks(config.train))
        if config.run.deterministic:
            stack.enter_context(reproducible(config.run.seed))
        else:
            seed_all(config.run.seed)
        if config.train.threads:
            # a process-wide setting, so give the caller's number back
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(config.train.threads)
        stack.enter_context(failures.explained())
        directory = resume or _shared_directory(config, ranks, made=directory)
        before = resume_check.check(directory, config) if resume else None
        if not resume and is_first(ranks):
            # entered before the session's files, so that they are closed when the directory is removed
            stack.enter_context(failures.discarded_if_empty(directory))
        session = Session(config, directory, resume=resume is not None, log_format=log_format, stack=stack, ranks=ranks)
        if resume and is_first(ranks):
            # only after the session could be built: a config that fails must not replace the run's own
            resume_check.note(directory, config)
        stack.enter_context(failures.resumable(session))
        ended = early_stop.resumed_ending(session, then=before) if before else None
        ending = ended or run(session, stack.enter_context(Interrupt()))
        session.training.end_workers()
        # the last rows, which are examined only here, may still hold a critical finding
        incidents.handle_final_step(session)
        session.save(best=False)
        # after the last step, so that it delays none, and with everything saved
        if forecast and is_first(ranks) and (peak := forecast(session.training)):
            event = MEMORY_PLANNED.emit(step=session.progress.step - 1, values={"peak_bytes": peak})
            session.pipeline.add_event(event)
        diagnoses = session.close(ending)
        return Outcome(directory=directory, ending=ending.kind, history=session.pipeline.history, diagnoses=diagnoses)


def _shared_directory(config: Config, ranks: Ranks | None, *, made: Path | None) -> Path:
    """Return the given run directory, or the directory that rank 0 creates, with the config in it."""
    if made:
        if is_first(ranks):
            (made / RUN_CONFIG).write_text(config.to_yaml())  # its budget for activations has been replaced since
        return made
    if ranks is None:
        return new_directory(config)
    return Path(ranks.texts(str(new_directory(config)) if ranks.is_first else "")[0])


def new_directory(config: Config) -> Path:
    """Create and return a run directory, `<name>-<time>` in `run.out`, with the config in it."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    for suffix in itertools.chain([""], (f"-{i}" for i in itertools.count(2))):
        directory = config.run.out / f"{config.run.name}-{stamp}{suffix}"
        try:
            directory.mkdir(parents=True)
            (directory / RUN_CONFIG).write_text(config.to_yaml())
        except FileExistsError:
            continue  # two runs of one name within a second
        except OSError as error:
            raise RunError(f"run.out: cannot create {directory}: {error.strerror}; choose another folder") from error
        return directory
    raise AssertionError("itertools.count never ends")


class Stop(Protocol):
    """Requests an end before the planned end, such as `Interrupt`."""

    @property
    def requested(self) -> bool:
        """Whether the loop must end after the current step."""
        ...


def run(session: Session, interrupt: Stop) -> Ending:
    """Train until the planned end or an earlier reason to stop, and return how the training ended."""
    train, progress, recorder = session.config.train, session.progress, session.recorder
    session.model.train()
    if recorder and recorder.step is None:
        incidents.keep(session)  # before the first step, which may already fail
    for window, wait_s in _windows(session):
        began = time.perf_counter()
        result = session.stepper.run(window)
        step_s = wait_s + time.perf_counter() - began

        session.progress.elapsed_s += step_s
        session.training.advance(len(window))
        if is_first(session.ranks):
            recording.report_sources(session.pipeline, progress.step - 1, result.sources)
        at_end = progress.step == session.total_steps
        evaluation = _evaluation(session, at_end=at_end)
        if session.monitor or evaluation or at_end or (progress.step - 1) % UNWATCHED_EVERY == 0:
            _record(session, window, _statistics(session, result, evaluation, wait_s=wait_s, step_s=step_s))
        move_schedule(session.training, result, evaluation)  # after the row with the learning rate of this step

        stopping = _stop_reason(session, result, evaluation, is_interrupted=any_of(session.ranks, interrupt.requested))
        is_best = evaluation is not None and evaluation.loss < progress.best_val_loss
        progress.best_val_loss = evaluation.loss if evaluation and is_best else progress.best_val_loss
        if is_best and train.checkpoint.best is not False:
            session.save(best=True)
        elif not (at_end or stopping) and _checkpoint_due(session, evaluation):  # `train` saves once more at the end
            session.save(best=False)
        if stopping:
            return stopping
        # handling waits for the pipeline's worker thread, so only call it if there may be something to handle
        acts = recorder and (progress.step >= recorder.due or session.pipeline.unhandled_findings or not result.finite)
        if (acts or session.is_watchful) and _critical(session, finite=result.finite):
            return Ending(kind="critical", reason=f"train.on_critical is {train.on_critical}")
    return Ending(kind="finished")


def _critical(session: Session, *, finite: bool) -> bool:
    """Handle due snapshots and critical findings, and return whether the training must end."""
    found = incidents.handle_step(session, finite=finite)
    return any_of(session.ranks, bool(found or not finite) and recover.recover(session, found))


def _windows(session: Session) -> Iterator[tuple[list[Batch], float]]:
    """Yield the micro-batches of each optimizer step and the seconds of waiting for them."""
    progress, left_out = session.progress, 0
    while progress.step < session.total_steps:
        batches = iter(session.batches.epoch(progress.epoch, start=progress.batch))
        # a rewind moves the position in the data, so it needs a new iterator even within one epoch
        epoch, rewinds = progress.epoch, progress.rewinds
        while progress.epoch == epoch and progress.rewinds == rewinds and progress.step < session.total_steps:
            began = time.perf_counter()
            window = list(itertools.islice(batches, session.config.train.accumulate))
            if session.ranks and session.training.steps_per_epoch is None:
                # all ranks must run the same number of passes, and their parts of a stream may differ in length
                window = window[: int(min(row[0] for row in session.ranks.gather([len(window)])))]
            if not window:
                _end_pass(session)
                continue
            if progress.bad and _is_left_out(session, len(window)):
                left_out += 1
                # a whole epoch without a step: it would never end
                if left_out > (session.training.steps_per_epoch or 0):
                    raise GradwatchError(
                        "train.on_critical: every batch of the data has been skipped as bad; check the data and the "
                        f"findings: gradwatch diagnose {session.directory}"
                    )
                session.training.pass_batches(len(window))
                continue
            left_out = 0
            yield window, time.perf_counter() - began


def _is_left_out(session: Session, micro_batches: int) -> bool:
    progress = session.progress
    position = Position(epoch=progress.epoch, batch=progress.batch, length=micro_batches)
    return position.is_among(progress.bad, numbered(session.batches))


def _end_pass(session: Session) -> None:
    """Begin the next pass over a stream that has no more batches."""
    progress = session.progress
    if not progress.batch:
        raise GradwatchError(
            f"data: pass {progress.epoch} over the stream of {session.training.data.name} gave no batch; a stream must "
            "begin again at each call of its __iter__, and with drop_last it must fill a batch for each worker"
        )
    progress.epoch, progress.batch = progress.epoch + 1, 0


def _evaluation(session: Session, *, at_end: bool) -> Evaluation | None:
    """Evaluate if it is due: every `eval_every` steps, or after each epoch, and at the end."""
    every, progress = session.config.train.eval_every, session.progress
    due = progress.step % every == 0 if every else progress.batch == 0  # batch 0: an epoch has just ended
    return evaluate(session.stepper, session.validation) if session.validation and (due or at_end) else None


def _record(session: Session, window: Sequence[Batch], statistics: dict[str, float]) -> None:
    """Record the last step: with the monitor's statistics, or without layers if watching is off."""
    if session.monitor:
        inputs = window[0][0] if len(window) == 1 else [inputs for inputs, _ in window]
        if isinstance(window[0], StandIn):
            inputs = None  # no batch of this rank, so no other rank has it twice
        session.monitor.step(statistics["loss"], batch=inputs, statistics=statistics)
    else:
        no_layers_SL = np.empty((len(catalogue.PARAM), 0), np.float32)
        # progress.step is already the next step
        session.pipeline.feed(session.progress.step - 1, run=statistics, param_SL=no_layers_SL)


def _statistics(
    session: Session, result: StepResult, evaluation: Evaluation | None, *, wait_s: float, step_s: float
) -> dict[str, float]:
    """Return the loop's own statistics of a step, by their names in the catalogue."""
    known = {
        "loss": result.loss,
        "grad_norm.before_clip": result.norm,
        "grad_norm.after_clip": result.clipped_norm,
        "loss_scale": result.loss_scale,
        "skipped": float(result.skipped),
        "step_ms": 1e3 * step_s,
        "data_wait_ms": 1e3 * wait_s,
        "samples_per_s": result.samples / step_s,
        **{f"lr.{i}": float(group["lr"]) for i, group in enumerate(session.optimizer.param_groups)},
    }
    return known | {"val_loss": evaluation.loss, "val_accuracy": evaluation.accuracy} if evaluation else known


def move_schedule(training: TrainingState, result: StepResult, evaluation: Evaluation | None) -> None:
    """Advance the learning-rate schedule: after an update, after an epoch, or after an evaluation for a plateau."""
    schedule, per = training.schedule, training.config.schedule.per
    if schedule is None:
        return
    if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
        if evaluation:
            schedule.step(evaluation.loss)
    elif (training.progress.batch == 0) if per == "epoch" else not result.skipped:  # a schedule per step counts updates
        schedule.step()


def _stop_reason(
    session: Session, result: StepResult, evaluation: Evaluation | None, *, is_interrupted: bool
) -> Ending | None:
    if evaluation:
        early_stop.count(session, result, evaluation)  # also at an interrupt: the evaluation is not repeated
    if is_interrupted:
        return Ending(kind="interrupted")
    if not result.finite and session.config.train.on_nonfinite == "stop":
        return Ending(kind="non-finite", reason="the loss or a gradient was not finite, and train.on_nonfinite is stop")
    return early_stop.ending(session) if evaluation else None


def _checkpoint_due(session: Session, evaluation: Evaluation | None) -> bool:
    every = session.config.train.checkpoint.every
    return session.progress.step % every == 0 if every else evaluation is not None
