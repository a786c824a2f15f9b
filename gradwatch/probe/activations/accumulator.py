"""Accumulate the outputs of one activation over a step: in one pass of the C extension, or by torch operations."""

# A = activation modules, C = units (channels or features) of one module, S = statistics (the first six of
# catalogue.ACT)

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple, final

import numpy as np
import torch

from gradwatch.probe.activations.bitmask import UnitMask, num_bytes, packed
from gradwatch.probe.activations.rules import SIGMOID_EDGE, ActivationRules, Range
from gradwatch.probe.device.sync import to_host
from gradwatch.probe.device.torch_reduce import wide_dtype

_SMALL_MAP = 64  # with fewer adjacent values per channel, the CPU reduces over samples first: measured 25x faster
NUM_STATISTICS = 6
ATTENTION = slice(4, 6)  # the largest logit and the smallest entropy of attention
EMPTY_RANGE = (math.nan, math.nan)


class DeadBits(NamedTuple):
    """Memory for one bit per unit that never fired in a call: a tensor for the C extension, and its mask."""

    bits: torch.Tensor
    units: UnitMask


class PendingCall(NamedTuple):
    """A call with an output that the C extension has yet to read.

    Args:
        accumulator: Accumulator of the called module.
        number: Number of the call within its forward pass.
        arguments: Arguments of the C extension: output, whether its units are dimension 1 (else the last one), maximum
            number of values, ranges, bits of units that never fired so far, whether these are unset, row of totals.
    """

    accumulator: ActivationAccumulator
    number: int
    arguments: tuple[torch.Tensor, bool, int, torch.Tensor, torch.Tensor | None, bool, int]


@final
class SharedSums:
    """Sums of the C extension over the calls of a step, in one array for all accumulators.

    Attributes:
        totals_A4: Number of values, their sum, sum of squares, and number of saturated ones; float64.
        is_used: Whether the sums contain a call of this step.
    """

    def __init__(self, native: ModuleType | None) -> None:
        self.native = native
        self.is_used = False
        self.totals_A4 = torch.zeros(0, 4, dtype=torch.float64, device="cpu")

    def new_row(self) -> int:
        """Add a row and return its index."""
        # only while a probe finds its modules, so copying all rows does not matter
        self.totals_A4 = torch.cat([self.totals_A4, self.totals_A4.new_zeros(1, 4)])
        return len(self.totals_A4) - 1

    def clear(self) -> None:
        """Reset for the next step."""
        self.totals_A4.zero_()
        self.is_used = False

    def add(self, calls: Sequence[PendingCall]) -> None:
        """Read the outputs of pending calls, each in one pass of the C extension."""
        assert self.native is not None, "only the C extension has pending calls"
        self.is_used = True
        answers = self.native.activations(tuple([call.arguments for call in calls]), self.totals_A4)
        for call, num_dead in zip(calls, answers, strict=True):
            call.accumulator.end(call, num_dead)


