"""Readers share the graph of a forward call, and a loop of many calls does not pay for each of them."""

import pytest
import torch
from torch import nn

from gradwatch.probe import output_reader
from gradwatch.probe.graph.graph import Graph
from gradwatch.probe.output_reader import OutputReaders


class Reader:
    """Keep the graph of each call that has one."""

    is_over = False

    def __init__(self):
        self.graphs = []

    def clear(self):
        self.graphs = []

    def watch(self, call):
        if call.roots:
            self.graphs.append(call.graph)


@pytest.fixture
def nodes(monkeypatch):
    """Return the number of nodes of each graph that is walked."""
    sizes = []

    def make(*outputs):
        graph = Graph(*outputs)
        sizes.append(len(graph.nodes))
        return graph

    monkeypatch.setattr(output_reader, "Graph", make)
    return sizes


def run(readers, *, calls):
    cell, state = nn.Linear(4, 4), torch.ones(2, 4)
    readers.begin()
    for _ in range(calls):
        state = cell(state).tanh()
        readers.watch(state, ())


def test_readers_share_the_graph_of_a_call(nodes):
    first, second = Reader(), Reader()

    run(OutputReaders([first, second]), calls=1)

    assert first.graphs[0] is second.graphs[0]
    assert len(nodes) == 1


def test_the_nodes_walked_grow_with_the_length_of_a_loop_and_not_with_its_square(nodes):
    reader = Reader()

    run(OutputReaders([reader]), calls=200)

    assert nodes[:4] == sorted(nodes[:4])
    assert sum(nodes) <= 4 * max(nodes)
    assert max(nodes) >= 200  # of calls near the end, too


def test_each_step_begins_with_its_first_call(nodes):
    readers = OutputReaders([Reader()])

    run(readers, calls=5)
    run(readers, calls=1)

    assert nodes[-1] == nodes[0]


def test_no_graph_is_walked_that_no_reader_asks_for(nodes):
    class Blind(Reader):
        def watch(self, call):
            assert call.output is not None

    run(OutputReaders([Blind()]), calls=3)

    assert nodes == []


def test_readers_are_over_when_all_are():
    first, second = Reader(), Reader()
    first.is_over = True

    assert not OutputReaders([first, second]).are_over

    second.is_over = True

    assert OutputReaders([first, second]).are_over
