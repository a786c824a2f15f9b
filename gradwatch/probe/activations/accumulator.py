"""What one activation module gave in a step: by one native pass where that can be, by torch operations elsewhere."""

# A = activation modules, C = units (channels or features) of one of them, S = statistics (the first four of
# catalogue.ACT)

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple, final

import numpy as np
import torch

from gradwatch.probe.activations.bitmask import Units, num_bytes, packed
from gradwatch.probe.activations.rules import SIGMOID_EDGE, Range, Rules
from gradwatch.probe.device.sync import to_host
from gradwatch.probe.device.torch_reduce import wide_dtype

_SMALL_MAP = 64  # values of a channel side by side, below which the CPU reduces over samples first; measured: 25 times
NUM_STATISTICS = 4
NOWHERE = (math.nan, math.nan)  # a range that holds nothing


class Room(NamedTuple):
    """Where the native code writes which units of a call never fired: the bits of some units, as a tensor too."""

    bits: torch.Tensor
    units: Units


class Call(NamedTuple):
    """A call that has begun, for the native code to take in.

    Args:
        slot: Of the module that was called.
        place: Which call of a forward pass it is.
        told: What the native code asks for: the output, whether its units are dimension 1 rather than the last, how
            many values to read at most, ranges, bits of the units that never fired so far, whether there is nothing in
            them yet, and the row of the totals.
    """

    slot: Slot
    place: int
    told: tuple[torch.Tensor, bool, int, torch.Tensor, torch.Tensor | None, bool, int]


@final
class Sums:
    """What the native code sums up over the calls of a step, in one array for all slots.

    Attributes:
        totals_A4: Number of values, their sum, sum of squares, and number of saturated ones; float64.
    """

    def __init__(self, native: ModuleType | None) -> None:
        self.native = native
        self.totals_A4 = torch.zeros(0, 4, dtype=torch.float64, device="cpu")

    def new_row(self) -> int:
        """Return the index of a row that is added."""
        self.totals_A4 = torch.cat([self.totals_A4, self.totals_A4.new_zeros(1, 4)])
        return len(self.totals_A4) - 1

    def clear(self) -> None:
        """Forget the step before."""
        self.totals_A4.zero_()

    def add(self, calls: Sequence[Call]) -> None:
        """Take in calls that have begun, by one native pass over each output."""
        assert self.native is not None, "only what can be read here has begun"
        answers = self.native.activations(tuple([call.told for call in calls]), self.totals_A4)
        for call, num_dead in zip(calls, answers, strict=True):
            call.slot.end(call, num_dead)


