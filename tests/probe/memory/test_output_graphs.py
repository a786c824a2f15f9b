"""Loops that keep graphs are found with the line that keeps them; loops that only look so are not."""

import copy
from collections import defaultdict, deque

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import gradwatch
from gradwatch.probe.memory.graph_marks import FIRST_STEP, MARKED_STEPS, REST_STEPS

STEPS = FIRST_STEP + MARKED_STEPS + REST_STEPS + 3
FOUND_AT = FIRST_STEP + MARKED_STEPS + REST_STEPS - 1
MEMORY = ("graph-kept", "evaluated-with-graph", "memory-grows")
RECORD = []


class Net(nn.Module):
    """A model with a place to keep things, and a hidden state if it is given one."""

    def __init__(self):
        super().__init__()
        self.encoder, self.dropout, self.head = nn.Linear(4, 6), nn.Dropout(0.1), nn.Linear(6, 2)
        self.kept, self.keeps = [], False

    def forward(self, x, hidden=None):
        hidden = self.encoder(x) if hidden is None else hidden + self.encoder(x)
        if self.keeps:
            self.kept.append(hidden)
        return self.head(self.dropout(hidden)), hidden


class Loop:
    """What every loop needs: a model, an optimizer, batches and the monitor."""

    def __init__(self, net=None, optimizers=1):
        torch.manual_seed(0)
        RECORD.clear()
        self.net = net or Net()
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.01)
        self.losses, self.metrics = [], defaultdict(list)
        self.monitor = gradwatch.watch(self.net, self.optimizer, on_finding=lambda finding: None)

    def batch(self):
        return torch.randn(8, 4), torch.arange(8) % 2

    def loss(self):
        x, y = self.batch()
        return F.cross_entropy(self.net(x)[0], y)

    def update(self, loss, **options):
        self.optimizer.zero_grad()
        loss.backward(**options)
        self.optimizer.step()

    def train(self, loss=None):
        loss = self.loss() if loss is None else loss
        self.update(loss)
        return loss


def kept_sum(loop):
    total = 0.0
    for _ in range(STEPS):
        loss = loop.train()
        total += loss
        loop.monitor.step(loss)


def kept_losses(loop):
    losses = []
    for _ in range(STEPS):
        loss = loop.train()
        losses.append(loss)
        loop.monitor.step(loss.item())


def kept_losses_beside_an_evaluation(loop):
    for _ in range(2):
        losses = []
        for _ in range(STEPS):
            loss = loop.train()
            losses.append(loss)
            loop.monitor.step(loss.item())
        losses = []
        for _ in range(2):
            losses.append(loop.loss())


def kept_outputs(loop):
    metrics = defaultdict(list)
    for _ in range(STEPS):
        x, y = loop.batch()
        outputs = loop.net(x)[0]
        loop.train(F.cross_entropy(outputs, y))
        metrics["outputs"].append(outputs)
        loop.monitor.step(None)


def kept_average(loop):
    average = torch.zeros(())
    for _ in range(STEPS):
        loss = loop.train()
        average = 0.9 * average + 0.1 * loss
        loop.monitor.step(loss)


def carried_state(loop):
    hidden = torch.zeros(8, 6)
    for _ in range(STEPS):
        x, y = loop.batch()
        outputs, hidden = loop.net(x, hidden)
        loss = F.cross_entropy(outputs, y)
        loop.update(loss, retain_graph=True)
        loop.monitor.step(loss)


def kept_in_attribute(loop):
    for _ in range(STEPS):
        loss = loop.train()
        loop.losses.append(loss)
        loop.monitor.step(loss)


def kept_in_model(loop):
    loop.net.keeps = True
    for _ in range(STEPS):
        loop.monitor.step(loop.train())


def kept_in_global(loop):
    for step in range(STEPS):
        loss = loop.train()
        RECORD.append({"step": step, "loss": loss})
        loop.monitor.step(loss)


