"""Every case, in the order of the files."""

from gradient_cases import (
    equilibria,
    right_functions,
    right_modules,
    wrong_functions,
    wrong_layers,
    wrong_patterns,
    wrong_steps,
)
from gradient_cases.planting import CASES as CASES

FILES = (wrong_functions, wrong_layers, wrong_patterns, wrong_steps, right_functions, right_modules, equilibria)
"""Imported for the cases that they register."""