@final
class Slot:
    """One watched module and what was summed over the calls of the current step. It keeps no activation."""

    def __init__(self, rules: Rules, *, channels_first: bool | None, limit: int, sums: Sums) -> None:
        self.limit = limit
        self.channels_first = channels_first
        self.sums, self.row = sums, sums.new_row()
        self._look_for(rules)
        self._rooms: dict[int, Room] = {}  # of each call
        self.clear()

    def learn(self, rules: Rules, *, channels_first: bool | None) -> None:
        """Take it from now on that this is what to look for."""
        self.channels_first = channels_first
        if rules is not self.rules:
            self._look_for(rules)

    def _look_for(self, rules: Rules) -> None:
        self.rules = rules
        self._is_native = self.sums.native is not None and rules.softmax_dim is None
        self._ranges = _ranges(rules)

    def clear(self) -> None:
        """Forget the step before, but for what is summed in one array with that of others."""
        self.is_called = False
        self.moments: torch.Tensor | None = None  # of torch operations: number of values, sum, sum of squares; (3,)
        self.saturated: torch.Tensor | None = None  # number of values times their saturated fraction
        self.dead: list[torch.Tensor | Units | None] = []  # (C,) of each call within a forward pass: never fired so far
        self.num_dead: list[int | None] = []  # how many, where that is known
        self.call = 0

    def add(self, output: torch.Tensor) -> None:
        """Take in the output of one call."""
        call = self.begin(output)
        if call is not None:
            self.sums.add([call])

    def begin(self, output: torch.Tensor) -> Call | None:
        """Take in the output of one call, or return what the native code is to take in."""
        self.is_called = True
        if not output.ndim:
            output = output.reshape(1)  # one unit
        is_plain = type(output) is torch.Tensor and output.is_cpu
        if not self._is_native or torch.compiler.is_compiling() or not is_plain:
            self._take(self._sample(output))
            return None
        channels_first = self._is_channels_first(output)
        if output.dtype is not torch.float32:
            output, channels_first = self._sample(output), False
        if self.rules.dead is None:
            return Call(self, 0, (output, channels_first, self.limit, self._ranges, None, True, self.row))
        place = self._next()
        bits, is_first = self._room(place, min(output.shape[1 if channels_first else -1], self.limit))
        return Call(self, place, (output, channels_first, self.limit, self._ranges, bits, is_first, self.row))

    def end(self, call: Call, num_dead: int | None) -> None:
        """Take in how many units of a call the native code found dead; None where it could not read the output."""
        output, channels_first, _, _, bits, _, _ = call.told
        if num_dead is None:
            self._take(self._units_last(output, channels_first=channels_first), place=call.place)
        elif bits is not None:
            self.dead[call.place], self.num_dead[call.place] = self._rooms[call.place].units, num_dead

    def _take(self, x: torch.Tensor, *, place: int | None = None) -> None:
        """Take in leading samples of the output of one call, by torch operations."""
        self._sum_up(x)
        if self.rules.dead is not None:
            self._join(_never_left(x, self.rules.dead), self._next() if place is None else place)

    def _sum_up(self, x: torch.Tensor) -> None:
        """Add what adds up of the output of one call, by torch operations."""
        rules = self.rules
        self.moments = _plus(self.moments, _moments(x))
        if rules.softmax_dim is not None:
            self.saturated = _plus(self.saturated, _sure(x) * x.numel())
        elif rules.saturated is not None:
            self.saturated = _plus(self.saturated, _outside(x, rules.saturated) * x.numel())

    def _next(self) -> int:
        """Return the place of the call under way."""
        place = self.call
        self.call += 1
        if place == len(self.dead):
            self.dead.append(None)
            self.num_dead.append(None)
        return place

    def _room(self, place: int, number: int) -> tuple[torch.Tensor, bool]:
        """Return where the native code may write which units of a call never fired, and whether none are there yet."""
        room, before = self._rooms.get(place), self.dead[place]
        if room is None or room.units.number != number:
            bits = torch.empty(num_bytes(number), dtype=torch.uint8, device="cpu")
            room = self._rooms[place] = Room(bits, Units(to_host(bits), number))
        if isinstance(before, torch.Tensor) and before.numel() == number:
            room.units.bits[:] = packed(to_host(before)).bits
            return room.bits, False
        return room.bits, before is not room.units

    def _join(self, dead_C: torch.Tensor, place: int) -> None:
        """Join the units of a call with those of the same call in earlier forward passes of the step."""
        before = self.dead[place]
        if isinstance(before, Units):
            before = _flags(before).to(dead_C.device)
        if before is not None and before.shape == dead_C.shape:
            dead_C = before & dead_C
        self.dead[place] = dead_C
        self.num_dead[place] = None

    def _is_channels_first(self, x: torch.Tensor) -> bool:
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
        """Return which units of all calls never fired, of shape (C,), bool; None where there are none that can die."""
        parts = [_flags(dead) if isinstance(dead, Units) else dead for dead in self.dead if dead is not None]
        return torch.cat(parts) if parts else None

    def packed_units(self) -> Units | None:
        """Return the same, on the host. It may be memory that the next step writes to."""
        if len(self.dead) == 1 and isinstance(self.dead[0], Units):
            return self.dead[0]
        dead_C = self.dead_units()
        return None if dead_C is None else packed(to_host(dead_C))

    def dead_frac(self) -> torch.Tensor | float:
        """Return the fraction of units that never fired; nan where there are none that can be dead."""
        if not self.dead:
            return math.nan
        known = [count for count in self.num_dead if count is not None]
        if len(known) == len(self.dead):
            return sum(known) / sum([dead.number for dead in self.dead if isinstance(dead, Units)])
        dead_C = self.dead_units()
        return math.nan if dead_C is None else dead_C.mean(dtype=torch.float32)


@functools.lru_cache(maxsize=64)
def _ranges(rules: Rules) -> torch.Tensor:
    """Return the bounds of what is dead and of what is saturated, for the native code; shared by all that have them."""
    return torch.tensor([*(rules.dead or NOWHERE), *(rules.saturated or NOWHERE)], device="cpu")


def _flags(units: Units) -> torch.Tensor:
    """Return flags as a tensor of shape (C,), bool."""
    return torch.from_numpy(units.flags())


def _plus(total: torch.Tensor | None, term: torch.Tensor) -> torch.Tensor:
    return term if total is None else total + term