def kept_second_view(loop):
    second_views = []
    for _ in range(STEPS):
        x, y = loop.batch()
        loss = F.cross_entropy(loop.net(x)[0], y)
        second = loop.net(x + 0.1)[0]
        second_views.append(second)
        loop.monitor.step(loop.train(loss + F.mse_loss(second, torch.zeros(8, 2))))


def kept_metrics(loop):
    margins = deque(maxlen=1000)
    for _ in range(STEPS):
        x, y = loop.batch()
        outputs = loop.net(x)[0]
        loop.train(F.cross_entropy(outputs, y))
        margins.append(outputs.softmax(1).max())
        loop.monitor.step(None)


def kept_by_batch(loop):
    hidden_states = {}
    for step in range(STEPS):
        x, y = loop.batch()
        outputs, hidden = loop.net(x)
        hidden_states[step % (STEPS - 1)] = hidden
        loop.monitor.step(loop.train(F.cross_entropy(outputs, y)))


def kept_for_an_epoch(loop):
    outputs_of_epoch = []
    for step in range(STEPS):
        x, y = loop.batch()
        outputs = loop.net(x)[0]
        outputs_of_epoch.append(outputs)
        loop.monitor.step(loop.train(F.cross_entropy(outputs, y)))
        if step == STEPS - 2:
            outputs_of_epoch.clear()


def kept_penalties(loop):
    penalties = 0.0
    for _ in range(STEPS):
        penalty = sum(weight.square().sum() for weight in loop.net.parameters())
        penalties = penalties + penalty
        loop.monitor.step(loop.train(loop.loss() + 0.01 * penalty))


LEAKS = {
    kept_sum: "`total`, {file}:{line}: `total += loss`",
    kept_losses: "`losses`, {file}:{line}: `losses.append(loss)`",
    kept_losses_beside_an_evaluation: "`losses`, {file}:{line}: `losses.append(loss)`",
    kept_outputs: '`metrics`, {file}:{line}: `metrics["outputs"].append(outputs)`',
    kept_average: "`average`, {file}:{line}: `average = 0.9 * average + 0.1 * loss`",
    carried_state: "`hidden`, {file}:{line}: `outputs, hidden = loop.net(x, hidden)`",
    kept_in_attribute: "`loop.losses`",
    kept_in_model: "`loop.net.kept`, {file}:{line}: `self.kept.append(hidden)`",
    kept_in_global: '`RECORD`, {file}:{line}: `RECORD.append({{"step": step, "loss": loss}})`',
    kept_second_view: "`second_views`, {file}:{line}: `second_views.append(second)`",
    kept_penalties: "`penalties`, {file}:{line}: `penalties = penalties + penalty`",
    kept_metrics: "`margins`, {file}:{line}: `margins.append(outputs.softmax(1).max())`",
    kept_by_batch: "`hidden_states`, {file}:{line}: `hidden_states[step % (STEPS - 1)] = hidden`",
    kept_for_an_epoch: "`outputs_of_epoch`, {file}:{line}: `outputs_of_epoch.append(outputs)`",
}


@pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: leak.__name__)
def test_a_leak_is_found_with_the_variable_and_the_line_that_keep_it(leak):
    loop = Loop()
    leak(loop)
    event = next(event for event in loop.monitor.history.events if event.kind == "graph-kept")
    loop.monitor.close()

    assert event.step == FOUND_AT
    by = LEAKS[leak].format(file="{file}", line="{line}")
    for part in by.split("{file}:{line}"):
        assert part in event.text
    if "{file}" in by:
        assert "test_output_graphs.py:" in event.text
    assert [finding.kind for finding in loop.monitor.findings()] == ["graph-leak"]


def plain(loop):
    for _ in range(STEPS):
        loop.monitor.step(loop.train())


def numbers_kept(loop):
    total, losses, average = 0.0, [], 0.0
    for _ in range(STEPS):
        loss = loop.train()
        total += loss.item()
        losses.append(loss.detach())
        average = 0.9 * average + 0.1 * loss.detach()
        loop.monitor.step(loss)


def accumulation(loop):
    for _ in range(STEPS):
        parts = [loop.loss() / 3 for _ in range(3)]
        loss = sum(parts)
        loop.update(loss)
        loop.monitor.step(loss)


