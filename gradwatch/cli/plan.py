"""`gradwatch plan`: predict the memory of a training before it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from gradwatch.cli.command import suggest_set
from gradwatch.cli.options import ReportFormat, SetFileOption, SetOption, format_option
from gradwatch.cli.output.console import output, print_message, write_json
from gradwatch.cli.output.progress import progress_line
from gradwatch.errors import GradwatchError, RunError

if TYPE_CHECKING:
    from gradwatch.config.sections.root import Config
    from gradwatch.planning.advice import Advised
    from gradwatch.planning.determinism import DeterminismPrice
    from gradwatch.planning.result import Plan
    from gradwatch.planning.sharing import SharedPlan
    from gradwatch.planning.training import ConfigPlanner

DOES_NOT_FIT = 1


def command(
    config: Annotated[
        Path,
        typer.Argument(metavar="CONFIG|RUN", help="YAML file, or a run directory with --step.", show_default=False),
    ],
    overrides: SetOption = None,
    set_files: SetFileOption = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory that the training may take, such as `8GB` or `24GiB`; then the plan also names the largest "
            "batch that fits and the changes that save memory. By default, the limit is the memory of this machine.",
            show_default=False,
        ),
    ] = None,
    patch: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the cheapest change that fits the budget to FILE, for `train --set-file FILE`.",
            show_default=False,
        ),
    ] = None,
    num_ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            min=2,
            metavar="N",
            help="Also plan one of N ranks that share the training, for each way to share it (DDP, ZeRO 1 to 3); the "
            "budget is per rank.",
            show_default=False,
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also run two steps, and show the memory and the time that they take.")
    ] = False,
    deterministic: Annotated[
        bool,
        typer.Option("--deterministic", help="Also measure the cost of `run.deterministic`."),
    ] = False,
    step: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Instead, repeat step N of RUN, and show the memory and the time of each module.",
            show_default=False,
        ),
    ] = None,
    form: Annotated[
        ReportFormat,
        format_option("`text`, `json`, or with --step `html`, which adds it to the `report.html` of RUN."),
    ] = "text",
) -> None:
    """Predict how much memory a training needs, by part and by module, without training.

    Exit codes: 0 it fits, 1 it does not fit, 2 a mistake in the config.
    """
    from gradwatch.config.sizes import parse_size

    if step is not None or config.is_dir():
        options = (overrides, set_files, budget, patch, num_ranks, measure, deterministic)
        _print_recorded_step(config, step, form, is_alone=not any(options))
        return

    if form == "html":
        raise GradwatchError("--format: got html without a recorded step; name a run and add --step N")
    if (hint := suggest_set(str(config))) and not config.exists():
        raise GradwatchError(f"plan: got {config} as CONFIG, expected a YAML file{hint}")
    given = parse_size(budget, key="--budget") if budget else None
    if patch and not given:
        raise GradwatchError(f"--patch: got {patch} without a budget to fit; add --budget 8GB")
    from gradwatch.config.load import load_config

    load_config(config, overrides or [], changes=set_files or [], is_new=True)  # reports mistakes without torch

    import json

    from gradwatch.planning.checkpointing import KEY, settle
    from gradwatch.planning.determinism import price_of_determinism
    from gradwatch.planning.sharing import plan_ranks
    from gradwatch.planning.training import ConfigPlanner
    from gradwatch.probe.memory.in_use import machine_memory

    def load(changes: Mapping[str, Any]) -> Config:
        settings = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
        return load_config(config, [*(overrides or []), *settings], changes=set_files or [], is_new=True)

    planner = ConfigPlanner(load)
    if choice := settle(planner):
        print_message("note", f"{KEY}: {choice.text} ({json.dumps(choice.setting)})")
    plan = planner.plan()
    measured = planner.measure() if measure else None
    limit = given or machine_memory(plan.device)
    ways = plan_ranks(planner, num_ranks) if num_ranks else ()
    advised = _advised(planner, given, measured, hidden=form == "json") if given and not ways else None
    best = _cheapest(advised, ways, limit)
    if patch and best:
        _write_patch(best, patch, config, limit)
    found = _Found(plan, measured, price_of_determinism(planner) if deterministic else None, ways, advised)
    if form == "json":
        write_json(found.to_json())
    else:
        _print(found, best, patch, limit=limit, num_ranks=num_ranks or 1)
    raise typer.Exit(0 if _least_peak(plan, ways, planner) <= limit else DOES_NOT_FIT)


class _Found(NamedTuple):
    """The plans of a training, the price of determinism and the advice."""

    plan: Plan
    measured: Plan | None
    price: DeterminismPrice | None
    ways: Sequence[SharedPlan]
    advised: Advised | None

    def to_json(self) -> dict[str, Any]:
        further: dict[str, Any] = {"ranks": [way.to_json() for way in self.ways]} if self.ways else {}
        further |= {"determinism": self.price.to_json()} if self.price else {}
        further |= {"advice": self.advised.to_json()} if self.advised else {}
        return (self.measured or self.plan).to_json() | further


def _print_recorded_step(run: Path, step: int | None, form: str, *, is_alone: bool) -> None:
    """Print what a recorded step of a run needs, by part and by module.

    Raises:
        GradwatchError: There is no run or no step, or further options ask for the plan of a config.
    """
    if step is None:
        raise GradwatchError(f"plan: got the run {run} without a step; add --step N, or plan its config.yaml")
    if not run.is_dir():
        raise GradwatchError(f"--step: got {run} as RUN, expected a run directory")
    if not is_alone:
        raise GradwatchError("--step: repeats the step as it ran, without other options; plan the config.yaml instead")
    from gradwatch.planning.training import plan_step
    from gradwatch.probe.memory.in_use import machine_memory
    from gradwatch.replay.restore.restored_step import restore_step

    with restore_step(run, step) as restored:
        plan = plan_step(restored.training, restored.window, None)
    if form == "json":
        write_json(plan.to_json())
        return
    if form == "html":
        _write_module_table(run, step, plan)
        return
    from gradwatch.cli.output.plan import print_plan

    print_plan(output(), plan, limit=machine_memory(plan.device), measured=None)


def _write_module_table(run: Path, step: int, plan: Plan) -> None:
    """Put the modules of a step into the report of a run."""
    from gradwatch.cli.output.report import write_run_report
    from gradwatch.render.report.module_table import ModuleTable
    from gradwatch.run import load_run

    rows = plan.to_json()["modules"]
    ModuleTable(step=step, device=plan.device, peak_bytes=plan.peak_bytes, modules=rows).write(run)
    recorded = load_run(run)
    print_message("note", f"wrote {write_run_report(None, run, recorded.history, recorded.diagnoses)}")


class _Best(NamedTuple):
    """The cheapest change that fits: in words, as settings, and with its peak."""

    text: str
    changes: Mapping[str, Any]
    peak_bytes: int


def _cheapest(advised: Advised | None, ways: Sequence[SharedPlan], limit: int) -> _Best | None:
    """Return the cheapest change that fits, or else the first way to share that fits: they are sorted by price."""
    if advised and (best := advised.cheapest):
        return _Best(best.text, best.changes, best.peak_bytes)
    for way in ways:
        if way.sharing.setting and way.peak_bytes <= limit:
            return _Best(way.sharing.name, {"train.parallel": way.sharing.setting}, way.peak_bytes)
    return None


def _least_peak(plan: Plan, ways: Sequence[SharedPlan], planner: ConfigPlanner) -> int:
    """Return the peak that must fit: the peak of a rank with `train.parallel`, or with the best way if it is unset."""
    if not ways:
        return plan.peak_bytes
    parallel = planner.config.train.parallel
    named = [way.peak_bytes for way in ways if way.sharing.setting and parallel in ("none", way.sharing.setting)]
    return min(named or [way.peak_bytes for way in ways if way.sharing.setting])


def _print(found: _Found, best: _Best | None, patch: Path | None, *, limit: int, num_ranks: int) -> None:
    from gradwatch.cli.output.plan import print_advice, print_patch, print_plan, print_ranks

    plan, measured, price, ways, advised = found
    print_plan(output(), plan, limit=limit, measured=measured)
    if price:
        output().print(f"\n{price.text}")
    if ways:
        print_ranks(output(), ways, ranks=num_ranks, limit=limit)
    if advised:
        print_advice(output(), advised)
    if best or patch:
        text, changes = (best.text, best.changes) if best else ("", None)
        print_patch(output(), text, changes, patch, fits=plan.peak_bytes <= limit)
    for note in plan.notes:
        print_message("note", note)


def _advised(planner: ConfigPlanner, budget: int, measured: Plan | None, *, hidden: bool) -> Advised | None:
    """Return what fits into a budget, or None if each change would have to run."""
    from gradwatch.planning.advice import Advisor

    if not planner.plan().is_traced:
        print_message("note", "no changes are tried, because each would have to run")
        return None
    with progress_line(hidden=hidden) as progress:
        return Advisor(planner, budget, progress=progress, measured=measured).advise()


def _write_patch(best: _Best, path: Path, config: Path, limit: int) -> None:
    """Write the cheapest change that fits to a file."""
    from gradwatch.history.disk import atomic
    from gradwatch.render.common.config_patch import patch_yaml
    from gradwatch.render.common.format import shown_size

    lines = [
        f"# {best.text}: {shown_size(best.peak_bytes)} fits in {shown_size(limit)}",
        f"# Apply it: gradwatch train {config} --set-file {path}",
        patch_yaml(best.changes),
    ]
    try:
        atomic.replace(path, ("\n".join(lines) + "\n").encode())
    except RunError as error:
        raise RunError(f"--patch: {error}; choose another file") from error
