"""What holds for every detector alike: its examples, its manual page, and what it may not depend on."""

import ast
import dataclasses
import inspect
import itertools
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from gradwatch import detect
from gradwatch.detect import Detector, detectors
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic

ALL = detectors()
SECTIONS = (
    "What it measures:",
    "Why it matters:",
    "Example:",
    "What to do:",
    "When it is wrong:",
    "How it is detected:",
    "Source:",
    "Args:",
)
MAX_USER_LINES = 12
"""Lines of a manual page for people who have the problem, before the algorithm."""

BOUND = re.compile(r"(MIN|MAX|CRITICAL)_\w+|\w+_(FRAC|RATIO|FACTOR|DECADES|GROWTH)")
"""Name of a constant that a measured quantity is compared with."""

NO_BOUNDS = {
    "LATE_FACTOR": "how often detectors run",
    "MIN_TREND_STEPS": "a line fits two steps exactly",
    "MIN_WAIT_STEPS": "the sum of two lengths of windows",
}
"""Constants with the name of a bound, and the facts that they are."""

each = pytest.mark.parametrize("detector", ALL, ids=lambda d: d.kind)


@cache
def examples_of(detector):
    """Return the examples of a detector, which are made once, by the process that runs these tests."""
    return tuple(type(detector).examples())


@pytest.fixture(scope="module")
def findings(replay):
    """Return each example of a detector and what is found in it, step by step."""

    @cache
    def replayed(detector):
        return [(example, replay(example.history, [type(detector)()])) for example in examples_of(detector)]

    return replayed


@each
def test_a_detector_says_of_its_examples_what_they_want(detector, findings):
    for example, found in findings(detector):
        named = {name for f in found for name in f.names or (None,)}
        assert sorted(map(str, named)) == sorted(map(str, example.layers)), (example.name, [f.message for f in found])
        assert {f.kind for f in found} <= {detector.kind}, f"{example.name}: a detector speaks of its own symptom only"
        assert {f.code for f in found} <= {detector.code}, example.name


@each
def test_examples_fire_and_stay_quiet(detector):
    examples = examples_of(detector)

    assert any(e.layers for e in examples), "no example shows the fault"
    assert any("healthy" in e.name for e in examples), "no example shows a healthy run"
    assert sum(not e.layers for e in examples) >= 3, "near misses are missing"
    assert len({e.name for e in examples}) == len(examples)


@each
def test_findings_carry_evidence_and_one_sentence(detector, findings):
    for finding in itertools.chain.from_iterable(found for _, found in findings(detector)):
        assert finding.evidence, "a finding without numbers proves nothing"
        assert all(isinstance(q.value, float) for q in finding.evidence), "numbers of evidence are plain floats"
        assert finding.message, "a finding says something"
        assert not finding.message.endswith("."), "a message has no full stop: renderers add what follows"
        assert len(finding.message) < 160, f"too long for one line: {finding.message}"
        # as text: since Python 3.13 dataclasses compare field by field, and a NaN of the evidence differs from itself
        assert repr(finding.from_json(finding.to_json())) == repr(finding)


@each
def test_the_docstring_is_a_manual_page(detector):
    page = inspect.getdoc(type(detector)) or ""
    sections = [s for s in SECTIONS if s != "Args:" or dataclasses.fields(detector)]
    places = [page.find(section) for section in sections]

    assert -1 not in places, f"{detector.kind} lacks {[s for s, p in zip(sections, places, strict=True) if p < 0]}"
    assert places == sorted(places), f"the sections of {detector.kind} are out of order"
    assert "http" in page[page.index("Source:") :], "a source is a link"


@each
def test_a_manual_page_begins_with_a_short_part_for_users_that_shows_the_mistake(detector):
    page = inspect.getdoc(type(detector)) or ""
    user_part = [line for line in page.partition("How it is detected:")[0].splitlines() if line]
    example = page.partition("Example:")[2].partition("What to do:")[0]

    assert len(user_part) <= MAX_USER_LINES, "the algorithm belongs below 'How it is detected'"
    assert example.count("`") >= 2, "an example is code"


