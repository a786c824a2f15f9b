"""Watch training scripts of other projects with `gradwatch run`, and tell what it says of each.

    python scripts/studies/field_trial.py trial --bare                # which scripts run at all?
    python scripts/studies/field_trial.py trial                       # with and without gradwatch
    python scripts/studies/field_trial.py trial --only neuromancer    # those with that in their name

The scripts are listed in `field_trial.yaml`. Each is taken from the source distribution of its project, or from its
repository on GitHub, and is unedited but for the replacements listed there: paths, sizes and numbers of epochs. The
folder `trial` gets the sources, a virtual environment, the run directories, the output, and the table as `table.json`
and `table.md`. A script that the table has is not run again.

The environment sees the packages of the Python that runs this study, which needs torch, torchvision, pandas,
scikit-learn and gradwatch. The projects are imported from their sources. PyPI must be reachable, and GitHub for files
of a repository that are not in `trial/downloads/OWNER/NAME`. `{data}` in a command or a replacement stands for a folder
in which `MNIST` holds the digits of scikit-learn, in the format of torchvision.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import site
import struct
import subprocess
import sys
import tarfile
import urllib.parse
import urllib.request
import venv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import gradwatch
from gradwatch.records import Finding, Severity

LIST = Path(__file__).with_suffix(".yaml")

GITHUB = "https://raw.githubusercontent.com"
"""Address of the files of public repositories."""

GRACE_S = 20
"""Time that a script gets to end after an interrupt, as Ctrl-C sends it."""

VARIABLES = {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled"}
"""Environment of every script: one thread, no window, no GPU, no upload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One script of a project.

    Args:
        command: What stands after `python`: a file and its arguments, or `-m` and a module.
        folder: Working directory in the source distribution.
        edits: Texts to replace and what replaces them, by file.
        variables: Environment variables.
        seconds: Time limit, after which the script is interrupted.
        false_alarms: Why a warning was judged false, by kind.
        true_findings: Why a warning was judged true, by kind.
    """

    command: tuple[str, ...]
    folder: str = "."
    edits: dict[str, dict[str, str]] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    seconds: float = 240
    false_alarms: dict[str, str] = field(default_factory=dict)
    true_findings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A project on PyPI, or a repository on GitHub.

    Args:
        package: Requirement of its source distribution, such as `pykeen==1.11.1`, or empty for a repository.
        repository: Owner and name on GitHub, such as `pytorch/examples`, or empty for a package.
        commit: Commit of the repository, 40 hexadecimal digits.
        files: Paths of the files to take from the repository.
        install: Requirements of its scripts, without the package.
        source: Folder of its modules in the source distribution.
        scripts: Its scripts, by a name for the table.
    """

    package: str = ""
    repository: str = ""
    commit: str = ""
    files: tuple[str, ...] = ()
    install: tuple[str, ...]
    source: str
    scripts: dict[str, Script]

    @property
    def label(self) -> str:
        """The name without the version."""
        return self.repository or self.package.split("=")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was seen of a script.

    Args:
        script: Project and name.
        bare_exit: Exit code without gradwatch.
        bare_s: CPU time without gradwatch, in seconds.
        exit: Exit code with gradwatch, or None if it was not run.
        watched_s: CPU time with gradwatch, in seconds.
        steps: Recorded optimizer steps of all runs of the script.
        findings: Kind, severity, step and layers of each finding that was not withdrawn.
        false_alarms: Kinds of warnings that were judged false.
        unjudged: Kinds of warnings that were not judged.
    """

    script: str
    bare_exit: int
    bare_s: float
    exit: int | None = None
    watched_s: float = 0.0
    steps: int = 0
    findings: list[dict[str, Any]] = field(default_factory=list)
    false_alarms: list[str] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the scripts of a project run.

    Args:
        folder: Folder of the trial.
        root: Folder of the project's sources.
        source: Folder of its modules.
        python: Python of the environment.
    """

    folder: Path
    root: Path
    source: Path
    python: Path

    @property
    def data(self) -> Path:
        """The folder with MNIST."""
        return self.folder / "data"


def read_list(path: Path) -> list[Project]:
    """Read the projects and their scripts."""
    return [
        Project(
            package=entry.get("package", ""),
            repository=entry.get("repository", ""),
            commit=entry.get("commit", ""),
            files=tuple(entry.get("files", ())),
            install=tuple(entry["install"]),
            source=entry.get("source", "."),
            scripts={
                name: Script(**script | {"command": tuple(script["command"])})
                for name, script in entry["scripts"].items()
            },
        )
        for entry in yaml.safe_load(path.read_text())["projects"]
    ]


