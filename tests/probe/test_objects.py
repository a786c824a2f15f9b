"""Objects are found behind variables, attributes and items, and no code of their classes runs."""

from torch import nn

from gradwatch.probe.objects import MAX_ITEMS, reachable


class Agent:
    def __init__(self, target):
        self.targets = {"slow": [target]}

    @property
    def trap(self):
        raise AssertionError

    def __getattr__(self, name):
        raise AssertionError(name)


def test_a_module_in_a_list_of_an_attribute_is_found():
    agent = Agent(nn.Linear(2, 2))

    assert agent.targets["slow"][0] in reachable(nn.Module)


def test_variables_of_outer_functions_are_searched():
    outer = nn.Linear(2, 2)

    def inner():
        return reachable(nn.Linear)

    assert outer in inner()


def test_a_module_that_nothing_in_progress_holds_is_not_found():
    def make():
        return Agent(nn.Bilinear(2, 2, 2))

    make()

    assert reachable(nn.Bilinear) == []


def test_long_containers_are_searched_in_part():
    many = [0.0] * MAX_ITEMS + [nn.Bilinear(2, 2, 2)]

    assert len(many) > MAX_ITEMS
    assert reachable(nn.Bilinear) == []
