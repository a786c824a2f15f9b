"""A run on disk: what is read is what was recorded, whatever ended it."""

import json
import subprocess
import textwrap
import warnings

import numpy as np
import pytest
import warm_python

from gradwatch.errors import RunError
from gradwatch.history.disk.writer import Writer, read, status
from gradwatch.history.store import History
from gradwatch.records import Severity

CHILD = """
import sys
from pathlib import Path
import numpy as np
from gradwatch import catalogue
from gradwatch.history.disk.writer import Writer
from gradwatch.history.store import History
from gradwatch.history.disk.header import Header
from gradwatch.history import thinning
from gradwatch.records import Finding, RunInfo, Severity

thinning.MAX_SEGMENT_BYTES = 1
directory = Path(sys.argv[1])
history = History(Header.read(directory.parent / "template").info)
param_SL = np.ones((len(catalogue.PARAM), 3), np.float32)
act_SL = np.ones((len(catalogue.ACT), 2), np.float32)
def record(writer, step):
    history.append(step, run={"loss": float(step)}, param_SL=step * param_SL, act_SL=act_SL if step % 10 == 0 else None)
    writer.append()
"""


def child(tmp_path, run_info, code):
    """Start a process that records a run in tmp_path/run, with the child's helpers at hand."""
    Writer(tmp_path / "template", History(run_info())).close()
    command = [*warm_python.command(), "-c", CHILD + textwrap.dedent(code), str(tmp_path / "run")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def write_run(directory, history, append, steps, *, finds=(), validates=0):
    """Record steps; `finds` maps a step to the finding that is made after it."""
    finds = dict(finds)
    with Writer(directory, history) as writer:
        go_on(writer, history, append, steps, finds=finds, validates=validates)


def go_on(writer, history, append, steps, *, finds, validates=0):
    for step in steps:
        append(history, step, **({"val_loss": 0.5} if validates and step % validates == 0 else {}))
        writer.append()
        if step in finds and history.report(finds[step]):
            writer.report(finds[step])


def test_a_run_comes_back_as_it_was(tmp_path, run_info, append, finding, assert_same):
    history = History(run_info(), groups=2)
    write_run(tmp_path / "run", history, append, range(700), finds={300: finding(300)}, validates=100)

    back = read(tmp_path / "run")
    assert_same(back, history)
    assert back.groups == 2
    assert back.scalar("loss", 1).tolist() == [699.0]


def test_a_thinned_run_reads_as_memory_has_it_at_any_time(
    tmp_path, run_info, append, finding, assert_same, short_segments
):
    history = History(run_info())
    finds = {700: finding(700), 1900: finding(1900, layer="l1")}
    with Writer(tmp_path / "run", history) as writer, warnings.catch_warnings():
        warnings.simplefilter("error")
        for end in (100, 512, 513, 1900, 2037, 2048, 2049, 2500):
            go_on(writer, history, append, range(history.step + 1, end), finds=finds, validates=77)
            assert_same(read(tmp_path / "run"), history)


def test_an_empty_run_opens(tmp_path, run_info):
    Writer(tmp_path / "run", History(run_info())).close()
    assert read(tmp_path / "run").step == -1


def test_status_says_how_a_run_ended(tmp_path, run_info):
    writer = Writer(tmp_path / "a", History(run_info()))
    assert status(tmp_path / "a") == "running"
    writer.close("interrupted")
    writer.close("finished")
    assert status(tmp_path / "a") == "interrupted", "the second close does nothing"
    for name, error, expected in (("b", KeyboardInterrupt, "interrupted"), ("c", ZeroDivisionError, "failed")):
        with pytest.raises(error), Writer(tmp_path / name, History(run_info())):
            raise error
        assert status(tmp_path / name) == expected


def test_a_run_that_an_error_ended_keeps_the_error_on_one_line(tmp_path, run_info):
    with pytest.raises(ValueError, match="bad"), Writer(tmp_path / "a", History(run_info())):
        raise ValueError("bad\n  sample " + "x" * 1000)

    sentence = read(tmp_path / "a").ending.sentence(0)

    assert sentence.startswith("failed before the first step: ValueError: bad sample xxx")
    assert len(sentence) < 500


def test_a_second_run_in_one_directory_is_refused(tmp_path, run_info):
    Writer(tmp_path / "run", History(run_info())).close()
    with pytest.raises(RunError, match="already holds a run: resume it, or choose another directory"):
        Writer(tmp_path / "run", History(run_info()))


def test_a_run_that_is_being_written_can_be_read(tmp_path, run_info, append):
    history = History(run_info())
    with Writer(tmp_path / "run", history) as writer:
        for step in range(20):
            append(history, step)
            writer.append()
            assert read(tmp_path / "run").step == step, "a row waits in the process, where a kill would lose it"


def test_a_graver_finding_supersedes_on_disk_too(tmp_path, run_info, append, finding):
    history = History(run_info())
    finds = {3: finding(3), 8: finding(8, severity=Severity.CRITICAL)}
    write_run(tmp_path / "run", history, append, range(10), finds=finds)

    (only,) = read(tmp_path / "run").findings
    assert (only.step, only.severity) == (3, Severity.CRITICAL)
    assert [only] == history.findings, "memory and disk disagree"
    assert len((tmp_path / "run" / "findings.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("interrupted_at", [0, 5, 63, 64, 500, 1700])
@pytest.mark.parametrize("ran_on_for", [0, 1, 700])
def test_a_resumed_run_agrees_with_an_uninterrupted_one(
    tmp_path, run_info, append, finding, assert_same, short_segments, interrupted_at, ran_on_for
):
    end = 1800
    finds = {2: finding(2), 400: finding(400, layer="l1"), 510: finding(510, severity=Severity.CRITICAL)}
    whole = History(run_info())
    write_run(tmp_path / "whole", whole, append, range(end), finds=finds, validates=77)

    first = History(run_info())
    writer = Writer(tmp_path / "run", first)
    go_on(writer, first, append, range(interrupted_at + 1), finds=finds, validates=77)
    state = first.state()
    killed_at = min(interrupted_at + 1 + ran_on_for, end)
    go_on(writer, first, append, range(interrupted_at + 1, killed_at), finds=finds, validates=77)
    del writer  # as a kill leaves it

    writer, second = Writer.resume(tmp_path / "run", interrupted_at)
    second.restore(state)
    assert second.step == interrupted_at
    with writer:
        go_on(writer, second, append, range(interrupted_at + 1, end), finds=finds, validates=77)

    assert_same(second, whole)
    assert_same(read(tmp_path / "run"), whole)
    assert np.array_equal(second.param.window("grad.l2"), whole.param.window("grad.l2"))
    assert content(tmp_path / "run") == content(tmp_path / "whole")


def content(directory):
    files = [p for p in directory.rglob("*") if p.is_file()]
    return {str(p.relative_to(directory)): p.read_bytes() for p in files}


def test_resume_gives_windows_and_findings_of_that_step(tmp_path, run_info, append, finding, assert_same):
    history = History(run_info())
    finds = {5: finding(5), 30: finding(30, severity=Severity.CRITICAL), 35: finding(35, layer="l1")}
    write_run(tmp_path / "run", history, append, range(50), finds=finds)
    expected = History(run_info())
    for step in range(21):
        append(expected, step)
    expected.report(finding(5))

    writer, resumed = Writer.resume(tmp_path / "run", 20)
    writer.close()
    assert_same(resumed, expected)
    assert_same(read(tmp_path / "run"), expected)


def test_resume_before_the_first_step_starts_over(tmp_path, run_info, append):
    write_run(tmp_path / "run", History(run_info()), append, range(30))
    writer, history = Writer.resume(tmp_path / "run", -1)
    append(history, 0)
    writer.append()
    writer.close()
    assert read(tmp_path / "run").steps("loss").tolist() == [0]


def test_resume_refuses_a_run_of_other_statistics(tmp_path, run_info, append):
    write_run(tmp_path / "run", History(run_info()), append, range(3))
    header = json.loads((tmp_path / "run" / "run.json").read_text())
    header["records"]["steps"]["fields"]["param"]["statistics"][0] = "grad.l9"
    (tmp_path / "run" / "run.json").write_text(json.dumps(header))

    assert np.isnan(read(tmp_path / "run")["grad.l2"]).all(), "reading it is fine"
    with pytest.raises(RunError, match=r"recorded by gradwatch 0\.1\.0, with other statistics"):
        Writer.resume(tmp_path / "run", 1)


def test_damage_warns_by_name_and_the_rest_is_read(tmp_path, run_info, append, finding):
    write_run(tmp_path / "run", History(run_info()), append, range(1100), finds={3: finding(3)})
    first = tmp_path / "run" / "history" / "steps" / f"{0:012d}.bin"
    data = bytearray(first.read_bytes())
    data[1000:3000] = bytes(2000)
    first.write_bytes(data)
    with (tmp_path / "run" / "findings.jsonl").open("a") as file:
        file.write("not a finding\n")

    text = r"damaged; what is left.*records are damaged; .*line 2 is not a valid finding"
    with pytest.warns(RuntimeWarning, match=text):
        history = read(tmp_path / "run")
    assert history.step == 1099
    assert len(history.findings) == 1


def test_rows_are_there_after_kill_9(tmp_path, run_info, short_segments):
    process = child(
        tmp_path,
        run_info,
        """
        writer = Writer(directory, history)
        step = 0
        while True:
            record(writer, step)
            print(step, flush=True)
            step += 1
        """,
    )
    acknowledged = [int(process.stdout.readline()) for _ in range(3000)]
    process.send_signal(warm_python.KILL)
    acknowledged += [int(line) for line in process.stdout if line.endswith("\n")]
    process.wait()

    history = read(tmp_path / "run")
    assert status(tmp_path / "run") == "running"
    assert history.step >= acknowledged[-1], "a row that was recorded is gone"
    assert np.array_equal(history["grad.l2"][:, 0], history.steps("grad.l2").astype(np.float32))
    resumed, _ = Writer.resume(tmp_path / "run", 2000)
    resumed.close()
    assert read(tmp_path / "run").step == 2000


def test_a_file_size_limit_is_explained_and_what_was_recorded_stays(tmp_path, run_info):
    process = child(
        tmp_path,
        run_info,
        """
        import resource
        from gradwatch.errors import RunError
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        try:
            with Writer(directory, history) as writer:
                for step in range(10_000):
                    record(writer, step)
        except RunError as error:
            print(error)
        """,
    )
    output, _ = process.communicate(timeout=60)

    assert "000000000000.bin: file too large" in output
    assert "more bytes were needed. What was recorded before is safe; make room" in output
    steps_T = read(tmp_path / "run").steps("loss")
    record_bytes = 10_000 // (len(steps_T) + 1)
    assert np.array_equal(steps_T, np.arange(len(steps_T)))
    assert 10_000 - 2 * record_bytes < len(steps_T) * record_bytes, "rows that had room are gone"


def test_two_processes_cannot_write_one_run(tmp_path, run_info, short_segments):
    pytest.importorskip("fcntl")
    process = child(
        tmp_path,
        run_info,
        """
        writer = Writer(directory, history)
        record(writer, 0)
        print("ready", flush=True)
        sys.stdin.read()
        import time; time.sleep(60)
        """,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(RunError, match="another process is writing to this run; stop it first"):
            Writer.resume(tmp_path / "run", 0)
    finally:
        process.send_signal(warm_python.KILL)
        process.wait()
    Writer.resume(tmp_path / "run", 0)[0].close()


def test_a_long_run_stays_small(tmp_path, run_info):
    layers, steps = 200, 100_000
    history = History(run_info(layers=layers, activations=100))
    kept_T = np.arange(steps)
    kept_T = kept_T[history._is_kept(kept_T)]
    for table in (history.param, history.run):
        table.fill(kept_T, np.ones((len(kept_T), *table.shape), table.dtype))
    Writer(tmp_path / "run", history).close()

    opened = read(tmp_path / "run")
    size = sum(p.stat().st_size for p in (tmp_path / "run").rglob("*") if p.is_file())

    assert opened.step == steps - 1
    assert size < 80e6, f"{size / 1e6:.0f} MB"
