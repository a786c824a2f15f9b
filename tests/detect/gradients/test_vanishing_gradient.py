"""A recurrence that forgets is ill where nothing is learned."""

from gradwatch.detect.gradients.vanishing_gradient import VanishingGradient
from gradwatch.detect.gradients.vanishing_gradient_rules.examples import make_forgetful
from gradwatch.records import Finding, Severity


def test_a_recurrence_that_forgets_is_reported_once_nothing_is_learned():
    history = make_forgetful().history()
    assert list(VanishingGradient().detect(history)) == []

    history.report(
        Finding(code="GW505", kind="loss-plateau", layer=None, step=70, severity=Severity.WARNING, message="")
    )
    (finding,) = VanishingGradient().detect(history)

    assert (finding.layer, finding.severity) == ("layers.3.weight", Severity.WARNING)
    assert "shrink 1e20-fold through 80 uses" in finding.message
