"""One of two processes that train many small models in turn: with a planted fault between ranks, or healthy."""

import contextlib
import os
import signal
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gradwatch
from gradwatch.monitor.setup import own_sinks

NO_SINKS = {"html": {"enabled": False}, "tensorboard": {"enabled": False}}
STEPS = 48
LATE = 20
TEACHER = torch.randn(10, 4, generator=torch.Generator().manual_seed(5))


def make_model(*extra, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, 24), *extra, nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4))


def draw(generator, n=16):
    x = torch.randn(n, 10, generator=generator)
    return x, (x @ TEACHER).argmax(-1)


def average(model, divisor=None):
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size() if divisor is None else divisor


def broadcast(model):
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    return model


class Training:
    """A healthy training under DistributedDataParallel. Each case changes a part of it."""

    steps = STEPS

    def __init__(self, rank):
        self.rank = rank
        self.model = self.make()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.data = torch.Generator().manual_seed(100 + rank)
        torch.manual_seed(500 + rank)  # draws differ between the ranks

    def make(self):
        return DistributedDataParallel(make_model())

    def batch(self, step):
        return draw(self.data)

    def backward(self, x, y, step):
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(x), y)
        loss.backward()
        return loss

    def after(self, step):
        pass

    def run(self, folder):
        sinks = {} if type(self) is Training else NO_SINKS
        with gradwatch.watch(self.model, self.optimizer, run=folder, on_finding=None, sinks=sinks) as monitor:
            for step in range(self.steps):
                x, y = self.batch(step)
                loss = self.backward(x, y, step)
                self.optimizer.step()
                monitor.step(loss, batch=x)
                self.after(step)


class ByHand(Training):
    """The gradients are averaged by the loop."""

    divisor = None

    def make(self):
        return broadcast(make_model())

    def backward(self, x, y, step):
        loss = super().backward(x, y, step)
        average(self.model, self.divisor)
        return loss


class ClipAfter(ByHand):
    def backward(self, x, y, step):
        loss = super().backward(x, y, step)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        return loss


class ClipBefore(ByHand):
    def backward(self, x, y, step):
        loss = Training.backward(self, x, y, step)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        average(self.model)
        return loss


class Summed(ByHand):
    divisor = 1


class DividedTwice(ByHand):
    divisor = 4


class NeverBroadcast(ByHand):
    def make(self):
        return make_model(seed=self.rank)


class Accumulating(Training):
    def backward(self, x, y, step):
        self.optimizer.zero_grad()
        for part in range(2):
            rows = slice(8 * part, 8 * part + 8)
            with self.model.no_sync() if part == 0 else contextlib.nullcontext():
                loss = cross_entropy(self.model(x[rows]), y[rows])
                (loss / 2).backward()
        return loss


class Unsynchronized(Accumulating):
    """From step `LATE` on, no micro-batch averages the gradients."""

    def backward(self, x, y, step):
        if step < LATE:
            return super().backward(x, y, step)
        with self.model.no_sync():
            return Training.backward(self, x, y, step)


class Unwrapped(Training):
    def backward(self, x, y, step):
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model.module(x), y)
        loss.backward()
        return loss


class LeftOut(Training):
    """One parameter is left out of the average."""

    def make(self):
        model = make_model()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["2.weight"])
        return DistributedDataParallel(model)


class ChangedLate(Training):
    """The weights of a layer are changed on one rank only, as by a checkpoint that one rank loads."""

    def after(self, step):
        if step == LATE and self.rank == 1:
            with torch.no_grad():
                self.model.module[2].weight.mul_(1.1)


class SharedChange(ChangedLate):
    """The weights of a layer are changed on all ranks."""

    def after(self, step):
        if step == LATE:
            with torch.no_grad():
                self.model.module[2].weight.mul_(1.1)