def write_digits(folder: Path) -> None:
    """Write the digits of scikit-learn as torchvision expects MNIST, 28 pixels wide."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.kron(digits.images * 15.9, np.ones((3, 3))).astype(np.uint8)
    images, labels = np.pad(images, ((0, 0), (2, 2), (2, 2))), digits.target.astype(np.uint8)
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for part, rows in (("train", slice(0, 1500)), ("t10k", slice(1500, None))):
        for name, array in (("images-idx3", images[rows]), ("labels-idx1", labels[rows])):
            head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (raw / f"{part}-{name}-ubyte").write_bytes(head + array.tobytes())


def unpack(project: Project, folder: Path) -> Path:
    """Download the source distribution of a project, and return the folder of its files."""
    target, download = folder / "sources" / project.label, folder / "downloads" / project.label
    if not download.exists():
        options = ["--no-deps", "--no-binary", ":all:", "--dest", str(download)]
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", *options, project.package], check=True)
    (archive,) = download.iterdir()
    shutil.rmtree(target, ignore_errors=True)  # an earlier trial replaced texts in them
    with tarfile.open(archive) as tar:
        # Python before 3.11.4 has no filters
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(target)
    (root,) = target.iterdir()
    return root


def copy_files(project: Project, folder: Path) -> Path:
    """Copy the files of a repository, download those that are missing first, and return the folder of the copies."""
    target, download = folder / "sources" / project.label, folder / "downloads" / project.label
    for name in project.files:
        path = download / name
        if not path.exists():
            address = f"{GITHUB}/{project.repository}/{project.commit}/{urllib.parse.quote(name)}"
            path.parent.mkdir(parents=True, exist_ok=True)
            with urllib.request.urlopen(address) as answer:
                path.write_bytes(answer.read())
    shutil.rmtree(target, ignore_errors=True)  # an earlier trial replaced texts in them
    shutil.copytree(download, target)
    return target


def make_environment(projects: Sequence[Project], folder: Path) -> Path:
    """Make an environment that sees the packages of the Python that runs this, and return its Python."""
    target = folder / "environment"
    python = target / "bin" / "python"
    if not python.exists():
        venv.create(target, with_pip=False)
        (packages,) = (target / "lib").glob("python*/site-packages")
        lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
        (packages / "outer.pth").write_text("\n".join(lines))
    needed = {requirement for project in projects for requirement in project.install}
    installed = target / "installed.txt"
    missing = needed.difference(installed.read_text().splitlines() if installed.exists() else ())
    if missing:
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
        subprocess.run([*pip, *sorted(missing)], check=True)
        installed.write_text("\n".join(sorted(needed)))
    return python


def adapt(script: Script, place: Place) -> None:
    """Replace the listed texts in fresh sources.

    Raises:
        ValueError: A text to replace is not in its file.
    """
    for name, edits in script.edits.items():
        path = place.root / name
        text = path.read_text()
        for old, new in edits.items():
            if old not in text:
                raise ValueError(f"{path}: got no {old!r} to replace; check the edits in {LIST.name}")
            text = text.replace(old, new.replace("{data}", str(place.data)))
        path.write_text(text)


def run(script: Script, place: Place, *, before: Sequence[str], log: Path) -> tuple[int, float]:
    """Run a script, interrupt it at its time limit, and return its exit code and the CPU time that it took.

    Args:
        script: What to run.
        place: Where.
        before: What stands before its command.
        log: File for its output.
    """
    start = os.times()
    command = [word.replace("{data}", str(place.data)) for word in script.command]
    paths = {
        "PATH": f"{place.python.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{place.source}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*before, *command],
            cwd=place.root / script.folder,
            env=os.environ | VARIABLES | paths | script.variables,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a signal reaches the script behind its launcher, too
        )
        for wait_s, number in ((script.seconds, signal.SIGINT), (GRACE_S, signal.SIGKILL)):
            try:
                process.wait(wait_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, number)
        code, end = process.wait(), os.times()
    used = (end.children_user, end.children_system), (start.children_user, start.children_system)
    return code, sum(used[0]) - sum(used[1])


def read_runs(directory: Path) -> tuple[int, list[Finding]]:
    """Return the recorded steps and the findings of all runs of a script."""
    runs = [gradwatch.load_run(path) for path in sorted(directory.glob("*")) if (path / "run.json").exists()]
    return sum(run.step + 1 for run in runs), [finding for run in runs for finding in run.findings]


def run_bare(name: str, script: Script, place: Place) -> Row:
    """Run a script without gradwatch."""
    code, seconds = run(script, place, before=[str(place.python)], log=place.folder / "logs" / f"{name}.bare.log")
    return Row(script=name, bare_exit=code, bare_s=seconds)


def run_watched(bare: Row, script: Script, place: Place) -> Row:
    """Run a script with gradwatch, and return what was seen of it."""
    runs = place.folder / "runs" / bare.script
    shutil.rmtree(runs, ignore_errors=True)
    watch = [str(place.python), "-m", "gradwatch", "run", "--run", str(runs / "run"), "--", "python"]
    code, seconds = run(script, place, before=watch, log=place.folder / "logs" / f"{bare.script}.log")
    steps, findings = read_runs(runs)
    loud = {finding.kind for finding in findings if finding.severity >= Severity.WARNING}
    return replace(
        bare,
        exit=code,
        watched_s=seconds,
        steps=steps,
        findings=[finding.to_json() for finding in findings],
        false_alarms=sorted(loud & script.false_alarms.keys()),
        unjudged=sorted(loud - script.false_alarms.keys() - script.true_findings.keys()),
    )


def wilson(hits: int, of: int, z: float = 1.96) -> tuple[float, float]:
    """Return the interval of Wilson for a rate, at 95 % by default."""
    centre, spread = hits + z * z / 2, z * math.sqrt(hits * (of - hits) / of + z * z / 4)
    return (centre - spread) / (of + z * z), (centre + spread) / (of + z * z)


def format_row(row: Row) -> str:
    """Return a row of the table in Markdown."""
    if row.exit is None:
        return f"| {row.script} | | {row.bare_exit} | {row.bare_s:.0f} s | | |"
    told: dict[bool, set[str]] = {False: set(), True: set()}
    for finding in row.findings:
        severity = finding["severity"]
        told[severity == "info"].add(f"`{finding['kind']}`" + ", critical" * (severity == "critical"))
    kinds = " | ".join("; ".join(sorted(told[is_info])) for is_info in (False, True))
    code = str(row.exit) if row.exit == row.bare_exit else f"{row.exit} instead of {row.bare_exit}"
    cost = f"{row.watched_s:.0f} s, {row.watched_s / row.bare_s:.2f}x"
    return f"| {row.script} | {row.steps:,} | {code} | {cost} | {kinds} |"


def format_table(rows: Sequence[Row]) -> str:
    """Return the table in Markdown, and the rate of watched scripts with a false alarm."""
    lines = ["| script | steps | exit code | CPU time | warnings | for information |", "|---|---|---|---|---|---|"]
    lines += [format_row(row) for row in rows]
    watched = [row for row in rows if row.steps]
    if watched:
        false = sum(bool(row.false_alarms) for row in watched)
        unjudged = sum(bool(row.unjudged) for row in watched)
        low, high = wilson(false, len(watched))
        rate = f"{false / len(watched):.0%} [{low:.0%}, {high:.0%}]"
        lines += ["", f"{false} of {len(watched)} scripts had a false alarm: {rate}. {unjudged} have one to judge."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the scripts, and write the table after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the sources, environments, runs and the table")
    parser.add_argument("--list", type=Path, default=LIST, help="scripts to run")
    parser.add_argument("--only", default="", help="part of the name of a project or script")
    parser.add_argument("--bare", action="store_true", help="run them without gradwatch only")
    parser.add_argument("--each", type=int, help="number of scripts of each project, the first ones")
    asked = parser.parse_args()
    folder: Path = asked.folder.resolve()
    write_digits(folder / "data")
    table = folder / "table.json"
    rows = {row["script"]: Row(**row) for row in json.loads(table.read_text())} if table.exists() else {}
    projects = read_list(asked.list)
    python = make_environment(projects, folder)
    for project in projects:
        chosen = {f"{project.label}/{name}": script for name, script in project.scripts.items()}
        chosen = {name: script for name, script in list(chosen.items())[: asked.each] if asked.only in name}
        if not chosen:
            continue
        root = copy_files(project, folder) if project.repository else unpack(project, folder)
        place = Place(folder=folder, root=root, source=root / project.source, python=python)
        for name, script in chosen.items():
            adapt(script, place)
            if name not in rows:
                rows[name] = run_bare(name, script, place)
            if rows[name].exit is None and not asked.bare:
                rows[name] = run_watched(rows[name], script, place)
            print(format_row(rows[name]), flush=True)
            table.write_text(json.dumps([asdict(row) for row in rows.values()], indent=1))
    (folder / "table.md").write_text(format_table(list(rows.values())))


if __name__ == "__main__":
    main()
