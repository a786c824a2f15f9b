"""Small trainings of models, losses and whole trainers that other people published, each with its usual settings.

A training is a function of `watched`, which takes the model and its optimizer and gives a context: what is trained
within is watched. Where a library has a trainer of its own, that trains; else a plain loop does.
"""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, make_moons
from torch import Tensor, nn
from torch.nn import functional as F

Watched = Callable[..., AbstractContextManager[None]]
Loss = Callable[[Tensor], Tensor]
LABELS = 10


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's digits, from 0 to 1, of shape (1797, 8, 8), and their labels."""
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32) / 16, torch.tensor(data.target)


@cache
def images(size: int) -> Tensor:
    """Return the digits as standardised pictures of three channels, of shape (1797, 3, size, size)."""
    grown = F.interpolate(digits()[0][:, None], size=size).expand(-1, 3, -1, -1)
    return ((grown - grown.mean()) / grown.std()).contiguous()


@cache
def text() -> Tensor:
    """Return the characters of Python's own manual as numbers below 128."""
    return torch.tensor([min(ord(c), 127) for c in " ".join(pydoc_data.topics.topics.values())[:200_000]])


def draws(samples: int, size: int, steps: int) -> Iterator[Tensor]:
    """Yield indices of batches, epoch after epoch in another order."""
    left = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        if len(left) < size:
            left = torch.randperm(samples)
        yield left[:size]
        left = left[size:]


def fit(
    watched: Watched, model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Loss, *, size: int, steps: int
) -> None:
    """Train in a plain loop: `loss_of` takes the indices of a batch of digits."""
    with watched(model, optimizer):
        for batch in draws(1500, size, steps):
            loss = loss_of(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def _reinforcement(watched: Watched, algorithm: str, game: str, steps: int, **options: Any) -> None:
    agent = getattr(import_module("stable_baselines3"), algorithm)("MlpPolicy", game, seed=0, device="cpu", **options)
    policy = agent.policy
    own = [policy.critic.optimizer, policy.actor.optimizer] if algorithm in ("SAC", "TD3") else policy.optimizer
    with watched(policy, own):
        agent.learn(steps)


def _tabnet(watched: Watched) -> None:
    classifier = import_module("pytorch_tabnet.tab_model").TabNetClassifier(verbose=0, seed=0)
    data = load_breast_cancer()
    x, y = data.data.astype(np.float32), data.target
    classifier.fit(x, y, max_epochs=1, batch_size=128, virtual_batch_size=64)  # lays out the network
    with watched(classifier.network, classifier._optimizer):
        classifier._set_optimizer = lambda: None
        for _ in range(25):
            classifier._train_epoch(classifier._construct_loaders(x, y, [])[0])


def _differential_equation(watched: Watched) -> None:
    dde = import_module("deepxde")
    line = dde.geometry.Interval(-1, 1)
    ends = dde.icbc.DirichletBC(line, lambda x: 0, lambda x, is_boundary: is_boundary)

    def residual(x: Tensor, y: Tensor) -> Any:
        return -dde.grad.hessian(y, x) - np.pi**2 * torch.sin(np.pi * x)

    net = dde.nn.FNN([1, 50, 50, 50, 1], "tanh", "Glorot uniform")
    solver = dde.Model(dde.data.PDE(line, residual, ends, 16, 2), net)
    solver.compile("adam", lr=1e-3, verbose=0)
    with watched(net, solver.opt):
        solver.train(iterations=400, verbose=0)


def _skorch_classifier(watched: Watched) -> None:
    net = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Dropout(0.3), nn.Linear(100, LABELS))
    made = import_module("skorch").NeuralNetClassifier(
        net, criterion=nn.CrossEntropyLoss, max_epochs=10, lr=0.1, batch_size=64, verbose=0, train_split=None
    )
    made.initialize()
    with watched(made.module_, made.optimizer_):
        made.partial_fit(digits()[0].flatten(1).numpy(), digits()[1].numpy())