class LoadedMoments(Training):
    """One rank starts with the state of an optimizer that was saved elsewhere."""

    def __init__(self, rank):
        super().__init__(rank)
        if rank == 0:
            self.load()

    def load(self):
        state = self.optimizer.state_dict()
        state["state"] = {
            i: {"momentum_buffer": torch.full_like(p, 0.02)} for i, p in enumerate(self.model.parameters())
        }
        self.optimizer.load_state_dict(state)


class LoadedLate(LoadedMoments):
    def __init__(self, rank):
        Training.__init__(self, rank)

    def after(self, step):
        if step == LATE and self.rank == 1:
            self.load()


class SharedMoments(LoadedLate):
    def after(self, step):
        if step == LATE:
            self.load()


class SameData(Training):
    def __init__(self, rank):
        super().__init__(rank)
        self.data.manual_seed(100)


class Overlapping(Training):
    """Rank 1 trails rank 0 by 10 batches of one stream."""

    def __init__(self, rank):
        super().__init__(rank)
        self.stream = draw(torch.Generator().manual_seed(1), 16 * (STEPS + 10))

    def batch(self, step):
        rows = slice(16 * (step + 10 * (1 - self.rank)), 16 * (step + 10 * (1 - self.rank)) + 16)
        return self.stream[0][rows], self.stream[1][rows]


class Shards(Training):
    """Each rank has a range of samples. The last third of the first range is the first third of the second."""

    def __init__(self, rank):
        super().__init__(rank)
        x, y = draw(torch.Generator().manual_seed(1), 800)
        own = torch.arange(320 * rank, 320 * rank + 480)[torch.randperm(480)]
        self.shard = x[own], y[own]

    def batch(self, step):
        rows = slice(16 * (step % 30), 16 * (step % 30) + 16)
        return self.shard[0][rows], self.shard[1][rows]