@each
def test_every_threshold_is_explained_with_its_default_and_a_reason(detector):
    page = (inspect.getdoc(type(detector)) or "").partition("Args:")[2]
    texts = dict(re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", page, flags=re.MULTILINE))

    assert list(texts) == [f.name for f in dataclasses.fields(detector)], "fields and their explanations differ"
    for field in dataclasses.fields(detector):
        number = f"{field.default:g}".replace("e-05", "e-5")
        assert f" {number}: " in " ".join(texts[field.name].split()), (
            f"{detector.kind}.{field.name}: '{number}: reason'"
        )


@each
def test_every_setting_is_read(detector):
    source = inspect.getsource(type(detector))
    unread = {field.name for field in dataclasses.fields(detector) if not re.search(rf"self\.{field.name}\b", source)}

    assert unread <= {"every", "patience"}, "the pipeline reads these two; no other setting may be without effect"


def test_a_bound_is_a_setting_of_its_detector():
    folder = Path(detect.__file__).parent
    constants = [
        (str(path.relative_to(folder)), target.id)
        for path in sorted(folder.rglob("*.py"))
        if "features" not in path.parts  # several detectors share these
        for statement in ast.parse(path.read_text()).body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
        if isinstance(target, ast.Name)
    ]
    bounds = [(path, name) for path, name in constants if BOUND.fullmatch(name.lstrip("_"))]

    assert [(path, name) for path, name in bounds if name not in NO_BOUNDS] == [], (
        "make it a field of the detector, so that a config can change it"
    )
    assert NO_BOUNDS.keys() <= {name for _, name in bounds}, "exceptions that are no longer needed"


def test_codes_and_kinds_are_unique():
    assert len({d.code for d in ALL}) == len(ALL)
    assert len({d.kind for d in ALL}) == len(ALL)


@each
def test_a_kind_is_spelt_the_same_everywhere(detector):
    cls = type(detector)

    assert cls.__module__.rpartition(".")[2] == cls.kind.replace("-", "_")
    assert cls.__name__ == "".join(part.capitalize() for part in cls.kind.split("-"))
    assert isinstance(detector, Detector)


@each
def test_the_same_history_gives_the_same_findings_twice(detector):
    for example in examples_of(detector):
        asked = type(detector)()
        first = list(asked.detect(example.history))

        assert list(asked.detect(example.history)) == first, f"{example.name}: a detector has no memory of its own"
        assert list(type(detector)().detect(example.history)) == first, example.name


@pytest.mark.parametrize("detector", [d for d in ALL if d.kind != "fp16-underflow"], ids=lambda d: d.kind)
def test_gradients_in_other_units_give_the_same_findings(detector, findings, replay):
    for number, (example, found) in enumerate(findings(detector)):
        wanted = {(f.layer, f.step) for f in found}
        for exponent in (-20, 20) if found else (-20 if number % 2 else 20,):  # near misses are many
            scaled = _rescaled(example.history, 2.0**exponent)

            assert {(f.layer, f.step) for f in replay(scaled, [detector])} == wanted, (example.name, exponent)


def _rescaled(history: History, factor: float) -> History:
    """Return the history of the same run with a loss that is `factor` times as large, under an optimizer like Adam."""
    copy = History(history.info, groups=history.groups)
    copy.ending = history.ending
    steps_T, param_TSL = history.param.rows()
    _, run_TSL = history.run.rows()
    act_steps_T, act_TSL = history.act.rows()
    act_row = {int(step): row for row, step in enumerate(act_steps_T)}
    sized = [history.param.statistics.index(n) for n in ("grad.l2", "grad.absmax", "grad.mean", "grad.std")]
    norms = [
        history.run.statistics.index(n) for n in ("grad_norm.before_clip", "grad_norm.after_clip", "loss", "val_loss")
    ]
    param_TSL[:, sized] *= factor
    run_TSL[:, norms] *= factor
    for t, step in enumerate(steps_T.tolist()):
        row = dict(zip(history.run.statistics, run_TSL[t, :, 0].tolist(), strict=True))
        copy.append(step, run=row, param_SL=param_TSL[t], act_SL=act_TSL[act_row[step]] if step in act_row else None)
    scaled = {"nat": factor}
    copy.events.extend(
        dataclasses.replace(e, values={name: scaled.get(name, 1.0) * value for name, value in e.values.items()})
        for e in history.events
    )
    return copy


# layer-imbalance leaves the output layer out; no-gradient takes numbered layers behind others for experts
ORDERED = {"vanishing-gradient", "exploding-gradient", "dead-layer", "non-finite", "not-optimized", "no-gradient"}
ORDERED |= {"poor-initialization"}  # small weights lose the signal on its way to the output layer
UNORDERED = [d for d in ALL if d.kind not in ORDERED and d.kind != "layer-imbalance"]


@pytest.mark.parametrize("detector", UNORDERED, ids=lambda d: d.kind)
def test_the_order_of_layers_does_not_matter_where_depth_does_not(detector, findings, replay):
    for example, found in findings(detector):
        order = np.random.default_rng(3).permutation(len(example.history.info.layers))
        shuffled = _permuted(example.history, order)
        wanted = {(f.layer, f.step) for f in found}

        assert {(f.layer, f.step) for f in replay(shuffled, [detector])} == wanted, example.name


def _permuted(history: History, order: np.ndarray) -> History:
    infos = tuple(history.info.layers[i] for i in order)
    copy = History(dataclasses.replace(history.info, layers=infos), groups=history.groups)
    copy.ending = history.ending
    steps_T, param_TSL = history.param.rows()
    _, run_TSL = history.run.rows()
    act_steps_T, act_TSL = history.act.rows()
    act_row = {int(step): row for row, step in enumerate(act_steps_T)}
    for t, step in enumerate(steps_T.tolist()):
        row = dict(zip(history.run.statistics, run_TSL[t, :, 0].tolist(), strict=True))
        act_SL = act_TSL[act_row[step]] if step in act_row else None
        copy.append(step, run=row, param_SL=param_TSL[t][:, order], act_SL=act_SL)
    copy.events.extend(history.events)
    return copy


def _skips(made: Synthetic) -> None:
    made.info = dataclasses.replace(made.info, loss_scaling=True, precision="fp16")
    made.skipped_T[:6], made.nonfinite_TL[:6], made.grad_l2_TL[:6] = 1, 3, np.nan
    made.loss_scale_T = 65536 * 0.5 ** np.cumsum(made.skipped_T)


def _in_turn(made: Synthetic) -> None:
    off_T = made.rng.random(made.steps) < 0.5
    for values_TL in (made.grad_l2_TL, made.zero_frac_TL, made.nonfinite_TL):
        values_TL[off_T, -1], values_TL[~off_T, -2] = np.nan, np.nan


def _converges(made: Synthetic) -> None:
    made.grad_l2_TL *= 10 ** (-4 * made.t_T / made.steps)[:, None]
    made.loss_T *= 10 ** (-6 * made.t_T / made.steps)


def _curriculum(made: Synthetic) -> None:
    made.grad_l2_TL[150:] *= 3
    made.loss_T[150:] *= 3


def _zero_init(made: Synthetic) -> None:
    made.grad_l2_TL[0, 1:-1], made.zero_frac_TL[0, 1:-1] = 0, 1


def _scheduled(factor_T):
    def schedule(made: Synthetic) -> None:
        made.lr_T = made.lr_T * factor_T(made.t_T / made.steps)

    return schedule


def _nothing(made: Synthetic) -> None:
    pass


LOOKALIKES = {
    "plain": (_nothing, {}),
    "noise of tiny batches": (_nothing, {"noise": 1.2}),
    "SGD": (_nothing, {"optimizer": "SGD", "lr": 0.1}),
    "fp16 with a scaler": (_skips, {}),
    "activations": (_nothing, {"activations": 4}),
    "forty layers": (_nothing, {"layers": 40}),
    "two layers": (_nothing, {"layers": 2}),
    "warm-up": (_scheduled(lambda x_T: np.minimum(1, 4 * x_T + 0.01)), {}),
    "cosine to zero": (_scheduled(lambda x_T: (1 + np.cos(np.pi * x_T)) / 2), {}),
    "milestones": (_scheduled(lambda x_T: 10.0 ** -np.floor(x_T * 3)), {}),
    "restarts": (_scheduled(lambda x_T: (1 + np.cos(np.pi * (4 * x_T % 1))) / 2), {}),
    "heads in turn": (_in_turn, {}),
    "convergence": (_converges, {}),
    "a curriculum": (_curriculum, {}),
    "branches that start at zero": (_zero_init, {}),
}


@pytest.mark.parametrize("lookalike", LOOKALIKES)
@pytest.mark.parametrize("seed", range(3))
def test_healthy_runs_raise_no_alarm(lookalike, seed, replay):
    edit, arguments = LOOKALIKES[lookalike]
    made = Synthetic(steps=300, seed=seed, **arguments)
    edit(made)

    assert replay(made.history(), ALL) == (), "a false alarm"


def test_nothing_is_said_before_there_is_anything():
    empty = next(iter(Synthetic(steps=1).replay()))

    assert list(itertools.chain.from_iterable(d.detect(empty) for d in ALL)) == []


def test_a_model_without_parameters_is_no_trouble(replay):
    made = Synthetic(steps=40, layers=1, activations=1)
    made.info = dataclasses.replace(made.info, layers=(dataclasses.replace(made.info.layers[0], trainable=False),))
    made.no_gradient(0)

    assert replay(made.history(), ALL) == ()
