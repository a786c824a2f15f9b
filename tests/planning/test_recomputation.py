"""Check that the modules to recompute are the best of all choices, by trying them all."""

import itertools
import random

import pytest

from gradwatch.planning.recomputation import ModuleTree, cheapest_recomputation, recomputation_cost
from gradwatch.planning.result import ModuleRow


def chain(*saved, inputs=10, flops=None):
    """Return the tree of a model that calls modules one after the other."""
    flops = flops or [100] * len(saved)
    modules = [
        ModuleRow(name=f"m{i}", type="Module", saved_bytes=nbytes, input_bytes=inputs, flops=cost, order=i + 1)
        for i, (nbytes, cost) in enumerate(zip(saved, flops, strict=True))
    ]
    return ModuleTree.of([ModuleRow(name="", type="Net", saved_bytes=sum(saved), order=0), *modules])


def peak_and_cost(tree, chosen):
    """Return the largest sum of saved bytes in the backward pass of a chain, and the cost of the choice."""
    before, sums, cost = 0, [], 0.0
    for node in tree.children:
        sums.append(before + node.row.saved_bytes)
        before += node.row.input_bytes if node.row.name in chosen else node.row.saved_bytes
        cost += recomputation_cost(node.row, "cpu") if node.row.name in chosen else 0
    return max([*sums, before]), cost


@pytest.mark.parametrize("seed", range(5))
def test_no_other_choice_within_the_limit_costs_less(seed):
    draw = random.Random(seed)
    tree = chain(*(draw.randint(20, 100) for _ in range(6)), flops=[draw.randint(1, 50) for _ in range(6)])
    names = [node.row.name for node in tree.children]
    limit = draw.randint(120, 300)
    subsets = itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(7))
    costs = [cost for peak, cost in (peak_and_cost(tree, subset) for subset in subsets) if peak <= limit]

    chosen = cheapest_recomputation(tree, limit, "cpu")

    assert costs, "the limit is high enough for some choice"
    assert peak_and_cost(tree, chosen)[0] <= limit
    assert peak_and_cost(tree, chosen)[1] == min(costs)


def test_the_last_module_is_not_recomputed_for_nothing():
    # recomputing it would cost nothing here, but its backward pass needs all of it at once
    tree = chain(100, 100, 100, flops=[50, 50, 1])

    assert cheapest_recomputation(tree, 210, "cpu") in (("m0",), ("m1",))


def test_a_part_of_a_module_is_recomputed_if_that_is_enough():
    rows = [
        ModuleRow(name="", type="Net", saved_bytes=220, order=0),
        ModuleRow(name="list.0", type="Block", saved_bytes=200, input_bytes=10, flops=90, order=1),
        ModuleRow(name="list.0.attention", type="Attention", saved_bytes=120, input_bytes=10, flops=30, order=2),
        ModuleRow(name="list.0.mlp", type="Mlp", saved_bytes=80, input_bytes=10, flops=60, order=3),
        ModuleRow(name="never.called", type="Linear"),
    ]

    assert cheapest_recomputation(ModuleTree.of(rows), 220, "cpu") == ()
    assert cheapest_recomputation(ModuleTree.of(rows), 120, "cpu") == ("list.0.attention",)
    assert cheapest_recomputation(ModuleTree.of(rows), 100, "cpu") is None  # its own backward pass needs more


def test_a_module_that_changes_its_input_or_runs_twice_is_left_alone():
    tree = chain(100, 100)
    tree.children[0].row.is_repeatable = False

    assert cheapest_recomputation(tree, 150, "cpu") is None


def test_many_modules_are_chosen_within_the_limit():
    tree = chain(*(50 + i % 7 for i in range(300)), flops=[1 + i % 5 for i in range(300)])

    chosen = cheapest_recomputation(tree, 9_000, "cpu")

    peak, cost = peak_and_cost(tree, chosen)
    assert peak <= 9_000
    # each module frees 40 to 46 bytes, and 7,000 of 16,000 must be freed: the cheap ones are a fifth of all
    assert cost <= 2 * len(chosen)
