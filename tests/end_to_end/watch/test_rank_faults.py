"""Two processes train many small models: each planted fault between ranks is named, and healthy loops stay quiet."""

import pytest
import rank_faults_worker
from processes import run_ranks
from rank_faults_worker import REMEDIES

import gradwatch
from gradwatch.diagnose.case import Case
from gradwatch.diagnose.causes import cause_of
from gradwatch.diagnose.rank import diagnose
from gradwatch.diagnose.remedies import KNOWN
from gradwatch.records import Severity

FAULTS = {
    "Summed": ("unsynchronized-gradient", None, (0, 0), "summed-over-ranks"),
    "DividedTwice": ("unsynchronized-gradient", None, (0, 0), "summed-over-ranks"),
    "ClipBefore": ("unsynchronized-gradient", None, (0, 0), "clipped-before-average"),
    "NeverBroadcast": ("rank-divergence", None, (0, 0), "different-replicas"),
    "Unsynchronized": ("unsynchronized-gradient", None, (20, 20), "unaveraged-gradients"),
    "Unwrapped": ("unsynchronized-gradient", None, (0, 0), "unaveraged-gradients"),
    "LeftOut": ("unsynchronized-gradient", "2.weight", (0, 0), "unaveraged-gradients"),
    "ChangedLate": ("rank-divergence", "2.weight", (21, 21), "different-replicas"),
    "LoadedMoments": ("rank-divergence", None, (0, 0), "different-moments"),
    "LoadedLate": ("rank-divergence", None, (21, 21), "different-moments"),
    "SameData": ("rank-data", None, (0, 0), "shared-batches"),
    "Overlapping": ("rank-data", None, (10, 10), "shared-batches"),
    "Shards": ("rank-data", None, (0, 15), "shared-batches"),
    "EqualEpochs": ("rank-data", None, (16, 16), "equal-epochs"),
    "BadSample": ("rank-non-finite", None, (20, 20), "bad-data-on-rank"),
    "Logarithm": ("rank-non-finite", None, (20, 20), "nan-on-rank"),
    "OwnRate": ("rank-setting", None, (21, 21), "different-rates"),
    "SameDropout": ("rank-setting", None, (0, 0), "equal-seeds"),
    "OwnStatistics": ("rank-setting", None, (1, 2), "own-statistics"),
}
"""By name of the case: kind, layer, first and last right onset, and cause."""

RANKS = {"ChangedLate": 1, "LoadedLate": 1, "BadSample": 1, "Logarithm": 1, "OwnRate": 1}

HEALTHY = (
    "Training",
    "ByHand",
    "ClipAfter",
    "Accumulating",
    "Dropout",
    "BatchNorm",
    "LocalSteps",
    "OwnAverage",
    "Uneven",
    "Pipeline",
    "Guarded",
    "Epochs",
    "SharedChange",
    "SharedMoments",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(rank_faults_worker.train_all, folder, ranks=2, killed=(1,), prepare=rank_faults_worker.check_settings)
    return folder


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_between_ranks_is_found_with_its_onset_and_cause(name, folder):
    kind, layer, (first, last), cause = FAULTS[name]
    run = gradwatch.load_run(folder / name)
    leading = diagnose(run.history)[0]

    assert leading.cause_id == cause
    finding = next(f for f in leading.findings if f.kind == kind)
    assert finding.layer == layer
    assert first <= finding.since <= last
    if name in RANKS:
        assert {q.key: q.value for q in finding.evidence}["rank"] == RANKS[name]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_loop_on_two_ranks_raises_no_alarm(name, folder):
    run = gradwatch.load_run(folder / name)

    assert run.step >= 37
    assert [str(f) for f in run.findings if f.severity > Severity.INFO] == []


@pytest.mark.parametrize("remedy", REMEDIES)
def test_a_loop_with_a_fault_is_offered_the_remedy_of_a_loop_without_it(remedy, folder):
    for pair in REMEDIES[remedy]:
        histories = [gradwatch.load_run(folder / case.__name__).history for case in pair]
        leading = diagnose(histories[0])[0]

        assert remedy in cause_of(leading.cause_id).remedies
        assert KNOWN[remedy](Case.of(histories[0], leading.findings)) in leading.remedies
        assert [d.cause_id for d in diagnose(histories[1]) if d.severity > Severity.INFO] == []


def test_a_rank_that_is_killed_leaves_a_readable_run_and_its_findings(folder):
    run = gradwatch.load_run(folder / "Killed")

    assert run.history.ending is not None
    assert run.history.ending.kind == "failed"
    assert "rank-setting" in [finding.kind for finding in run.findings], "found before"
    killed = run.ranks[1].step + 1
    assert 21 <= killed <= run.step + 1
    assert f"2 ranks; rank 1 killed at step {killed}" in str(run)


def test_each_rank_keeps_its_own_part(folder):
    whole, part = (gradwatch.load_run(folder / "Training" / name) for name in (".", "ranks/1"))

    assert (whole.info.rank, part.info.rank, part.info.world_size) == (0, 1, 2)
    assert part["loss"].tolist() != whole["loss"].tolist()
    assert part["grad.l2"].tolist() == whole["grad.l2"].tolist()  # after the average
    assert not (folder / "Training" / "ranks" / "1" / "report.html").exists()


def test_ranks_that_average_their_gradients_give_a_noise_scale(folder):
    averaged, alone = (gradwatch.load_run(folder / name).history for name in ("Training", "LocalSteps"))

    found = gradwatch.noise_scale(averaged)
    assert (found.batch, found.steps) == (pytest.approx(2 * 16), 8)
    assert found.samples > 0
    assert gradwatch.noise_scale(alone) is None