def _leading(x: torch.Tensor, limit: int) -> torch.Tensor:
    """Return the leading samples of outputs with units last: at most `limit` values, of one sample where need be."""
    if x.numel() <= limit:
        return x
    while x.ndim > 1 and math.prod(x.shape[1:]) > limit:
        x = x[0]
    return x[: max(1, limit // math.prod(x.shape[1:]))]


def _moments(x: torch.Tensor) -> torch.Tensor:
    """Return what adds up over calls: the number of values, their sum and sum of squares; shape (3,)."""
    n = x.numel()
    average = x.mean()
    # Deviations first: the difference of mean square and squared mean would drown in the rounding of float32.
    variance = torch.linalg.vector_norm(x - average).square() / n
    average, variance = average.to(wide_dtype(x.device)), variance.to(wide_dtype(x.device))
    return torch.stack([torch.ones_like(average), average, variance + average.square()]) * n


def _outside(x: torch.Tensor, interval: Range) -> torch.Tensor:
    """Return the fraction of values at or beyond either bound."""
    low, high = interval
    return ((x <= low) | (x >= high)).mean(dtype=torch.float32)


def _sure(x: torch.Tensor) -> torch.Tensor:
    """Return the fraction of rows of a softmax in which one entry has nearly everything.

    Rows that a mask has left no choice do not count, unless they are most of all.
    """
    is_sure = x.amax(-1) > 0.5 + SIGMOID_EDGE  # its slope is p (1 - p)
    is_free = (x != 0).sum(-1) > 1
    among_free = (is_sure & is_free).sum(dtype=torch.float32) / is_free.sum(dtype=torch.float32).clamp_min(1)
    return torch.where(is_free.mean(dtype=torch.float32) >= 0.5, among_free, is_sure.mean(dtype=torch.float32))


def _never_left(x: torch.Tensor, interval: Range) -> torch.Tensor:
    """Say of each unit, the last dimension, whether all its outputs lie in the interval. NaN lies in none."""
    low, high = interval
    inside_C = _extreme(x, torch.amax) <= high
    return inside_C if low == -math.inf else inside_C & (_extreme(x, torch.amin) >= low)


def _extreme(x: torch.Tensor, reduce: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Return the largest or smallest output of each unit, the last dimension of x."""
    if x.ndim == 4 and x.stride(-1) > 1 and x.stride(-1) < _SMALL_MAP:
        x = reduce(x.movedim(-1, 1), 0).movedim(0, -1)
    return reduce(x, tuple(range(x.ndim - 1))) if x.ndim > 1 else x


def statistics(slots: list[Slot]) -> torch.Tensor:
    """Return the statistics of modules that were called, of shape (S, A), float32, on the device of the first."""
    if all(slot.moments is None for slot in slots):
        return _host_statistics(slots)
    device = next(slot.moments.device for slot in slots if slot.moments is not None)
    moments = [_everything(slot, device) for slot in slots]
    n_A, sum_A, square_A, saturated_A = torch.stack(moments, dim=1)
    mean_A = sum_A / n_A
    std_A = (square_A / n_A - mean_A.square()).clamp_min_(0).sqrt_()
    dead_A = torch.stack([torch.as_tensor(slot.dead_frac(), device=device) for slot in slots])
    return torch.stack([dead_A, saturated_A / n_A, mean_A, std_A]).float()


def _host_statistics(slots: list[Slot]) -> torch.Tensor:
    """Return the same where the native code has read everything."""
    n_A, sum_A, square_A, saturated_A = to_host(slots[0].sums.totals_A4)[[slot.row for slot in slots]].T
    row_SA = np.empty((NUM_STATISTICS, len(slots)), np.float32)
    mean_A = sum_A / n_A
    row_SA[0] = [slot.dead_frac() for slot in slots]
    row_SA[1] = np.where([slot.rules.saturated is not None for slot in slots], saturated_A / n_A, math.nan)
    row_SA[2] = mean_A
    row_SA[3] = np.sqrt(np.maximum(square_A / n_A - mean_A * mean_A, 0.0))
    return torch.from_numpy(row_SA)


def _everything(slot: Slot, device: torch.device) -> torch.Tensor:
    """Return number, sum, sum of squares and saturated number of all values of a slot; shape (4,), on a device."""
    wide = wide_dtype(device)
    nothing = torch.zeros(3, dtype=wide, device=device)
    moments = nothing if slot.moments is None else slot.moments.to(device)
    is_told = slot.rules.saturated is not None or slot.rules.softmax_dim is not None
    saturated = nothing[0] if is_told else nothing[0] + math.nan
    if slot.saturated is not None:
        saturated = slot.saturated.to(device, wide)
    return torch.cat([moments, saturated[None]]) + slot.sums.totals_A4[slot.row].to(device, wide)
