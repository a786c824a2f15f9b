"""The graph of a loss: faults in its formulas and wiring are found, lookalikes are not, and reading leaves no trace."""

import gc
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradwatch.probe.graph import reader as module
from gradwatch.probe.graph.graph import Graph
from gradwatch.probe.graph.reader import LossGraphReader
from gradwatch.probe.parameters import list_parameters

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
TARGETS = torch.linspace(-1, 1, len(X))
CLASSES = torch.arange(16) % 3
BINARY = (torch.arange(16) % 2).float()[:, None]
SOFT = torch.softmax(torch.randn(16, 3, generator=torch.Generator().manual_seed(1)), 1)


def mlp(outputs=3, *last):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, outputs), *last)


DESCRIPTIONS = (
    "graph-chance",
    "graph-classes",
    "graph-matrix",
    "graph-adversary",
    "graph-side-by-side",
    "graph-output-pairs",
    "graph-depths",
)
"""Events that tell how a model is made, and of no mistake."""


def read(model, loss_of, *, step=0, backward=True, **context):
    """Return the events of a loss that tell of a mistake as (kind, layer), and as they are."""
    reader = LossGraphReader(model, *list_parameters(model))
    loss = loss_of(model)
    if backward:
        loss.backward()
    events = reader.read(loss, step=step, **context)
    told = [event for event in events if event.kind not in DESCRIPTIONS]
    return {(event.kind.removeprefix("graph-"), event.layer) for event in told}, told


def half(model):
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(model(X), CLASSES)


def by_hand(model):
    powers = model(X).exp()
    return F.cross_entropy(powers / powers.sum(1, keepdim=True), CLASSES)


class Pooled(nn.Module):
    """Weighs values by a softmax of sigmoids, before its head or behind it."""

    def __init__(self, *, late):
        super().__init__()
        self.energy, self.head, self.late = nn.Linear(8, 1), nn.Linear(8, 3), late

    def forward(self, x):
        parts = torch.stack([x, -x, x.square()], 1)
        weights = torch.sigmoid(self.energy(parts)).softmax(1)
        return (weights * self.head(parts)).sum(1) if self.late else self.head((weights * parts).sum(1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(8, n) for n in (8, 8, 8, 3))

    def forward(self, x):
        weights = torch.softmax(self.query(x) @ self.key(x).T / 8**0.5, -1)
        return self.out(weights @ self.value(x))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(8, 2), nn.Softmax(1))
        self.experts = nn.ModuleList(nn.Linear(8, 3) for _ in range(2))

    def forward(self, x):
        return (self.gate(x)[:, :, None] * torch.stack([e(x) for e in self.experts], 1)).sum(1)


class Mixture(Experts):
    """The same, of experts that give probabilities."""

    def forward(self, x):
        return (self.gate(x).unsqueeze(2) * torch.stack([e(x).softmax(1) for e in self.experts], 1)).sum(1)


def policy(model):
    return -torch.distributions.Categorical(logits=model(X)).log_prob(CLASSES).mean()