@final
class ActivationAccumulator:
    """Sums over the calls of one watched activation in the current step; no activation is kept."""

    def __init__(self, rules: ActivationRules, *, channels_first: bool | None, limit: int, sums: SharedSums) -> None:
        self.limit = limit
        self.channels_first = channels_first
        self.sums, self.row = sums, sums.new_row()
        self._set_rules(rules)
        self._dead_bits: dict[int, DeadBits] = {}  # of each call
        self.clear()

    def update_rules(self, rules: ActivationRules, *, channels_first: bool | None) -> None:
        """Replace the rules and the dimension of the units."""
        self.channels_first = channels_first
        if rules is not self.rules:  # rules of functions are shared, so identity is enough
            self._set_rules(rules)

    def _set_rules(self, rules: ActivationRules) -> None:
        self.rules = rules
        # the extension judges single values; a softmax is judged by its winner
        self._is_native = self.sums.native is not None and rules.softmax_dim is None
        self._ranges = _ranges(rules)

    def clear(self) -> None:
        """Reset for the next step, except for the shared sums."""
        self.is_called = False
        self.moments: torch.Tensor | None = None  # by torch operations: number of values, sum, sum of squares; (3,)
        self.saturated: torch.Tensor | None = None  # number of values times saturated fraction
        self.dead: list[torch.Tensor | UnitMask | None] = []  # (C,) per call of a forward pass: never fired so far
        self.num_dead: list[int | None] = []  # number of these units, if the extension has counted them
        self.call = 0
        self.attention: torch.Tensor | None = None  # largest logit and smallest entropy; (2,)

    def add_attention(self, reading_2: torch.Tensor) -> None:
        """Add a reading of attention: the largest logit and the smallest entropy of a head."""
        self.is_called = True
        if self.attention is not None:
            logit, entropy = reading_2.unbind()
            # `fmax` and `fmin` ignore the nan of a call that could not be read
            reading_2 = torch.stack([self.attention[0].fmax(logit), self.attention[1].fmin(entropy)])
        self.attention = reading_2

    def add(self, output: torch.Tensor) -> None:
        """Add the output of one call."""
        call = self.begin(output)
        if call is not None:
            self.sums.add([call])

    def begin(self, output: torch.Tensor) -> PendingCall | None:
        """Add the output of one call, or return a pending call for the C extension."""
        self.is_called = True
        if not output.ndim:
            output = output.reshape(1)  # one unit
        is_plain = type(output) is torch.Tensor and output.is_cpu
        if not self._is_native or torch.compiler.is_compiling() or not is_plain:
            self._add_sample(self._sample(output))
            return None
        channels_first = self._is_channels_first(output)
        if output.dtype is not torch.float32:  # the extension reads float32 only
            output, channels_first = self._sample(output), False
        if self.rules.dead is None:  # no bits, so the number of the call does not matter
            return PendingCall(self, 0, (output, channels_first, self.limit, self._ranges, None, True, self.row))
        number = self._next_number()
        bits, is_first = self._bits_for(number, min(output.shape[1 if channels_first else -1], self.limit))
        return PendingCall(self, number, (output, channels_first, self.limit, self._ranges, bits, is_first, self.row))

    def end(self, call: PendingCall, num_dead: int | None) -> None:
        """Finish a call with the number of dead units from the C extension; None if it could not read the output."""
        output, channels_first, _, _, bits, _, _ = call.arguments
        if num_dead is None:
            self._add_sample(self._units_last(output, channels_first=channels_first), number=call.number)
        elif bits is not None:
            self.dead[call.number], self.num_dead[call.number] = self._dead_bits[call.number].units, num_dead

    def _add_sample(self, x: torch.Tensor, *, number: int | None = None) -> None:
        """Add leading samples of the output of one call, by torch operations."""
        self._sum_up(x)
        if self.rules.dead is not None:
            # a call that the extension could not read has its number already
            self._join(_never_left(x, self.rules.dead), self._next_number() if number is None else number)

    def _sum_up(self, x: torch.Tensor) -> None:
        """Add moments and saturated values of the output of one call, by torch operations."""
        rules = self.rules
        self.moments = _plus(self.moments, _moments(x))
        if rules.softmax_dim is not None:
            self.saturated = _plus(self.saturated, _decided_frac(x) * x.numel())
        elif rules.saturated is not None:
            self.saturated = _plus(self.saturated, _outside(x, rules.saturated) * x.numel())

    def _next_number(self) -> int:
        number = self.call
        self.call += 1
        if number == len(self.dead):
            self.dead.append(None)
            self.num_dead.append(None)
        return number

    def _bits_for(self, number: int, num_units: int) -> tuple[torch.Tensor, bool]:
        """Return the memory for the bits of a call, and whether the bits are unset."""
        memory, before = self._dead_bits.get(number), self.dead[number]
        if memory is None or memory.units.number != num_units:
            bits = torch.empty(num_bytes(num_units), dtype=torch.uint8, device="cpu")
            memory = self._dead_bits[number] = DeadBits(bits, UnitMask(to_host(bits), num_units))
        # an earlier forward pass of the step was read by torch operations: continue from its result
        if isinstance(before, torch.Tensor) and before.numel() == num_units:
            memory.units.bits[:] = packed(to_host(before)).bits
            return memory.bits, False
        return memory.bits, before is not memory.units

    def _join(self, dead_C: torch.Tensor, number: int) -> None:
        """Combine the dead units of a call with those of the same call in earlier forward passes of the step."""
        before = self.dead[number]
        if isinstance(before, UnitMask):
            before = _flags(before).to(dead_C.device)
        if before is not None and before.shape == dead_C.shape:  # else the number of units changed: keep the newest
            dead_C = before & dead_C
        self.dead[number] = dead_C
        self.num_dead[number] = None

    def _is_channels_first(self, x: torch.Tensor) -> bool:
        # without a known layer before it, four or more dimensions suggest an image
        return x.ndim > 3 if self.channels_first is None else self.channels_first and x.ndim > 2

    def _sample(self, x: torch.Tensor) -> torch.Tensor:
        """Return leading samples with units, or the classes of a softmax, in the last dimension; float32, detached."""
        if self.rules.softmax_dim is not None:
            x = x.movedim(self.rules.softmax_dim, -1)
            return self._units_last(x, channels_first=False)
        return self._units_last(x, channels_first=self._is_channels_first(x))

    def _units_last(self, x: torch.Tensor, *, channels_first: bool) -> torch.Tensor:
        return _leading(x.detach().movedim(1, -1) if channels_first else x.detach(), self.limit).float()

    def dead_units(self) -> torch.Tensor | None:
        """Return whether each unit of all calls never fired, of shape (C,), bool; None if no unit can die."""
        parts = [_flags(dead) if isinstance(dead, UnitMask) else dead for dead in self.dead if dead is not None]
        return torch.cat(parts) if parts else None

    def packed_units(self) -> UnitMask | None:
        """Return `dead_units` on the host. The next step may overwrite the memory."""
        if len(self.dead) == 1 and isinstance(self.dead[0], UnitMask):  # the usual case: nothing to convert
            return self.dead[0]
        dead_C = self.dead_units()
        return None if dead_C is None else packed(to_host(dead_C))

    def dead_frac(self) -> torch.Tensor | float:
        """Return the fraction of units that never fired; nan if no unit can die."""
        if not self.dead:
            return math.nan
        known = [count for count in self.num_dead if count is not None]
        if len(known) == len(self.dead):  # counted by the extension, so no tensor is needed
            return sum(known) / sum([dead.number for dead in self.dead if isinstance(dead, UnitMask)])
        dead_C = self.dead_units()
        return math.nan if dead_C is None else dead_C.mean(dtype=torch.float32)


