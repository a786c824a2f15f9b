"""Every example of the README and of docs/ runs, prints what the page shows, and names files that are there."""

import os
import re
import sys
from pathlib import Path

import pytest
import real_formats
import warm_python
from page_blocks import ROOT, blocks_of, run_page
from torchvision import datasets

from gradwatch import catalogue
from gradwatch.detect import detectors

README = ROOT / "README.md"
DOCS = sorted(path for path in (ROOT / "docs").rglob("*.md") if "generated" not in path.parts)
PAGES = [README, *DOCS]
KINDS = {detector.code: detector.kind for detector in detectors()}


def named(path):
    return str(path.relative_to(ROOT))


@pytest.fixture(scope="module")
def interpreter_of_ranks(tmp_path_factory):
    return warm_python.write_program(tmp_path_factory.mktemp("python"))


@pytest.fixture
def checkout(tmp_path, monkeypatch, interpreter_of_ranks):
    """Run in an empty folder that has the configs, and small files of MNIST and CIFAR in their real formats."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    real_formats.write_mnist(tmp_path / "data")
    real_formats.write_cifar(tmp_path / "data", monkeypatch, cls=datasets.CIFAR10)
    monkeypatch.chdir(tmp_path)
    # `python` on a page is the one of the environment
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("PYTHON_EXEC", str(interpreter_of_ranks))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "configs"]:
        monkeypatch.delitem(sys.modules, name)  # the folder of another page would be named in tracebacks
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)], ids=named)
def test_the_blocks_of_a_page_run_in_order(page, checkout):
    run_page(page, checkout)


def test_the_first_example_of_the_readme_runs_a_second_time(checkout, capsys):
    first = next(block.text for block in blocks_of(README) if block.language == "python")
    shown = next(text for text in re.findall(r"```text\n(.*?)```", README.read_text(), re.DOTALL))

    exec(compile(first, "README.md", "exec"), {})
    assert capsys.readouterr().err == shown
    exec(compile(first, "README.md", "exec"), {})

    assert sorted(path.name for path in Path("runs").iterdir()) == ["mine", "mine-2"]
    taken = "gradwatch: runs/mine already holds a run; this one is written to runs/mine-2\n"
    assert capsys.readouterr().err.count(taken) == 1


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 150
    assert len(README.read_bytes()) <= 10_000


def test_the_table_of_kinds_is_complete():
    page = (ROOT / "docs" / "reference" / "faults.md").read_text()

    assert dict(re.findall(r"^\| (GW\d+) \| ([a-z0-9-]+) \|", page, re.M)) == KINDS


def test_the_readme_names_every_kind():
    text = README.read_text()

    assert [kind for kind in KINDS.values() if kind not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_a_page_that_counts_the_kinds_of_faults_or_detectors_is_right(page):
    assert set(re.findall(r"\b(\d\d) (?:kinds of faults|detectors)\b", page.read_text())) <= {str(len(KINDS))}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_a_code_stands_next_to_the_kind_that_it_means(page):
    pairs = re.findall(r"^\| (GW\d{3}) \| ([a-z0-9-]+) \|", page.read_text(), re.M)

    assert [pair for pair in pairs if KINDS.get(pair[0]) != pair[1]] == []


def test_every_statistic_has_a_good_value():
    page = (ROOT / "docs" / "reference" / "statistics.md").read_text()
    names = [s.name for s in (*catalogue.PARAM, *catalogue.ACT, *catalogue.RUN)]

    assert [name for name in names if f"| `{name}` |" not in page] == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_file_that_a_page_names_is_there(page):
    text = page.read_text()
    files = re.findall(r"`((?:configs|scripts|tests|gradwatch)/[\w./-]+\.\w+)`", text)
    folders = re.findall(r"`((?:configs|scripts|tests)/[\w./-]+/)`", text)
    links = [link for link in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)", text) if "://" not in link]

    missing = [name for name in (*files, *folders) if not (ROOT / name).exists()]
    missing += [link for link in links if "generated/" not in link and not (page.parent / link).exists()]

    assert missing == []


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.yaml")), ids=named)
def test_a_page_shows_a_shipped_config_as_it_is(config):
    lines = [line for line in config.read_text().splitlines() if not line.startswith("#")]
    shown = [block.text for page in DOCS for block in blocks_of(page) if block.text.startswith(lines[0])]

    assert [text for text in shown if text.splitlines() != lines] == []