def truncated_backpropagation(loop):
    hidden = torch.zeros(8, 6)
    for _ in range(STEPS):
        losses = []
        for _ in range(4):
            x, y = loop.batch()
            outputs, hidden = loop.net(x, hidden)
            losses.append(F.cross_entropy(outputs, y))
        loss = torch.stack(losses).mean()
        loop.update(loss)
        hidden = hidden.detach()
        loop.monitor.step(loss)


def episodes(loop):
    log_probs, rewards = [], []
    for _ in range(STEPS):
        for _ in range(5):
            policy = torch.distributions.Categorical(logits=loop.net(torch.randn(1, 4))[0])
            action = policy.sample()
            log_probs.append(policy.log_prob(action))
            rewards.append(float(action))
        loss = -(torch.cat(log_probs) * (torch.tensor(rewards) - 0.5)).sum()
        loop.update(loss)
        loop.monitor.step(loss)
        log_probs.clear()
        rewards.clear()


def two_backward_passes(loop):
    for _ in range(STEPS):
        loss = loop.loss()
        loop.optimizer.zero_grad()
        loss.backward(retain_graph=True)
        (0.1 * loss).backward()
        loop.optimizer.step()
        loop.monitor.step(loss)


def replay_buffer(loop):
    buffer = []
    for _ in range(STEPS):
        x, y = loop.batch()
        outputs = loop.net(x)[0]
        buffer.append((x, outputs.detach()))
        loss = loop.train(F.cross_entropy(outputs, y))
        loop.monitor.step(loss)


def last_passes_kept(loop):
    last = deque(maxlen=12)
    for _ in range(STEPS):
        x, y = loop.batch()
        first, second = loop.net(x)[0], loop.net(x + 0.1)[0]
        last.extend((first, second))
        loop.monitor.step(loop.train(F.cross_entropy(first + second, y)))


def outputs_of_an_epoch_without_graph(loop):
    kept = []
    for _ in range(STEPS):
        x, y = loop.batch()
        outputs, hidden = loop.net(x)
        kept.append({"x": x, "outputs": outputs.detach(), "hidden": hidden.detach()})
        loop.monitor.step(loop.train(F.cross_entropy(outputs, y)))


def best_loss_kept(loop):
    best = None
    for _ in range(STEPS):
        loss = loop.train()
        best = loss if best is None or loss < best else best
        loop.monitor.step(loss)


def recent_losses(loop):
    recent = deque(maxlen=8)
    for _ in range(STEPS):
        loss = loop.train()
        recent.append(loss)
        loop.monitor.step(loss)


def cached_data(loop):
    cache = {}
    for step in range(STEPS):
        x, y = cache.setdefault(step % 12, loop.batch())
        loop.monitor.step(loop.train(F.cross_entropy(loop.net(x)[0], y)))


def list_of_checkpoints(loop):
    saved = []
    for _ in range(STEPS):
        loop.monitor.step(loop.train())
        saved.append(copy.deepcopy(loop.net.state_dict()))