def _skorch_regressor(watched: Watched) -> None:
    data = load_diabetes()
    target = ((data.target - data.target.mean()) / data.target.std()).astype(np.float32)[:, None]
    net = nn.Sequential(nn.Linear(10, 50), nn.SELU(), nn.Linear(50, 1))
    adam = {"optimizer": torch.optim.Adam, "lr": 0.01}
    made = import_module("skorch").NeuralNetRegressor(
        net, max_epochs=20, batch_size=32, verbose=0, train_split=None, **adam
    )
    made.initialize()
    with watched(made.module_, made.optimizer_):
        made.partial_fit((data.data / data.data.std(0)).astype(np.float32), target)


def _survival(watched: Watched, name: str) -> None:
    torchtuples, kind = import_module("torchtuples"), getattr(import_module("pycox.models"), name)
    draw = np.random.default_rng(0)
    x = draw.standard_normal((2000, 9)).astype(np.float32)
    death, end = draw.exponential(1 / np.exp(x[:, 0] + 0.5 * x[:, 1] ** 2)), draw.exponential(1.0, 2000)
    known = np.minimum(death, end).astype(np.float32), (death <= end).astype(np.float32)
    options, outputs = {}, 1
    if name != "CoxPH":
        bins = kind.label_transform(10)
        known = bins.fit_transform(*known)
        options, outputs = {"duration_index": bins.cuts}, bins.out_features
    net = torchtuples.practical.MLPVanilla(9, [32, 32], outputs, batch_norm=True, dropout=0.1)
    model = kind(net, torchtuples.optim.Adam(0.01), **options)
    with watched(net, model.optimizer.optimizer):
        model.fit(x, known, 64, 8, verbose=False)