PROBABILITIES = {
    "softmax, cross entropy": (mlp(3, nn.Softmax(1)), lambda m: F.cross_entropy(m(X), CLASSES), "3"),
    "as a function, smoothed": (
        mlp(),
        lambda m: F.cross_entropy(m(X).softmax(1), CLASSES, label_smoothing=0.1, weight=torch.ones(3)),
        "2",
    ),
    "soft targets": (mlp(3, nn.Softmax(1)), lambda m: F.cross_entropy(m(X), SOFT), "3"),
    "sigmoid, cross entropy": (mlp(3, nn.Sigmoid()), lambda m: F.cross_entropy(m(X), CLASSES), "3"),
    "sigmoid, with logits": (
        mlp(1, nn.Sigmoid()),
        lambda m: F.binary_cross_entropy_with_logits(m(X).squeeze(1), BINARY[:, 0]),
        "3",
    ),
    "shares of a positive number, cross entropy": (
        mlp(),
        lambda m: F.cross_entropy((z := F.softplus(m(X))) / z.sum(1, keepdim=True), CLASSES),
        "2",
    ),
    "a shifted tanh, with logits": (
        mlp(1),
        lambda m: F.binary_cross_entropy_with_logits((m(X).tanh() + 1) / 2, BINARY),
        "2",
    ),
    "1 / (1 + exp(-x)), with logits": (
        mlp(1),
        lambda m: F.binary_cross_entropy_with_logits(1 / (1 + (-m(X)).exp()), BINARY),
        "2",
    ),
    "exp(x) / (1 + exp(x)), with logits": (
        mlp(1),
        lambda m: F.binary_cross_entropy_with_logits((e := m(X).exp()) / (1 + e), BINARY),
        "2",
    ),
    "a ranking of two sigmoids": (
        mlp(1),
        lambda m: -F.logsigmoid(m(X).sigmoid() - m(X.flip(0)).sigmoid()).mean(),
        "2",
    ),
    "sigmoid, soft margin": (
        mlp(3, nn.Sigmoid()),
        lambda m: F.multilabel_soft_margin_loss(m(X), SOFT.round()),
        "3",
    ),
    "softmax, CTC": (
        mlp(3, nn.Softmax(1)),
        lambda m: F.ctc_loss(m(X)[:, None], torch.ones(1, 2, dtype=torch.long), (16,), (2,)),
        "3",
    ),
    "softmax, likelihood": (mlp(3, nn.Softmax(1)), lambda m: F.nll_loss(m(X), CLASSES), "3"),
    "clamped, likelihood": (mlp(3, nn.Softmax(1)), lambda m: F.nll_loss(m(X).clamp(1e-7, 1) + 1e-9, CLASSES), "3"),
    "divergence": (mlp(3, nn.Softmax(1)), lambda m: F.kl_div(m(X), SOFT, reduction="batchmean"), "3"),
    "a policy's logits": (mlp(3, nn.Softmax(1)), policy, "3"),
    "by hand": (mlp(), by_hand, "2"),
    "sigmoid, a focal loss by hand": (
        mlp(1, nn.Sigmoid()),
        lambda m: ((1 - (p := torch.sigmoid(m(X)))) ** 2 * F.binary_cross_entropy(p, BINARY, reduction="none")).mean(),
        "3",
    ),
    "softmax, the log of another": (
        mlp(3, nn.Softmax(1)),
        lambda m: -(SOFT * torch.log(m(X).softmax(1) + 1e-9)).sum(1).mean(),
        "3",
    ),
    "an ensemble's mean": (mlp(3, nn.Softmax(1)), lambda m: F.cross_entropy((m(X) + m(-X)) / 2, CLASSES), "3"),
    "a mixture's sum": (Mixture(), lambda m: F.cross_entropy(m(X), CLASSES), "gate.1"),
    "under autocast": (mlp(3, nn.Softmax(1)), half, "3"),
    "one of two losses": (
        mlp(3, nn.Softmax(1)),
        lambda m: 0.5 * F.cross_entropy(m(X), CLASSES) + 1e-3 * m[0].weight.square().sum(),
        "3",
    ),
    "per pixel": (
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.Softmax(1)),
        lambda m: F.cross_entropy(m(torch.ones(2, 1, 5, 5)), torch.zeros(2, 3, 3, dtype=torch.long)),
        "1",
    ),
    "checkpointed": (
        mlp(3, nn.Softmax(1)),
        lambda m: F.cross_entropy(checkpoint(m, X, use_reentrant=False), CLASSES),
        "3",
    ),
}


@pytest.mark.parametrize("name", PROBABILITIES)
def test_probabilities_are_found_where_the_loss_expects_something_else(name):
    model, loss_of, layer = PROBABILITIES[name]
    assert ("probabilities", layer) in read(model, loss_of)[0]