@functools.lru_cache(maxsize=64)
def _ranges(rules: ActivationRules) -> torch.Tensor:
    """Return the bounds of dead and saturated values for the C extension; accumulators with equal rules share them."""
    # nan as a bound means no range: no comparison with it is true
    bounds = [*(rules.dead or EMPTY_RANGE), *(rules.saturated or EMPTY_RANGE)]
    return torch.tensor(bounds, dtype=torch.float32, device="cpu")  # on the CPU, whatever the default device


def _flags(units: UnitMask) -> torch.Tensor:
    return torch.from_numpy(units.flags())


def _plus(total: torch.Tensor | None, term: torch.Tensor) -> torch.Tensor:
    return term if total is None else total + term


def _leading(x: torch.Tensor, limit: int) -> torch.Tensor:
    """Return the leading samples of outputs with units last: at most `limit` values, if necessary of one sample."""
    if x.numel() <= limit:
        return x
    while x.ndim > 1 and math.prod(x.shape[1:]) > limit:
        x = x[0]
    return x[: max(1, limit // math.prod(x.shape[1:]))]


def _moments(x: torch.Tensor) -> torch.Tensor:
    """Return the number of values, their sum and sum of squares, which add up over calls; shape (3,)."""
    n = x.numel()
    average = x.mean()
    # deviations first: in float32, rounding would swamp the difference of mean square and squared mean
    variance = torch.linalg.vector_norm(x - average).square() / n
    average, variance = average.to(wide_dtype(x.device)), variance.to(wide_dtype(x.device))
    return torch.stack([torch.ones_like(average), average, variance + average.square()]) * n


def _outside(x: torch.Tensor, interval: Range) -> torch.Tensor:
    """Return the fraction of values at or beyond either bound."""
    low, high = interval
    return ((x <= low) | (x >= high)).mean(dtype=torch.float32)


def _decided_frac(x: torch.Tensor) -> torch.Tensor:
    """Return the fraction of rows of a softmax in which one entry has nearly the whole probability.

    Rows with a single unmasked entry count only if they are the majority.
    """
    is_sure = x.amax(-1) > 0.5 + SIGMOID_EDGE  # its slope is p (1 - p)
    is_free = (x != 0).sum(-1) > 1  # masked entries are exactly 0
    among_free = (is_sure & is_free).sum(dtype=torch.float32) / is_free.sum(dtype=torch.float32).clamp_min(1)
    # `where` and not `if`, which would wait for a GPU
    return torch.where(is_free.mean(dtype=torch.float32) >= 0.5, among_free, is_sure.mean(dtype=torch.float32))


def _never_left(x: torch.Tensor, interval: Range) -> torch.Tensor:
    """Return whether all outputs of each unit, the last dimension, lie in the interval. NaN lies in none."""
    low, high = interval
    inside_C = _extreme(x, torch.amax) <= high
    return inside_C if low == -math.inf else inside_C & (_extreme(x, torch.amin) >= low)


def _extreme(x: torch.Tensor, reduce: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Return the largest or smallest output of each unit, the last dimension of x."""
    # channels first in memory, with small maps: reducing over samples first is faster, see `_SMALL_MAP`
    if x.ndim == 4 and x.stride(-1) > 1 and x.stride(-1) < _SMALL_MAP:
        x = reduce(x.movedim(-1, 1), 0).movedim(0, -1)
    return reduce(x, tuple(range(x.ndim - 1))) if x.ndim > 1 else x


def statistics(accumulators: list[ActivationAccumulator]) -> torch.Tensor:
    """Return the statistics of modules that were called, of shape (S, A), float32, on the device of the first."""
    devices = [t.device for it in accumulators for t in (it.moments, it.attention) if t is not None]
    if all(it.moments is None for it in accumulators) and all(device.type == "cpu" for device in devices):
        return _host_statistics(accumulators)  # the extension has read everything
    device = devices[0]
    moments = [_totals(it, device) for it in accumulators]
    n_A, sum_A, square_A, saturated_A = torch.stack(moments, dim=1)
    mean_A = sum_A / n_A
    # rounding may make a variance of zero negative
    std_A = (square_A / n_A - mean_A.square()).clamp_min_(0).sqrt_()
    dead_A = torch.stack([_placed(it.dead_frac(), device) for it in accumulators])
    whole_SA = torch.stack([dead_A, saturated_A / n_A, mean_A, std_A]).float()
    unknown = torch.full((2,), math.nan, dtype=torch.float32, device=device)
    attention = [unknown if it.attention is None else it.attention.to(device) for it in accumulators]
    return torch.cat([whole_SA, torch.stack(attention, dim=1)])


def _host_statistics(accumulators: list[ActivationAccumulator]) -> torch.Tensor:
    """Return the statistics if the C extension has read all outputs."""
    n_A, sum_A, square_A, saturated_A = to_host(accumulators[0].sums.totals_A4)[[it.row for it in accumulators]].T
    row_SA = np.full((NUM_STATISTICS, len(accumulators)), math.nan, np.float32)
    n_A = np.where(n_A, n_A, math.nan)  # attention in one kernel has no output
    mean_A = sum_A / n_A
    row_SA[0] = [it.dead_frac() for it in accumulators]
    row_SA[1] = np.where([it.rules.saturated is not None for it in accumulators], saturated_A / n_A, math.nan)
    row_SA[2] = mean_A
    row_SA[3] = np.sqrt(np.maximum(square_A / n_A - mean_A * mean_A, 0.0))
    for a, it in enumerate(accumulators):
        if it.attention is not None:
            row_SA[ATTENTION, a] = to_host(it.attention)
    return torch.from_numpy(row_SA)


def _totals(it: ActivationAccumulator, device: torch.device) -> torch.Tensor:
    """Return number, sum, sum of squares and saturated number of all values; shape (4,), on a device."""
    wide = wide_dtype(device)
    nothing = torch.zeros(3, dtype=wide, device=device)
    moments = nothing if it.moments is None else it.moments.to(device)
    can_saturate = it.rules.saturated is not None or it.rules.softmax_dim is not None
    saturated = nothing[0] if can_saturate else nothing[0] + math.nan  # nan survives the sum below
    if it.saturated is not None:
        saturated = it.saturated.to(device, wide)
    totals = torch.cat([moments, saturated[None]])
    if not it.sums.is_used:  # the copy to a GPU would wait
        return totals
    return totals + it.sums.totals_A4[it.row].to(device, wide)


def _placed(value: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    """Return a value on a device, as float32."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return torch.full((), value, dtype=torch.float32, device=device)  # a copy of the number would wait for a GPU
