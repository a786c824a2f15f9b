"""`gradwatch list`: what a config can name, for people and for pipes."""

import pytest

from gradwatch import catalogue
from gradwatch.cli.list import MAX_SHOWN


def rows(result):
    return {line.split("\t")[0]: line.split("\t")[1:] for line in result.out.splitlines()}


@pytest.mark.parametrize(
    ("what", "name", "keyword"),
    [
        ("models", "resnet18", "num_classes=1000"),
        ("data", "MNIST", "download=false"),
        ("transforms", "RandomCrop", "size"),
        ("optimizers", "AdamW", "betas=[0.9, 0.999]"),
        ("schedules", "StepLR", "step_size gamma=0.1"),
        ("losses", "CrossEntropyLoss", "label_smoothing=0.0"),
        ("sinks", "terminal", "every="),
    ],
)
def test_a_pipe_gets_a_line_for_each_name_with_its_keywords(gradwatch, what, name, keyword):
    result = gradwatch("list", what)

    assert result.code == 0
    assert keyword in rows(result)[name][0]
    assert rows(result)[name][1], "what it is"


def test_without_a_name_it_says_what_can_be_listed(gradwatch):
    result = gradwatch("list")

    assert result.code == 0
    assert rows(result)["gradwatch list optimizers"] == ["Names for `optim.name` in a config."]
    assert all(gradwatch(*command.split()[1:]).code == 0 for command in rows(result))


def test_what_cannot_be_used_says_why(gradwatch):
    assert rows(gradwatch("list", "losses"))["CTCLoss"][1].startswith("not usable here: takes 4 inputs")


def test_detectors_are_listed_with_their_codes(gradwatch):
    assert any(name.startswith("dead-layer GW") for name in rows(gradwatch("list", "detectors")))


def test_statistics_are_those_of_the_catalogue(gradwatch):
    names = [s.name for s in (*catalogue.PARAM, *catalogue.ACT, *catalogue.RUN)]

    assert list(rows(gradwatch("list", "statistics"))) == names


def test_a_terminal_gets_a_table_with_a_head(gradwatch, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")

    out = gradwatch("list", "statistics").out

    assert "meaning" in out.splitlines()[1]
    assert "\t" not in out
    assert "0..1" in out


def test_a_terminal_gets_a_few_of_many_settings_and_a_pipe_gets_all(gradwatch, monkeypatch):
    piped = next(line for line in gradwatch("list", "detectors").out.splitlines() if "GW102" in line)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "300")

    shown = next(line for line in gradwatch("list", "detectors").out.splitlines() if "GW102" in line)

    assert piped.count("=") - MAX_SHOWN == int(shown.split(" and ")[1].split(" more")[0])
    assert shown.count("=") == MAX_SHOWN
