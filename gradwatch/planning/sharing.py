"""Plan the memory of one rank if ranks share a training."""

# R = ranks

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from gradwatch.planning.ledger import Purpose
from gradwatch.planning.result import Plan
from gradwatch.planning.training import HALF_PRECISION, ConfigPlanner


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """A way to hold less of a step's memory on one device.

    Args:
        name: Short name, such as `fsdp2`.
        text: Effect of the way to share.
        shares: Fraction of each part that the device holds; 1 for the others.
        extra_bytes: Additional bytes.
        price: Its cost, in words.
        setting: Value of `train.parallel`, or None if a config has no setting for it.
    """

    name: str
    text: str
    shares: Mapping[Purpose, float]
    extra_bytes: int
    price: str
    setting: str | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPlan:
    """The peak of one device with a way of sharing.

    Args:
        sharing: The way.
        peak_bytes: Peak of the device.
        saved_bytes: Bytes saved, compared with no sharing; negative if sharing needs more.
    """

    sharing: Sharing
    peak_bytes: int
    saved_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "name": self.sharing.name,
            "peak_bytes": self.peak_bytes,
            "saved_bytes": self.saved_bytes,
            "price": self.sharing.price,
            "parallel": self.sharing.setting,
        }


def plan_ranks(planner: ConfigPlanner, ranks: int) -> tuple[SharedPlan, ...]:
    """Return the peak of one of several ranks, which share each batch, for each way to share the rest.

    Bytes in addition to the step count as if they were allocated all the time: for the buckets of DDP, a copy of the
    gradients; for FSDP2, the gathered weights of two blocks and of the modules outside of blocks, with the gradients of
    one.
    """
    changes = {"data.batch_size": max(1, -(-planner.config.data.batch_size // ranks))}
    plain = planner.plan(changes)
    shard_ranks = min(planner.config.train.shard_ranks or ranks, ranks)
    return _planned(planner, changes, _of_ranks(planner, plain, ranks, shard_ranks))


def _of_ranks(planner: ConfigPlanner, plain: Plan, ranks: int, shard_ranks: int) -> list[Sharing]:
    weights, part = plain.parts[Purpose.WEIGHTS], 1 / ranks
    gradients = sum(p.numel() * p.itemsize for p in planner.trainable)
    per_number = weights / max(1, plain.parameters)
    blocks = [round(per_number * row.parameters) for row in plain.modules if row.name in planner.blocks]
    largest, rest = max(blocks, default=0), max(0, weights - sum(blocks))
    gathered = (rest + 2 * largest) * (0.5 if planner.config.train.precision in HALF_PRECISION else 1.0)
    sharded = round(gathered + max(rest, largest))

    def sent(passes: int, nbytes: int, count: int = ranks) -> str:
        return f"{passes * nbytes * (count - 1) / count / 1e6:.3g} MB sent a step"

    def in_shards(count: int) -> dict[Purpose, float]:
        return dict.fromkeys((Purpose.WEIGHTS, Purpose.GRADIENTS, Purpose.OPTIMIZER), 1 / count)

    found = [
        Sharing(
            name="ddp",
            text="share each batch alone",
            shares={},
            extra_bytes=gradients,
            price=sent(2, gradients),
            setting="ddp",
        ),
        Sharing(
            name="ZeRO 1",
            text="shard the optimizer state as well",
            shares={Purpose.OPTIMIZER: part},
            extra_bytes=gradients,
            price=f"{sent(2, gradients)}; ZeroRedundancyOptimizer",
        ),
        Sharing(
            name="ZeRO 2",
            text="shard the gradients as well",
            shares={Purpose.OPTIMIZER: part, Purpose.GRADIENTS: part},
            extra_bytes=weights + max(rest, largest),
            price=f"{sent(2, gradients)}; fully_shard(reshard_after_forward=False)",
        ),
        Sharing(
            name="fsdp2 (ZeRO 3)",
            text="shard the weights as well",
            shares=in_shards(ranks),
            extra_bytes=sharded,
            price=sent(3, weights),
            setting="fsdp2",
        ),
    ]
    if 1 < shard_ranks < ranks:
        price = f"{sent(3, weights, shard_ranks)} in a group, {2 * gradients / shard_ranks / 1e6:.3g} MB between groups"
        found.append(
            Sharing(
                name=f"hsdp over {shard_ranks}",
                text="shard within groups of ranks",
                shares=in_shards(shard_ranks),
                extra_bytes=sharded,
                price=price,
                setting="hsdp",
            )
        )
    return found


def _planned(planner: ConfigPlanner, changes: Mapping[str, Any], ways: Sequence[Sharing]) -> tuple[SharedPlan, ...]:
    peaks = planner.scaled_peaks(changes, [way.shares for way in ways])
    whole = planner.plan().peak_bytes
    return tuple(
        SharedPlan(
            sharing=way,
            peak_bytes=round(peak) + way.extra_bytes,
            saved_bytes=whole - round(peak) - way.extra_bytes,
        )
        for way, peak in zip(ways, peaks, strict=True)
    )
