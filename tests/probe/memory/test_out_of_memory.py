"""A training that runs out of memory raises what torch raised, and its run has the finding."""

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.probe.memory.out_of_memory import describe_out_of_memory, is_out_of_memory

CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.15 GiB of which 14.31 MiB is "
    "free. Process 1 has 79.13 GiB memory in use."
)


def test_errors_of_allocators_are_recognized_and_read():
    found = describe_out_of_memory(torch.OutOfMemoryError(CUDA))

    assert is_out_of_memory(torch.OutOfMemoryError(CUDA))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("size mismatch"))
    assert not is_out_of_memory(None)
    assert found.values["requested"] == 20 * 2**20
    assert found.text == "out of memory: CUDA out of memory"
    assert describe_out_of_memory(MemoryError()).text == "out of memory: Python could get no more"


def train(net, *, failing, directory):
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with gradwatch.watch(net, optimizer, run=directory, on_finding=lambda finding: None) as monitor:
        for step in range(5):
            loss = net(torch.randn(3, 4)).sum()
            loss.backward()
            if step == failing:
                torch.empty(10**15)
            optimizer.step()
            monitor.step(loss)


@pytest.mark.parametrize("failing", [0, 3])
def test_the_error_goes_on_and_the_run_has_the_finding(failing, tmp_path):
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as raised:
        train(nn.Linear(4, 2), failing=failing, directory=tmp_path / "run")

    assert not hasattr(raised.value, "__notes__"), "as torch raised it"
    run = gradwatch.load_run(tmp_path / "run")
    (finding,) = run.findings
    assert (finding.kind, str(finding.severity), finding.step) == ("out-of-memory", "critical", max(failing - 1, 0))
    assert "you tried to allocate 4000000000000000 bytes" in finding.message
    assert [diagnosis.cause_id for diagnosis in run.diagnoses] == ["step-too-large"]
    assert "1 problem" in str(run)