def gradient_penalty(loop):
    for _ in range(STEPS):
        x, y = loop.batch()
        x.requires_grad_()
        loss = F.cross_entropy(loop.net(x)[0], y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + slope.square().sum()
        loop.monitor.step(loop.train(loss))


def evaluation_without_graph(loop):
    history = []
    for step in range(STEPS):
        loop.monitor.step(loop.train())
        if step % 4 == 3:
            loop.net.eval()
            with torch.no_grad():
                history.append(sum(loop.loss() for _ in range(4)))
            loop.net.train()


def tuning_in_evaluation_mode(loop):
    loop.net.eval()
    for _ in range(STEPS):
        parts = [loop.loss() for _ in range(4)]
        loop.monitor.step(loop.train(torch.stack(parts).mean()))


def attack_in_evaluation_mode(loop):
    for _ in range(STEPS):
        loop.net.eval()
        x, y = loop.batch()
        for _ in range(4):
            x.requires_grad_()
            (slope,) = torch.autograd.grad(F.cross_entropy(loop.net(x)[0], y), x)
            x = (x + 0.01 * slope.sign()).detach()
        loop.net.train()
        loop.monitor.step(loop.train(F.cross_entropy(loop.net(x)[0], y)))


def constant_graph(loop):
    scale = nn.Parameter(torch.ones(2))
    shared = F.softplus(scale * 2)
    for _ in range(STEPS):
        x, y = loop.batch()
        loss = F.cross_entropy(loop.net(x)[0] * shared, y)
        loop.update(loss, retain_graph=True)
        loop.monitor.step(loss)


def cycles_of_objects(loop):
    for _ in range(STEPS):
        loss = loop.train()
        node = {"loss": loss}
        node["itself"] = node
        loop.monitor.step(loss)


def averaged_weights(loop):
    average = AveragedModel(loop.net)
    for _ in range(STEPS):
        loop.monitor.step(loop.train())
        average.update_parameters(loop.net)


def inner_loop(loop):
    for _ in range(STEPS):
        weights = dict(loop.net.named_parameters())
        for _ in range(2):
            x, y = loop.batch()
            loss = F.cross_entropy(torch.func.functional_call(loop.net, weights, (x,))[0], y)
            slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), slopes, strict=True)}
        x, y = loop.batch()
        loss = F.cross_entropy(torch.func.functional_call(loop.net, weights, (x,))[0], y)
        loop.monitor.step(loop.train(loss))


