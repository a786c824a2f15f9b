"""A diagnosis quotes the autograd graph: the formula behind a NaN, the place of a cut."""

from gradwatch.detect.gradients.no_gradient import NoGradient
from gradwatch.detect.numerics.non_finite import NonFinite
from gradwatch.detect.numerics.unstable_formula import UnstableFormula
from gradwatch.diagnose.rank import diagnose
from gradwatch.events import CUT, LOG_OF_SOFTMAX, SINGULAR
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.pipeline.redetect import redetect

ROOT = "the square root of a sum that may be 0"


def told(made, detector):
    (diagnosis,) = diagnose(redetect(made.history(), [detector]))
    return diagnosis


def test_the_formula_behind_a_nan_is_reported_and_raises_the_certainty():
    def sick():
        return Synthetic(steps=60).non_finite(step=40, lasting=True)

    plain = told(sick(), NonFinite())
    with_tape = told(
        sick().add_event(SINGULAR, step=40, text=ROOT).add_event(SINGULAR, step=41, text="later"), NonFinite()
    )

    assert with_tape.cause_id == "singular-formula"
    assert f"In the autograd graph of the loss: {ROOT}." in with_tape.because
    assert "later" not in with_tape.because, "what is read after the finding is no part of it"
    assert plain.cause_id != with_tape.cause or plain.certainty < with_tape.certainty
    assert "autograd graph" not in plain.because


def test_the_log_of_a_softmax_is_reported_where_nothing_more_telling_was_read():
    made = Synthetic(steps=60).non_finite(step=40, lasting=True).add_event(LOG_OF_SOFTMAX, step=0, text="log(0)")
    assert "In the autograd graph of the loss: log(0)." in told(made, NonFinite()).because

    made.add_event(SINGULAR, step=40, text=ROOT)
    because = told(made, NonFinite()).because
    assert ROOT in because
    assert "log(0)" not in because.partition("In the autograd graph of the loss")[2]


def test_the_cut_is_told_that_the_silent_layers_lie_in():
    made = Synthetic(steps=40).no_gradient((0, 1))
    made.add_event(CUT, text="cut between layers.1 and layers.2", values={"first": 0, "last": 1})
    made.add_event(CUT, text="cut behind layers.9", values={"first": 9, "last": 9})
    because = [d.because for d in diagnose(redetect(made.history(), [NoGradient()]))]

    assert all("cut between layers.1 and layers.2" in text for text in because)
    assert not any("layers.9" in text for text in because)


def test_a_note_on_a_formula_long_before_its_nan_belongs_to_the_diagnosis_of_the_nan():
    made = Synthetic(steps=200).non_finite(step=150, lasting=True).add_event(LOG_OF_SOFTMAX, step=0, text="log(0)")

    (diagnosis,) = diagnose(redetect(made.history(), [NonFinite(), UnstableFormula()]))

    assert diagnosis.cause_id == "singular-formula"
    assert [f.kind for f in diagnosis.findings] == ["non-finite", "unstable-formula"]
