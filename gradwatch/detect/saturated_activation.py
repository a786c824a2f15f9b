"""GW202: sigmoid, tanh or softmax units that sit in their flat tails, where no gradient passes."""

# T = samples of the activations, A = activation modules

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from gradwatch.detect import Example
from gradwatch.history.store import History
from gradwatch.history.synthetic import Synthetic
from gradwatch.records import Finding, Quantity, Severity