def _language_model(watched: Watched, name: str, config: str, sizes: dict[str, Any], loss_of: Any) -> None:
    hub = import_module("transformers")
    model = getattr(hub, name)(getattr(hub, config)(vocab_size=128, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = hub.get_linear_schedule_with_warmup(optimizer, 20, 120)
    with watched(model, optimizer):
        for _ in range(120):
            starts = torch.randint(0, len(text()) - 48, (8,))
            loss = loss_of(model, torch.stack([text()[i : i + 48] for i in starts]))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


def _next(model: Any, ids: Tensor) -> Any:
    return model(input_ids=ids, labels=ids).loss


def _masked(model: Any, ids: Tensor) -> Any:
    is_masked = torch.rand(ids.shape) < 0.15
    return model(input_ids=ids.masked_fill(is_masked, 127), labels=ids.masked_fill(~is_masked, -100)).loss


def _second_half(model: Any, ids: Tensor) -> Any:
    return model(input_ids=ids[:, :24], labels=ids[:, 24:].contiguous()).loss


def _pictures(watched: Watched, name: str, config: str, sizes: dict[str, Any], *, labelled: bool) -> None:
    hub = import_module("transformers")
    patches = {"image_size": 32, "patch_size": 8, "intermediate_size": 128, "num_attention_heads": 4}
    model = getattr(hub, name)(getattr(hub, config)(hidden_size=64, num_hidden_layers=3, **patches, **sizes))

    def loss_of(batch: Tensor) -> Any:
        labels = {"labels": digits()[1][batch]} if labelled else {}
        return model(pixel_values=images(32)[batch], **labels).loss

    fit(watched, model, torch.optim.AdamW(model.parameters(), lr=1e-3), loss_of, size=32, steps=150)


def _timm(watched: Watched, name: str, optimizer: str, lr: float, **options: Any) -> None:
    model = import_module("timm").create_model(name, num_classes=LABELS, **options)
    made = import_module("timm.optim").create_optimizer_v2(model, opt=optimizer, lr=lr, weight_decay=0.02)
    criterion = import_module("timm.loss").LabelSmoothingCrossEntropy(0.1)
    fit(watched, model, made, lambda i: criterion(model(images(32)[i]), digits()[1][i]), size=32, steps=90)


def _segmentation(watched: Watched) -> None:
    smp = import_module("segmentation_models_pytorch")
    model, dice = smp.Unet("resnet18", encoder_weights=None, in_channels=3, classes=1), smp.losses.DiceLoss("binary")
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
    pictures = images(32)
    loss_of: Loss = lambda i: dice(model(pictures[i]), (pictures[i][:, :1] > 0.5).float())  # noqa: E731
    fit(watched, model, optimizer, loss_of, size=16, steps=80)


class _Views(nn.Module):
    """An encoder of pictures whose loss is one of lightly's, over two views of a batch."""

    def __init__(self, head: str, loss: str, *, predicts: bool = False) -> None:
        super().__init__()
        heads, losses = import_module("lightly.models.modules"), import_module("lightly.loss")
        convolutions = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
        convolutions += [nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
        self.backbone = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head, self.criterion = getattr(heads, head)(32, 64, 32), getattr(losses, loss)()
        self.predictor = heads.SimSiamPredictionHead(32, 16, 32) if predicts else None

    def forward(self, batch: Tensor) -> Any:
        views = [torch.roll(digits()[0][batch][:, None], s, -1) for s in torch.randint(-1, 2, (2,)).tolist()]
        first, second = (self.head(self.backbone(v + 0.1 * torch.randn_like(v))) for v in views)
        if self.predictor is None:
            return self.criterion(first, second)
        there, back = self.predictor(first), self.predictor(second)
        return 0.5 * (self.criterion(there, second.detach()) + self.criterion(back, first.detach()))


def _views(watched: Watched, head: str, loss: str, *, predicts: bool = False) -> None:
    model = _Views(head, loss, predicts=predicts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.06, momentum=0.9, weight_decay=5e-4)
    fit(watched, model, optimizer, model, size=64, steps=200)


def _metric(watched: Watched, name: str, *sizes: int, **options: Any) -> None:
    criterion = getattr(import_module("pytorch_metric_learning.losses"), name)(*sizes, **options)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
    model = nn.ModuleDict({"encoder": encoder, "criterion": criterion})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    fit(watched, model, optimizer, lambda i: criterion(encoder(digits()[0][i]), digits()[1][i]), size=64, steps=250)


def _codes(watched: Watched, name: str, dim: int, options: dict[str, Any]) -> None:
    quantiser = getattr(import_module("vector_quantize_pytorch"), name)(**options)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, dim))
    decoder = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, 64))
    model = nn.ModuleDict({"encoder": encoder, "quantiser": quantiser, "decoder": decoder})

    def loss_of(batch: Tensor) -> Tensor:
        x = digits()[0][batch]
        quantised, *others = quantiser(encoder(x)[:, None])
        extra = others[-1].sum() if others[-1].is_floating_point() else 0.0
        return F.mse_loss(decoder(quantised[:, 0]), x.flatten(1)) + extra

    fit(watched, model, torch.optim.AdamW(model.parameters(), lr=3e-3), loss_of, size=64, steps=200)


def _flow(watched: Watched, name: str) -> None:
    model = getattr(import_module("nflows.flows"), name)(2, 32, 4, 2)
    x = torch.tensor(make_moons(4000, noise=0.1, random_state=0)[0], dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    fit(watched, model, optimizer, lambda i: -model.log_prob(x[i]).mean(), size=128, steps=300)


def _gaussian_process(watched: Watched) -> None:
    gp, data = import_module("gpytorch"), load_diabetes()
    x = torch.tensor(data.data / data.data.std(0), dtype=torch.float32)
    y = torch.tensor((data.target - data.target.mean()) / data.target.std(), dtype=torch.float32)

    class Exact(gp.models.ExactGP):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__(x, y, gp.likelihoods.GaussianLikelihood())
            self.mean = gp.means.ConstantMean()
            self.kernel = gp.kernels.ScaleKernel(gp.kernels.RBFKernel(ard_num_dims=10))

        def forward(self, at: Tensor) -> Any:
            return gp.distributions.MultivariateNormal(self.mean(at), self.kernel(at))

    model = Exact()
    likelihood = gp.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    fit(watched, model, optimizer, lambda _: -likelihood(model(x), y), size=1, steps=80)


def _neural_ode(watched: Watched) -> None:
    odeint = import_module("torchdiffeq").odeint
    swirl, times = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]]), torch.linspace(0, 10, 400)
    truth = odeint(lambda _, y: y**3 @ swirl, torch.tensor([[2.0, 0.0]]), times).detach()
    net = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 2))

    def loss_of(batch: Tensor) -> Tensor:
        starts = batch % 390
        wanted = torch.stack([truth[starts + k] for k in range(10)])
        path: Tensor = odeint(lambda _, y: net(y**3), truth[starts], times[:10], method="rk4")
        return (path - wanted).abs().mean()

    fit(watched, net, torch.optim.RMSprop(net.parameters(), lr=1e-3), loss_of, size=20, steps=150)


