"""Each event about memory is emitted once, from the process or from the allocator of a GPU."""

import torch

from gradwatch.attempts import Attempts
from gradwatch.monitor.readings import memory_watch
from gradwatch.monitor.readings.memory_watch import MemoryWatch


def watch(events, *, device=None, known=()):
    return MemoryWatch(device, total_steps=None, known=known, emit=events.append, attempts=Attempts())


def test_growth_of_the_process_is_emitted_once(monkeypatch):
    used = iter(range(10**9, 10**10, 10**8))
    monkeypatch.setattr(memory_watch, "host_memory", lambda: next(used))
    monkeypatch.setattr(memory_watch, "host_memory_left", lambda: 10**8)
    events = []
    memory = watch(events)
    for step in range(40):
        memory.read(10 * step)

    assert [event.kind for event in events] == ["memory-grows"]
    later = watch(events, known=events)
    for step in range(40):
        later.read(10 * step)
    assert len(events) == 1, "a resumed run has it already"


def test_a_gpu_is_read_from_its_allocator(monkeypatch):
    statistics = {
        "allocated_bytes.all.current": 10**9,
        "num_alloc_retries": 3,
        "inactive_split_bytes.all.current": 10**9,
        "reserved_bytes.all.current": 3 * 10**9,
    }
    monkeypatch.setattr(memory_watch, "cuda_statistics", lambda device: statistics)
    events = []
    memory = watch(events, device=torch.device("cuda:0"))
    for step in range(40):
        memory.read(step)

    assert [(event.kind, event.step) for event in events] == [("memory-fragmented", 0)]