HEALTHY = {
    "scores": (mlp(), lambda m: F.cross_entropy(m(X), CLASSES, label_smoothing=0.1)),
    "log_softmax, likelihood": (mlp(), lambda m: F.nll_loss(F.log_softmax(m(X), 1), CLASSES)),
    "log of a guarded softmax": (mlp(), lambda m: F.nll_loss(torch.log(m(X).softmax(1) + 1e-9), CLASSES)),
    "distillation": (mlp(), lambda m: F.kl_div(F.log_softmax(m(X), 1), SOFT, reduction="batchmean")),
    "a weighted squared error": (mlp(3, nn.Softmax(1)), lambda m: ((SOFT - 0.5 * m(X)) ** 2).mean()),
    "sigmoid, binary cross entropy": (mlp(1, nn.Sigmoid()), lambda m: F.binary_cross_entropy(m(X), BINARY)),
    "with logits": (mlp(1), lambda m: F.binary_cross_entropy_with_logits(m(X), BINARY)),
    "a ranking of two scores": (mlp(1), lambda m: -F.logsigmoid(m(X) - m(X.flip(0))).mean()),
    "scores of unit length": (mlp(), lambda m: F.cross_entropy((z := m(X)) / z.norm(dim=1, keepdim=True), CLASSES)),
    "scores that a tanh bounds": (mlp(), lambda m: F.cross_entropy(30 * (m(X) / 30).tanh() + 1, CLASSES)),
    "attention": (Attention(), lambda m: F.cross_entropy(m(X), CLASSES)),
    "a mixture of experts": (Experts(), lambda m: F.cross_entropy(m(X), CLASSES)),
    "a policy's probabilities": (
        mlp(3, nn.Softmax(1)),
        lambda m: -torch.distributions.Categorical(m(X)).log_prob(CLASSES).mean(),
    ),
    "a policy's scores": (mlp(), policy),
    "equal shapes": (mlp(1), lambda m: F.mse_loss(m(X), BINARY)),
    "a mask": (mlp(), lambda m: (F.cross_entropy(m(X), CLASSES, reduction="none") * BINARY[:, 0]).sum()),
    "all pairs on purpose": (mlp(1), lambda m: (m(X)[:, 0][:, None] - BINARY[:, 0][None]).abs().mean()),
    "a gate whose scores another gate scales": (
        Attention(),
        lambda m: F.mse_loss(torch.sigmoid(m(X) * torch.sigmoid(m(-X))), SOFT),
    ),
    "a softmax of sigmoids that pools": (Pooled(late=False), lambda m: F.cross_entropy(m(X), CLASSES)),
    "a softmax of sigmoids that weighs scores": (Pooled(late=True), lambda m: F.cross_entropy(m(X), CLASSES)),
    "a temperature": (mlp(3, nn.Sigmoid()), lambda m: F.cross_entropy(m(X) * 20, CLASSES)),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_graph_has_no_events(name):
    assert read(*HEALTHY[name])[0] == set()


BOUNDED = {
    "ReLU, cross entropy": (mlp(3, nn.ReLU()), lambda m: F.cross_entropy(m(X), CLASSES), None),
    "ReLU, likelihood": (mlp(3, nn.ReLU()), lambda m: F.nll_loss(m(X).log_softmax(1), CLASSES), None),
    "ReLU, with logits": (mlp(1, nn.ReLU()), lambda m: F.binary_cross_entropy_with_logits(m(X), BINARY), None),
    "tanh, a policy": (mlp(3, nn.Tanh()), policy, math.log(1 + 2 * math.exp(-2))),
    "tanh, with logits": (
        mlp(1, nn.Tanh()),
        lambda m: F.binary_cross_entropy_with_logits(m(X).squeeze(1), BINARY[:, 0]),
        math.log(1 + math.exp(-1)),
    ),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_scores_that_an_activation_bounds_are_found_with_the_lowest_loss(name):
    model, loss_of, floor = BOUNDED[name]
    found, events = read(model, loss_of)
    assert ("bounded-scores", "2") in found
    (event,) = (event for event in events if event.kind == "graph-bounded-scores")
    assert event.values.get("floor") == pytest.approx(floor)


def test_scores_that_an_activation_does_not_bound_are_not():
    pooled = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    images = torch.randn(16, 1, 5, 5)  # SqueezeNet ends like this
    assert read(pooled, lambda m: F.cross_entropy(m(images), CLASSES))[0] == set()
    assert read(mlp(3, nn.LeakyReLU()), lambda m: F.cross_entropy(m(X), CLASSES))[0] == set()
    assert read(mlp(3, nn.Tanh()), lambda m: F.cross_entropy(10 * m(X), CLASSES))[0] == set()
    assert read(mlp(3, nn.ReLU()), lambda m: F.mse_loss(m(X), SOFT))[0] == set()


def test_raw_scores_into_a_likelihood_are_found():
    assert read(mlp(), lambda m: F.nll_loss(m(X), CLASSES))[0] == {("scores", "2")}


def test_raw_scores_into_a_divergence_are_found():
    shares = torch.rand(len(X), mlp()(X).shape[1]).softmax(1)
    assert read(mlp(), lambda m: F.kl_div(m(X), shares, reduction="batchmean"))[0] == {("scores", "2")}
    assert not read(mlp(), lambda m: F.kl_div(m(X).log_softmax(1), shares, reduction="batchmean"))[0]


def test_raw_scores_of_a_recurrent_layer_are_found():
    model = nn.ModuleDict({"rnn": nn.GRU(4, 6, batch_first=True), "head": nn.Linear(6, 5)})
    inputs, lengths = torch.randn(3, 8, 4), torch.full((3,), 8)

    def loss(m):
        scores = m["head"](m["rnn"](inputs)[0]).transpose(0, 1)
        return F.ctc_loss(scores, torch.randint(1, 5, (3, 2)), lengths, torch.full((3,), 2))

    assert read(model, loss)[0] == {("scores", "head")}


def test_a_log_softmax_over_the_batch_is_found_at_the_likelihood():
    assert read(mlp(), lambda m: F.nll_loss(m(X).log_softmax(0), CLASSES))[0] == {("over-batch", "2")}
    assert read(mlp(), lambda m: F.cross_entropy(m(X).log_softmax(0), CLASSES))[0] == {("over-batch", "2")}
    assert read(mlp(), lambda m: F.cross_entropy(m(X).log_softmax(1), CLASSES))[0] == set()
    assert read(mlp(), lambda m: F.nll_loss((m(X).softmax(-2) + 1e-9).log(), CLASSES))[0] >= {("over-batch", "2")}
    assert read(mlp(), lambda m: F.nll_loss(m(X).log_softmax(-1), CLASSES))[0] == set()
    assert read(mlp(), lambda m: F.nll_loss(m(X[0]).log_softmax(0), CLASSES[0]))[0] == set()  # one sample, no batch
    assert read(mlp(16), lambda m: -m(X).log_softmax(0).diagonal().mean())[0] == set()  # a contrast within the batch


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_the_lowest_loss_is_that_of_certain_and_right_predictions(classes):
    model = nn.Sequential(nn.Linear(8, classes), nn.Softmax(1))
    target = torch.arange(16) % classes
    (event,) = read(model, lambda m: F.cross_entropy(m(X), target))[1]

    perfect = F.cross_entropy(F.one_hot(target, classes).float(), target)
    assert event.values["floor"] == pytest.approx(float(perfect), rel=1e-6)
    assert f"below {float(perfect):.2f}" in event.text


BROADCAST = {
    "mse_loss": lambda m: F.mse_loss(m(X), BINARY[:, 0]),
    "smooth_l1_loss": lambda m: F.smooth_l1_loss(m(X).squeeze(), BINARY),
    "by hand": lambda m: ((m(X) - BINARY[:, 0]) ** 2).mean(),
    "the other way round": lambda m: (BINARY - m(X)[:, 0]).abs().mean(),
    "the ratio of a policy": lambda m: (
        -torch.min((m(X) - BINARY[:, 0]).exp() * 2, (m(X) - BINARY[:, 0]).exp().clamp(0.8, 1.2) * 2).mean()
    ),
}


@pytest.mark.parametrize("name", BROADCAST)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_target_that_is_broadcast_against_the_prediction_is_found(name):
    found, (event, *_) = read(mlp(1), BROADCAST[name])
    assert found == {("broadcast", "2")}
    assert "(16, 1)" in event.text
    assert "16 x 16" in event.text


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(lambda pooled: F.mse_loss(pooled, TARGETS), id="mse_loss"),
        pytest.param(lambda pooled: (pooled.squeeze() - TARGETS).abs().mean(), id="by hand"),
        pytest.param(lambda pooled: F.smooth_l1_loss(pooled[0], TARGETS), id="smooth_l1_loss"),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_prediction_that_is_pooled_over_all_samples_is_found(loss):
    assert {kind for kind, _ in read(mlp(1), lambda m: loss(m(X).mean(0, keepdim=True)))[0]} == {"pooled"}


def test_a_single_prediction_of_a_single_sample_is_not():
    found, _ = read(mlp(1), lambda m: F.mse_loss(m(X[:1]).expand(len(X), 1), TARGETS[:, None]))
    assert not found
    found, _ = read(mlp(1), lambda m: (m(X).mean() - TARGETS.mean()).square())
    assert not found


class Cut(nn.Module):
    """The encoder is detached, the auxiliary head not used."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head, self.auxiliary = mlp(8), mlp(3), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.encoder(x).detach())


def test_the_place_where_the_graph_is_cut_is_named():
    _, events = read(Cut(), lambda m: F.cross_entropy(m(X), CLASSES))
    assert {(e.kind, e.layer) for e in events} == {("graph-cut", "encoder"), ("graph-cut", "auxiliary")}
    assert any("4 tensors: the graph is cut between encoder.2 and head.0" in e.text for e in events)


def test_what_a_graph_hides_is_not_taken_for_cut():
    model = Cut()
    x = X.clone().requires_grad_()  # or the reentrant kind has no gradients
    found, _ = read(model, lambda m: F.cross_entropy(checkpoint(m.head, x, use_reentrant=True), CLASSES))
    assert "cut" not in {kind for kind, _ in found}, "its parameters are inside"
    assert read(model, lambda m: F.cross_entropy(m(X), CLASSES), is_whole=False)[0] == set(), "a part of the loss"


def test_a_loss_of_derivatives_by_the_inputs_is_told_from_others():
    def curvature(model):
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().mean()

    _, events = read(mlp(1), curvature)
    assert [(e.kind, e.layer) for e in events if "derivative" in e.kind] == [("graph-derivative", None)]
    assert read(mlp(1), lambda m: m(X).square().mean())[0] == set()


def test_frozen_parameters_are_not_cut():
    model = Cut()
    for part in (model.encoder, model.auxiliary):
        part.requires_grad_(False)
    assert read(model, lambda m: F.cross_entropy(m(X), CLASSES))[0] == set()


def test_a_softmax_over_one_value_is_found():
    assert read(mlp(1, nn.Softmax(1)), lambda m: F.mse_loss(m(X), BINARY))[0] == {("constant", "3")}


class Factors(nn.Module):
    def __init__(self, product):
        super().__init__()
        self.user, self.item, self.product = nn.Embedding(9, 6), nn.Embedding(7, 6), product

    def forward(self):
        return self.product(self.user(torch.arange(5)), self.item(torch.arange(5)))


PRODUCTS = {
    "a sum of products": lambda u, i: (u * i).sum(1),
    "bmm": lambda u, i: torch.bmm(u[:, None], i[:, :, None]).squeeze(),
    "einsum": lambda u, i: torch.einsum("nd,nd->n", u, i),
    "all against all": lambda u, i: u @ i.T,
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_embeddings_that_are_multiplied_are_found(name):
    found, (event,) = read(Factors(PRODUCTS[name]), lambda m: m().square().mean())
    assert found == {("embedding-product", "user")}
    assert event.values == {"first": 0.0, "second": 1.0, "dimension": 6.0}


class Machine(nn.Module):
    """A factorisation machine of four fields."""

    def __init__(self):
        super().__init__()
        self.factors = nn.Embedding(30, 6)

    def forward(self):
        rows = self.factors(torch.arange(20).reshape(5, 4))
        return 0.5 * (rows.sum(1).square() - rows.square().sum(1)).sum(1)


def test_all_pairs_of_a_factorisation_machine_are_found():
    found, (event,) = read(Machine(), lambda m: m().square().mean())
    assert found == {("embedding-product", "factors")}
    assert event.values == {"first": 0.0, "second": 0.0, "dimension": 6 * 6.0}

    expected = math.sqrt(event.values["dimension"])  # the variances of independent products add up
    with torch.no_grad():
        drawn = torch.stack([Machine()() for _ in range(400)])
    assert float(drawn.std()) == pytest.approx(expected, rel=0.15)


def test_rows_that_a_weight_matrix_multiplies_are_no_product_of_embeddings():
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 3, bias=False))
    assert read(model, lambda m: F.cross_entropy(m(CLASSES), CLASSES))[0] == set()


@pytest.mark.parametrize(
    "product",
    [lambda u, i: (F.normalize(u, dim=1) * F.normalize(i, dim=1)).sum(1), lambda u, i: torch.cat([u, i], 1).sum(1)],
    ids=["normalised", "side by side"],
)
def test_embeddings_that_are_brought_to_scale_or_not_multiplied_are_none(product):
    assert read(Factors(product), lambda m: m().square().mean())[0] == set()


class Language(nn.Module):
    def __init__(self, *, tied=True, normalised=True, scale=1.0):
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 6), nn.LayerNorm(6) if normalised else nn.Linear(6, 6)
        self.head, self.scale = nn.Linear(6, 11, bias=False), scale
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        hidden = self.norm(self.embed(tokens))
        return self.head(hidden * self.scale if self.scale != 1 else hidden).flatten(0, -2)


@pytest.mark.parametrize("shape", [(16,), (4, 4)])
@pytest.mark.parametrize("normalised", [True, False])
def test_an_embedding_that_is_the_output_layer_too_is_found(shape, normalised):
    _, (event,) = read(
        Language(normalised=normalised), lambda m: F.cross_entropy(m(CLASSES.reshape(shape)), CLASSES.flatten())
    )
    assert (event.kind, event.layer) == ("graph-tied-embedding", "embed")
    assert event.values == {"weight": 0.0, "dimension": 6.0, "classes": 11.0, "normalised": float(normalised)}


@pytest.mark.parametrize("options", [{"tied": False}, {"scale": 6**-0.5}], ids=["untied", "scaled"])
def test_an_embedding_of_its_own_or_with_a_scale_is_none(options):
    assert read(Language(**options), lambda m: F.cross_entropy(m(CLASSES), CLASSES))[0] == set()


def variance(model):
    z = model(X)
    return ((z * z).mean(1) - z.mean(1) ** 2).sqrt().mean()


SINGULAR = {
    "root": (lambda m: m(X).relu().sum(1).sqrt().mean(), "the square root of a sum"),
    "power": (lambda m: m(X).abs().pow(0.5).mean(), "the square root of an absolute value"),
    "log": (lambda m: m(X).relu().log().mean(), "the log of a ReLU"),
    "log of a softmax": (lambda m: m(X).softmax(1).log().mean(), "the log of a softmax can round to log(0)"),
    "variance": (variance, "E[x^2] - E[x]^2"),
    "norm": (lambda m: (m(X) / m(X).norm(dim=1, keepdim=True)).mean(), "a division by a norm"),
    "acos": (lambda m: torch.acos(F.cosine_similarity(m(X), SOFT)).mean(), "acos of a sum that is not clamped"),
    "deviation": (lambda m: m(X).std(0).mean(), "a standard deviation"),
    "exponential": (lambda m: m(X).exp().mean(), "an unbounded exponential"),
    "trap of where": (lambda m: torch.where(BINARY > 0, m(X).sqrt(), 0.0).mean(), "the square root of a value"),
}


@pytest.mark.parametrize("name", SINGULAR)
def test_the_formula_behind_a_nan_is_named(name):
    loss_of, words = SINGULAR[name]
    _, events = read(mlp(), loss_of, step=40, is_non_finite=True)
    singular = [event for event in events if event.kind == "graph-singular"]
    assert singular, "nothing suspected"
    assert words in singular[0].text
    assert singular[0].layer == "2"


@pytest.mark.parametrize("name", SINGULAR)
def test_formulas_are_no_event_while_all_is_finite(name):
    assert not any(kind == "singular" for kind, _ in read(mlp(), SINGULAR[name][0])[0])


GUARDED = {
    "something is added": lambda m: (m(X).square().sum(1) + 1e-6).sqrt().log1p().mean(),
    "clamped": lambda m: m(X).clamp(min=1e-6).log().mean(),
    "normalize": lambda m: F.normalize(m(X)).sum(),
    "log_softmax": lambda m: m(X).log_softmax(1).mean(),
    "a layer norm": lambda m: F.layer_norm(m(X), (3,)).square().mean(),
    "an exponential that is divided by its sum": lambda m: (m(X) - m(X).amax()).exp().mean(),
}


@pytest.mark.parametrize("name", GUARDED)
def test_guarded_formulas_are_no_suspects(name):
    assert read(mlp(), GUARDED[name], step=40, is_non_finite=True)[0] == set()


def test_the_graph_is_read_at_the_first_steps_and_each_event_made_once():
    model = mlp(3, nn.Softmax(1))
    reader = LossGraphReader(model, *list_parameters(model))
    said = [len(reader.read(F.cross_entropy(model(X), CLASSES), step=step)) for step in range(40)]
    assert said == [2] + [0] * 39, "what is wrong, and how many classes there are"

    late = LossGraphReader(model, *list_parameters(model))
    assert late.read(F.cross_entropy(model(X), CLASSES), step=3) == []
    assert len(late.read(F.cross_entropy(model(X), CLASSES), step=8)) == 2


@pytest.mark.parametrize("loss", [None, 0.5, math.nan, torch.tensor(0.5)], ids=str)
def test_a_loss_without_a_graph_has_no_events(loss):
    model = mlp()
    assert LossGraphReader(model, *list_parameters(model)).read(loss, step=0) == []


def test_a_few_non_finite_losses_are_inspected(monkeypatch):
    looked = []
    monkeypatch.setattr(module, "Graph", lambda loss: looked.append(1) or Graph(loss))
    model = mlp()
    reader = LossGraphReader(model, *list_parameters(model))
    for step in range(20, 60):
        reader.read(model(X).exp().mean(), step=step, is_non_finite=True)
    assert len(looked) == 3


def test_a_walk_is_bounded_and_says_whether_it_saw_all(monkeypatch):
    loss = mlp()(X).sum()
    assert Graph(loss).is_complete
    monkeypatch.setattr("gradwatch.probe.graph.graph.MAX_NODES", 3)
    assert len(Graph(loss).nodes) == 3
    assert not Graph(loss).is_complete


def test_a_graph_that_was_not_seen_whole_is_not_said_to_be_cut(monkeypatch):
    monkeypatch.setattr("gradwatch.probe.graph.graph.MAX_NODES", 3)
    assert read(mlp(), lambda m: F.cross_entropy(m(X), CLASSES))[0] == set()


def test_reading_holds_neither_graph_nor_batch():
    model = mlp(3, nn.Softmax(1))
    reader = LossGraphReader(model, *list_parameters(model))
    batch = X.clone()
    loss = F.cross_entropy(model(batch), CLASSES)
    refs = [weakref.ref(batch), weakref.ref(loss)]
    reader.read(loss, step=0, is_non_finite=True)
    del loss, batch
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


@pytest.mark.parametrize("retain", [True, False])
def test_reading_frees_nothing_that_a_later_backward_needs(retain):
    model = mlp(3, nn.Softmax(1))
    reader = LossGraphReader(model, *list_parameters(model))
    loss = F.cross_entropy(model(X), CLASSES)
    if retain:
        loss.backward(retain_graph=True)
        model.zero_grad()
    reader.read(loss, step=0, is_non_finite=True)
    loss.backward()

    twin = mlp(3, nn.Softmax(1))
    F.cross_entropy(twin(X), CLASSES).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_reading_unpacks_no_saved_tensor():
    unpacked = []

    def loss_of(model):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: unpacked.append(1) or x):
            return F.cross_entropy(model(X).softmax(1).log(), CLASSES)

    read(mlp(), loss_of, backward=False, is_non_finite=True)
    assert unpacked == []