def _graph(watched: Watched, name: str) -> None:
    draw, geometric = import_module("torch_geometric.utils"), import_module("torch_geometric.nn.models")
    edges = draw.stochastic_blockmodel_graph([100] * 4, torch.full((4, 4), 0.01) + 0.1 * torch.eye(4))
    labels = torch.arange(4).repeat_interleave(100)
    nodes = F.one_hot(labels, 4).float().repeat(1, 8) + 1.5 * torch.randn(400, 32)
    known = torch.randperm(400)[:200]
    model = getattr(geometric, name)(32, 32, 3, 4, dropout=0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    whole = lambda _: F.cross_entropy(model(nodes, edges)[known], labels[known])  # noqa: E731
    fit(watched, model, optimizer, whole, size=1, steps=200)


def _diffusion(watched: Watched) -> None:
    library = import_module("denoising_diffusion_pytorch")
    net = library.Unet(dim=16, dim_mults=(1, 2), channels=3, flash_attn=False)
    model = library.GaussianDiffusion(net, image_size=16, timesteps=100, auto_normalize=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4, betas=(0.9, 0.99))
    fit(watched, model, optimizer, lambda i: model(images(16)[i]), size=16, steps=100)


def _fourier(watched: Watched) -> None:
    model = import_module("neuralop.models").FNO(n_modes=(4, 4), hidden_channels=16, in_channels=1, out_channels=1)
    criterion = import_module("neuralop.losses").LpLoss(d=2)
    squares = torch.fft.fftfreq(16) ** 2
    x = torch.randn(1500, 1, 16, 16)
    y = torch.fft.ifft2(torch.fft.fft2(x) * torch.exp(-200 * (squares[:, None] + squares))).real
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-4)
    fit(watched, model, optimizer, lambda i: criterion(model(x[i]), y[i]), size=16, steps=150)


def _of(make: Callable[..., None], *given: Any, **options: Any) -> Callable[[Watched], None]:
    return lambda watched: make(watched, *given, **options)


_GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64}
_BERT = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
_MIXTRAL = _BERT | {"num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True}
_MAE = {"decoder_hidden_size": 48, "decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 4}
_VIT = {"img_size": 32, "patch_size": 4, "depth": 4, "embed_dim": 64, "num_heads": 4}
_DQN = {"learning_starts": 200, "train_freq": 4, "learning_rate": 2.3e-3, "buffer_size": 10000}

TRAININGS: dict[str, Callable[[Watched], None]] = {
    "stable-baselines3 PPO, CartPole": _of(_reinforcement, "PPO", "CartPole-v1", 6000),
    "stable-baselines3 PPO, Acrobot": _of(_reinforcement, "PPO", "Acrobot-v1", 6000),
    "stable-baselines3 PPO, Pendulum": _of(_reinforcement, "PPO", "Pendulum-v1", 6000, use_sde=True),
    "stable-baselines3 A2C, CartPole": _of(_reinforcement, "A2C", "CartPole-v1", 3000),
    "stable-baselines3 DQN, CartPole": _of(_reinforcement, "DQN", "CartPole-v1", 3000, **_DQN),
    "stable-baselines3 SAC, Pendulum": _of(_reinforcement, "SAC", "Pendulum-v1", 600),
    "stable-baselines3 TD3, Pendulum": _of(_reinforcement, "TD3", "Pendulum-v1", 600),
    "pytorch-tabnet": _tabnet,
    "deepxde": _differential_equation,
    "skorch classifier": _skorch_classifier,
    "skorch regressor": _skorch_regressor,
    **{f"pycox {name}": _of(_survival, name) for name in ("CoxPH", "LogisticHazard", "DeepHitSingle", "PMF")},
    "transformers GPT-2": _of(_language_model, "GPT2LMHeadModel", "GPT2Config", _GPT2, _next),
    "transformers BERT": _of(_language_model, "BertForMaskedLM", "BertConfig", _BERT, _masked),
    "transformers T5": _of(_language_model, "T5ForConditionalGeneration", "T5Config", _T5, _second_half),
    "transformers Llama": _of(_language_model, "LlamaForCausalLM", "LlamaConfig", _BERT, _next),
    "transformers Mixtral": _of(_language_model, "MixtralForCausalLM", "MixtralConfig", _MIXTRAL, _next),
    "transformers ViT": _of(_pictures, "ViTForImageClassification", "ViTConfig", {"num_labels": 10}, labelled=True),
    "transformers MAE": _of(_pictures, "ViTMAEForPreTraining", "ViTMAEConfig", _MAE, labelled=False),
    "timm ResNet-18, SGD": _of(_timm, "resnet18", "sgd", 0.05),
    "timm ViT, AdamW": _of(_timm, "vit_tiny_patch16_224", "adamw", 5e-4, **_VIT),
    "timm ConvNeXt, LAMB": _of(_timm, "convnext_atto", "lamb", 5e-3),
    "timm MobileNetV3, RMSprop": _of(_timm, "mobilenetv3_small_050", "rmsproptf", 2e-3),
    "segmentation-models-pytorch U-Net": _segmentation,
    "lightly SimCLR": _of(_views, "SimCLRProjectionHead", "NTXentLoss"),
    "lightly SimSiam": _of(_views, "SimSiamProjectionHead", "NegativeCosineSimilarity", predicts=True),
    "lightly Barlow Twins": _of(_views, "BarlowTwinsProjectionHead", "BarlowTwinsLoss"),
    "lightly VICReg": _of(_views, "BarlowTwinsProjectionHead", "VICRegLoss"),
    "pytorch-metric-learning triplets": _of(_metric, "TripletMarginLoss"),
    "pytorch-metric-learning ArcFace": _of(_metric, "ArcFaceLoss", LABELS, 32),
    "pytorch-metric-learning NT-Xent": _of(_metric, "NTXentLoss", temperature=0.1),
    "pytorch-metric-learning proxies": _of(_metric, "ProxyAnchorLoss", LABELS, 32),
    "vector-quantize-pytorch VQ": _of(_codes, "VectorQuantize", 16, {"dim": 16, "codebook_size": 64}),
    "vector-quantize-pytorch FSQ": _of(_codes, "FSQ", 4, {"levels": [8, 5, 5, 5]}),
    "vector-quantize-pytorch residual": _of(
        _codes, "ResidualVQ", 16, {"dim": 16, "num_quantizers": 4, "codebook_size": 64}
    ),
    "nflows MAF": _of(_flow, "MaskedAutoregressiveFlow"),
    "nflows RealNVP": _of(_flow, "SimpleRealNVP"),
    "gpytorch exact": _gaussian_process,
    "torchdiffeq": _neural_ode,
    **{f"torch-geometric {name}": _of(_graph, name) for name in ("GCN", "GAT", "GIN", "GraphSAGE")},
    "denoising-diffusion-pytorch": _diffusion,
    "neuraloperator FNO": _fourier,
}
"""By library and what is trained."""