def losses_of_a_short_epoch(loop):
    for _ in range(STEPS // 5):
        losses = []
        for _ in range(5):
            losses.append(loop.train())
            loop.monitor.step(losses[-1])


def loader_with_prefetch(loop):
    waiting = deque(loop.batch() for _ in range(3))
    for _ in range(STEPS):
        x, y = waiting.popleft()
        waiting.append(loop.batch())
        loop.monitor.step(loop.train(F.cross_entropy(loop.net(x)[0], y)))


def targets_of_a_teacher(loop):
    teacher = copy.deepcopy(loop.net).eval()
    for _ in range(STEPS):
        x, _ = loop.batch()
        target = teacher(x)[0].detach().softmax(1)
        loop.monitor.step(loop.train(F.cross_entropy(loop.net(x)[0], target)))


def loader_with_workers(loop):
    data = TensorDataset(torch.randn(8 * STEPS // 4, 4), torch.arange(8 * STEPS // 4) % 2)
    for is_persistent in (True, False):
        loader = DataLoader(data, 8, num_workers=1, persistent_workers=is_persistent, pin_memory=False)
        for _ in range(3):
            for x, y in loader:
                loop.monitor.step(loop.train(F.cross_entropy(loop.net(x)[0], y)))


def compiled_again_for_each_batch_size(loop):
    compiled = torch.compile(loop.net, backend="aot_eager", dynamic=False)
    sizes = [2, 3, 4]
    for step in range(STEPS):
        size = sizes[min(step // (FIRST_STEP + 1), len(sizes) - 1)]  # also within the steps that are marked
        x, y = torch.randn(size, 4), torch.arange(size) % 2
        loop.monitor.step(loop.train(F.cross_entropy(compiled(x)[0], y)))
        if step % 8 == 7:
            loop.net.eval()
            with torch.no_grad():
                compiled(x)
            loop.net.train()


HEALTHY = (
    plain,
    numbers_kept,
    accumulation,
    truncated_backpropagation,
    episodes,
    two_backward_passes,
    replay_buffer,
    last_passes_kept,
    outputs_of_an_epoch_without_graph,
    best_loss_kept,
    recent_losses,
    cached_data,
    list_of_checkpoints,
    gradient_penalty,
    evaluation_without_graph,
    tuning_in_evaluation_mode,
    attack_in_evaluation_mode,
    constant_graph,
    cycles_of_objects,
    averaged_weights,
    inner_loop,
    losses_of_a_short_epoch,
    loader_with_prefetch,
    loader_with_workers,
    compiled_again_for_each_batch_size,
    targets_of_a_teacher,
)


@pytest.mark.parametrize("run", HEALTHY, ids=lambda run: run.__name__)
def test_a_loop_that_keeps_no_graphs_raises_no_alarm(run):
    loop = Loop()
    run(loop)
    loop.monitor.close()

    assert [event.text for event in loop.monitor.history.events if event.kind in MEMORY] == []


def test_a_gan_with_two_losses_raises_no_alarm():
    torch.manual_seed(0)
    generator, critic = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizers = [torch.optim.Adam(model.parameters(), 1e-3) for model in (generator, critic)]
    monitor = gradwatch.watch({"generator": generator, "critic": critic}, optimizers, on_finding=lambda finding: None)
    for _ in range(STEPS):
        fake = generator(torch.randn(8, 3))
        critic_loss = critic(fake.detach()).mean() - critic(torch.randn(8, 4)).mean()
        optimizers[1].zero_grad()
        critic_loss.backward()
        optimizers[1].step()
        generator_loss = -critic(fake).mean()
        optimizers[0].zero_grad()
        generator_loss.backward()
        optimizers[0].step()
        monitor.step(critic_loss + generator_loss)
    monitor.close()

    assert [event.text for event in monitor.history.events if event.kind in MEMORY] == []


class Unreadable:
    """An object that refuses to be looked at."""

    @property
    def __dict__(self):
        raise RuntimeError("not now")


def test_a_variable_that_cannot_be_looked_at_costs_the_place_and_not_the_finding():
    unreadable = Unreadable()
    loop = Loop()
    kept_losses(loop)
    loop.monitor.close()

    (event,) = [event for event in loop.monitor.history.events if event.kind == "graph-kept"]
    assert event.text == "the autograd graph of every step since step 2 is kept in memory"
    assert unreadable


def evaluate(loop):
    loop.net.eval()
    loss = sum(loop.loss() for _ in range(4))
    loop.net.train()
    return loss


def evaluate_by_number(loop):
    loop.net.eval()
    loss = sum(loop.loss().item() for _ in range(4))
    loop.net.train()
    return loss


@pytest.mark.parametrize(
    ("evaluation", "alive", "severity"), [(evaluate, 4, "warning"), (evaluate_by_number, 1, "info")]
)
def test_an_evaluation_with_graphs_is_found_with_its_line_and_warned_of_if_it_keeps_them(evaluation, alive, severity):
    loop = Loop()
    for step in range(STEPS):
        loop.monitor.step(loop.train())
        if step % 8 == 7:
            evaluation(loop)
    loop.monitor.close()

    (finding,) = [f for f in loop.monitor.findings() if f.kind == "evaluation-with-graph"]
    assert "4 forward passes" in finding.message
    assert "`return F.cross_entropy(self.net(x)[0], y)`" in finding.message
    assert finding.onset == 8, "the first step after the evaluation"
    assert {q.key: q.value for q in finding.evidence}["evaluation.alive"] == alive
    assert str(finding.severity) == severity


def test_hooks_are_gone_after_the_marked_steps_and_an_evaluation_without_graphs():
    loop = Loop()
    for step in range(STEPS):
        loop.monitor.step(loop.train())
        if step == 3:
            loop.net.eval()
            with torch.inference_mode():
                loop.loss()
            loop.net.train()

    assert not [hook for hook in loop.net._forward_hooks.values() if "OutputGraphs" in repr(hook._callback)]
    loop.monitor.close()


def test_marks_change_no_number():
    plain_net, watched = Net(), Net()
    watched.load_state_dict(plain_net.state_dict())
    loop = Loop(watched)
    for _ in range(STEPS):
        loop.monitor.step(loop.train())
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(plain_net.parameters(), 0.01)
    for _ in range(STEPS):
        x, y = torch.randn(8, 4), torch.arange(8) % 2
        optimizer.zero_grad()
        F.cross_entropy(plain_net(x)[0], y).backward()
        optimizer.step()

    pairs = zip(plain_net.parameters(), watched.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    loop.monitor.close()
