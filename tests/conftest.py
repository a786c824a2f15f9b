"""Settings for every test (one torch thread unless OMP_NUM_THREADS is set), their order, and a replay of detectors."""

import functools
import gc
import os
import sys
from collections.abc import Callable, Sequence

import pytest
import warm_python
from hypothesis import HealthCheck, settings

from gradwatch.detect import Detector
from gradwatch.history.store import History
from gradwatch.pipeline.redetect import redetect
from gradwatch.records import Finding

Replay = Callable[[History, Sequence[Detector]], tuple[Finding, ...]]

# how long an example takes says more about what else runs on the machine
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

LONGEST_FILES = (
    "tests/contracts/test_quality.py",
    "tests/contracts/test_pages.py",
    "tests/end_to_end/test_ranks_of_train.py",
    "tests/replay/test_rerun.py",
    "tests/train/parallel/test_shared_checkpoint.py",
    "tests/replay/test_remedies_cure.py",
    "tests/replay/test_cure.py",
    "tests/train/test_resume_check.py",
    "tests/end_to_end/watch/test_rank_faults.py",
    "tests/end_to_end/watch/test_own_loop.py",
    "tests/end_to_end/watch/test_ranks.py",
    "tests/train/recovery/test_recover.py",
    "tests/contracts/test_detectors.py",
    "tests/contracts/test_site.py",
    "tests/scripts/test_fault_zoo.py",
    "tests/end_to_end/watch/test_shards.py",
    "tests/end_to_end/bad_input/test_machine.py",
    "tests/callbacks/test_transformers.py",
    "tests/cli/test_run.py",
    "tests/pipeline/test_ingest.py",
    "tests/end_to_end/watch/test_copies.py",
    "tests/end_to_end/watch/test_imports.py",
    "tests/end_to_end/watch/test_neutrality.py",
    "tests/end_to_end/watch/test_fast_path.py",
    "tests/cli/test_start_up.py",
    "tests/config/test_jsonschema.py",
    "tests/end_to_end/test_configs.py",
    "tests/end_to_end/test_clinic.py",
    "tests/autowatch/test_scripts.py",
    "tests/history/disk/test_writer.py",
    "tests/callbacks/test_lightning.py",
    "tests/callbacks/test_ranks.py",
    "tests/cli/test_plan.py",
    "tests/train/test_checkpoint.py",
    "tests/replay/restore/test_warm_start.py",
    "tests/planning/test_plan.py",
    "tests/planning/test_training.py",
    "tests/probe/device/test_triton_reduce.py",
    "tests/detect/activations/test_minimized_entropy.py",
)


def pytest_sessionstart(session):
    """Let all test processes fork their interpreters from one that has imported torch."""
    if session.config.getoption("numprocesses", None):
        warm_python.share()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Import all tests without looking for garbage, now and later: of the million objects that come, hardly any go."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Begin with the files that take longest, so that no process works alone on one of them at the end."""
    place = {file: i for i, file in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))


@pytest.fixture(scope="session")
def replay() -> Replay:
    """Return what detectors find while the steps of a history come in one by one."""

    def run(stored: History, detectors: Sequence[Detector]) -> tuple[Finding, ...]:
        return tuple(redetect(stored, detectors).findings)

    return run


@pytest.fixture(scope="session")
def clinic_run(tmp_path_factory):
    """Return a function that copies the run of an ill config of the clinic into a folder."""
    import clinic_runs

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all test processes
    return functools.partial(clinic_runs.copied, folder / "clinic")


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def _older_objects_are_frozen():
    """Spare the collector what earlier files have left for good: sources that were read, compilers, caches."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _nothing_is_synced():
    """Leave files to the system: a wait for the disk takes 5 ms, and only a loss of power would show a difference."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True)
def _monitors_are_detached_after_their_test():
    """Detach the monitors that a test leaves open: they would follow the optimizers of later tests."""
    before = _open_monitors()
    yield
    for monitor in _open_monitors() - before:
        monitor.detach()


def _open_monitors():
    """Return the monitors that are closed at exit, without importing torch."""
    watch = sys.modules.get("gradwatch.monitor.watch")
    return set(watch._open_monitors) if watch else set()