class Epochs(Training):
    """Three epochs of a sampler, with a padding of one sample."""

    def __init__(self, rank):
        super().__init__(rank)
        data = TensorDataset(*draw(torch.Generator().manual_seed(1), 511))
        self.sampler = DistributedSampler(data, 2, rank)
        self.loader = DataLoader(data, 16, sampler=self.sampler)
        self.batches = iter(())

    def batch(self, step):
        if step % 16 == 0:
            self.begin_epoch(step // 16)
            self.batches = iter(self.loader)
        return next(self.batches)

    def begin_epoch(self, epoch):
        self.sampler.set_epoch(epoch)


class EqualEpochs(Epochs):
    def begin_epoch(self, epoch):
        pass


class BadSample(Training):
    def batch(self, step):
        x, y = super().batch(step)
        if step == LATE and self.rank == 1:
            x[3, 4] = float("nan")
        return x, y


class Logarithm(Training):
    """The samples are weighted by the logarithm of an input, which is 0 once on rank 1."""

    least = 0.0

    def batch(self, step):
        x, y = super().batch(step)
        if step == LATE and self.rank == 1:
            x[3, 4] = 0
        return x, y

    def backward(self, x, y, step):
        self.optimizer.zero_grad()
        weight = 1 + x[:, 4].abs().clamp(min=self.least).log() / 10
        loss = (weight * cross_entropy(self.model(x), y, reduction="none")).mean()
        loss.backward()
        return loss


class Guarded(Logarithm):
    least = 1e-3


class OwnRate(Training):
    def after(self, step):
        if step == LATE and self.rank == 1:
            self.optimizer.param_groups[0]["lr"] *= 0.1


class SameDropout(Training):
    def __init__(self, rank):
        super().__init__(rank)
        torch.manual_seed(500)

    def make(self):
        return DistributedDataParallel(make_model(nn.Dropout(0.3)))


class Dropout(Training):
    def make(self):
        return DistributedDataParallel(make_model(nn.Dropout(0.3)))


class OwnStatistics(Training):
    def make(self):
        return DistributedDataParallel(make_model(nn.BatchNorm1d(24)), broadcast_buffers=False)


class BatchNorm(Training):
    def make(self):
        return DistributedDataParallel(make_model(nn.BatchNorm1d(24)))


class LocalSteps(ByHand):
    """Each rank trains alone, and the weights are averaged every 8 steps."""

    def backward(self, x, y, step):
        return Training.backward(self, x, y, step)

    def after(self, step):
        if step % 8 == 7:
            for p in self.model.parameters():
                dist.all_reduce(p.data)
                p.data /= dist.get_world_size()


class OwnAverage(ByHand):
    """The optimizer averages the gradients in its step, after all hooks."""

    def __init__(self, rank):
        super().__init__(rank)
        step, model = self.optimizer.step, self.model

        class Averaging(torch.optim.SGD):
            @torch.no_grad()
            def step(self, closure=None):
                average(model)
                return super().step(closure)

        del step
        self.optimizer = Averaging(self.model.parameters(), lr=0.05)

    def backward(self, x, y, step):
        return Training.backward(self, x, y, step)


class Uneven(Training):
    @property
    def steps(self):
        return STEPS - 10 * (1 - self.rank)

    def run(self, folder):
        with self.model.join():
            super().run(folder)


class Pipeline(Training):
    """Each rank has a model of its own."""

    def make(self):
        return make_model(*([nn.Tanh()] * self.rank))


class Killed(OwnRate):
    """A rank is killed, some steps after a fault between the ranks."""

    def after(self, step):
        super().after(step)
        if step == STEPS - 8 and self.rank == 1:
            time.sleep(1.5)  # its steps are on disk within a second
            os.kill(os.getpid(), signal.SIGKILL)

    def run(self, folder):
        with contextlib.suppress(RuntimeError):  # of the backward pass: the other rank is gone
            super().run(folder)


FAULTS = [
    Summed, DividedTwice, ClipBefore, NeverBroadcast, Unsynchronized, Unwrapped, LeftOut, ChangedLate, LoadedMoments,
    LoadedLate, SameData,
    Overlapping, Shards, EqualEpochs, BadSample, Logarithm, OwnRate, SameDropout, OwnStatistics,
]  # fmt: skip
HEALTHY = [
    Training, ByHand, ClipAfter, Accumulating, Dropout, BatchNorm, LocalSteps, OwnAverage, Uneven, Pipeline, Guarded,
    Epochs, SharedChange, SharedMoments,
]  # fmt: skip

REMEDIES = {
    "average_gradients": [(Unwrapped, Training), (Unsynchronized, Accumulating), (LeftOut, Training)],
    "clip_after_average": [(ClipBefore, ClipAfter)],
    "divide_by_ranks": [(Summed, ByHand), (DividedTwice, ByHand)],
    "broadcast_weights": [(NeverBroadcast, ByHand), (ChangedLate, SharedChange)],
    "load_optimizer": [(LoadedMoments, Training), (LoadedLate, SharedMoments)],
    "split_data": [(SameData, Training), (Overlapping, Training), (Shards, Training)],
    "set_epoch": [(EqualEpochs, Epochs)],
    "clean_data": [(BadSample, Training)],
    "record_ranks": [(Logarithm, Guarded)],
    "same_rates": [(OwnRate, Training)],
    "sync_statistics": [(OwnStatistics, BatchNorm)],
    "seed_by_rank": [(SameDropout, Dropout)],
}
"""By remedy: pairs of a faulty case and of the healthy case that differs from it by this remedy only."""


def check_settings():
    """Check the settings of sinks, which reads the sources of all of them."""
    own_sinks.check_sinks(NO_SINKS, has_directory=True)


def train_all(rank, folder):
    """Train each case on this rank, and in the end one that kills rank 1."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    for case in [*FAULTS, *HEALTHY]:
        case(rank).run(folder / case.__name__)
        dist.barrier()
    Killed(rank).run(folder / Killed.__name__)
