"""A weight that the training loop uses besides its layer is named; penalties and the like are not."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from suite.torch import KFAC

SEEDED = torch.Generator().manual_seed(0)
X, LABELS = torch.randn(20, 6, generator=SEEDED), torch.randint(0, 3, (20,), generator=SEEDED)
TOKENS = torch.randint(0, 9, (5, 4), generator=SEEDED)


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


class Tied(nn.Module):
    """Tokens, a layer, and a head with the tokens' table for its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mixed = nn.Embedding(9, 6, padding_idx=0), nn.Linear(6, 6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        return self.head(torch.tanh(self.mixed(self.tokens(x))))

    def features(self, x):
        return torch.tanh(self.mixed(self.tokens(x)))


class Transposed(nn.Module):
    """As transformers' Conv1D."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 3) / 3), nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


class TransposedVector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 9) / 3)

    def forward(self, x):
        return x @ self.weight


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items, self.mixed = nn.Embedding(9, 6, padding_idx=0), nn.Linear(6, 6)

    def forward(self, x):
        return self.mixed(self.items(x))


def convolutions(first, rank=2, **settings):
    """Two behind one another; of `first` the settings."""
    kinds = {False: (nn.Conv1d, nn.Conv2d, nn.Conv3d)}
    kinds[True] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    layers = [kinds[transposed][rank - 1] for transposed in (first, not first)]
    return nn.Sequential(layers[0](4, 8, 3, **settings), nn.Tanh(), layers[1](8, 6, 2))


def images_loss(model, rank=2, batch=(3,), dtype=None):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*batch, 4, *(7,) * rank, generator=generator)
    return model(x if dtype is None else x.to(dtype)).float().square().mean()


def loss_of(model, x=X):
    return F.cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), LABELS)


def tokens_loss(logits):
    return F.cross_entropy(logits.flatten(0, 1), TOKENS.flatten())


def with_penalty(penalty):
    return lambda model: loss_of(model) + 0.01 * sum(penalty(p) for p in model.parameters())


def with_gradient_penalty(model):
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return loss_of(model) + gradient.square().mean()


def with_evaluation(model):
    loss = loss_of(model)
    model.eval()
    other = model(X + 0.1).square().mean()
    model.train()
    return loss + other


def after_other_gradients(model):
    torch.autograd.grad(model(X).square().sum(), model[0].weight)
    return loss_of(model)


def with_hook(model):
    model[0].weight.register_hook(lambda gradient: 2 * gradient)
    return loss_of(model)


def checkpointed(model, reentrant):
    x = X.clone().requires_grad_()
    h = checkpoint(lambda z: model[1](model[0](z)), x, use_reentrant=reentrant)
    return F.cross_entropy(model[2](h), LABELS)


def under_autocast(model):
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(model)


def checkpointed_tokens(model):
    return tokens_loss(checkpoint(model, TOKENS, use_reentrant=False))


def many_lookups(model):
    """Of a padding token, whose gradients halves sum up to anything."""
    return model(torch.zeros(40, 60, dtype=torch.long)).float().square().mean()


def in_a_loop(model):
    h = X.bfloat16()
    for _ in range(300):
        h = h + 0.01 * model(h)
    return h.float().square().mean()


EXPLAINED = {
    "many lookups": (
        lambda: nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 3)).bfloat16(),
        many_lookups,
    ),
    "a loop": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh()).bfloat16(), in_a_loop),
    "many rows": (
        lambda: nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1)),
        lambda model: model(torch.full((300_000, 1), 1.1)).mean(),
    ),
    "plain": (mlp, loss_of),
    "a weight of columns": (lambda: nn.Sequential(Transposed()), loss_of),
    "one row": (mlp, lambda model: model(X[0]).square().sum()),
    "one row, columns": (lambda: nn.Sequential(TransposedVector()), lambda m: m(X[0]).square().sum()),
    **{
        f"{'transposed ' * transposed}convolution, {rank}-D, {settings}": (
            functools.partial(convolutions, transposed, rank, **settings),
            functools.partial(images_loss, rank=rank),
        )
        for rank in (1, 2, 3)
        for transposed, settings in (
            (False, {"groups": 2, "stride": 2, "padding": 1}),
            (False, {"groups": 4, "dilation": 2, "bias": False}),
            (False, {"padding": "same", "padding_mode": "circular"}),
            (True, {"groups": 2, "stride": 2, "padding": 1, "output_padding": 1}),
            (True, {"stride": 3, "padding": 2}),
            (True, {"groups": 4, "dilation": 2, "bias": False}),
        )
    },
    "images in halves": (
        lambda: convolutions(False).bfloat16(),
        functools.partial(images_loss, dtype=torch.bfloat16),
    ),
    "one image": (lambda: convolutions(False), functools.partial(images_loss, batch=())),
    "doubles": (lambda: mlp().double(), loss_of),
    "halves": (lambda: mlp().bfloat16(), loss_of),
    "autocast": (mlp, under_autocast),
    "tiny": (mlp, lambda model: 1e-30 * loss_of(model)),
    "zero": (mlp, lambda model: 0 * loss_of(model)),
    "squares of weights": (mlp, with_penalty(lambda p: p.square().sum())),
    "sizes of weights": (mlp, with_penalty(lambda p: p.abs().sum())),
    "both": (mlp, with_penalty(lambda p: p.square().sum() + p.abs().sum())),
    "gradient penalty": (mlp, with_gradient_penalty),
    "evaluation": (mlp, with_evaluation),
    "evaluation, a weight of columns": (lambda: nn.Sequential(Transposed()), with_evaluation),
    "other gradients": (mlp, after_other_gradients),
    "hook": (mlp, with_hook),
    "reentrant checkpoint": (mlp, lambda model: checkpointed(model, True)),
    "checkpoint": (mlp, lambda model: checkpointed(model, False)),
    "tied": (Tied, lambda model: tokens_loss(model(TOKENS))),
    "tied, in a checkpoint": (Tied, checkpointed_tokens),
}


@pytest.mark.parametrize("case", EXPLAINED)
@pytest.mark.parametrize("passes", [1, 2])
def test_a_layer_that_alone_uses_its_weight_is_not_named(case, passes, recwarn):
    make, loss = EXPLAINED[case]
    torch.manual_seed(0)
    model = make()
    kfac = KFAC(model)
    for _ in range(passes):
        loss(model).backward()
    kfac.step()
    assert not [str(one.message) for one in recwarn if "miss some uses" in str(one.message)]


def in_a_pass_of_its_own(model):
    loss_of(model).backward()
    return F.linear(X, model[0].weight).square().mean()


def with_features(model):
    """Of images that the loop convolves itself."""
    return images_loss(model) + F.conv2d(torch.ones(1, 4, 5, 5), model[0].weight).square().mean()


def with_reconstruction(model):
    """By a decoder with the weight of the encoder."""
    x = torch.ones(1, 4, 5, 5)
    return (F.conv_transpose2d(torch.tanh(model[0](x)), model[0].weight) - x).square().mean()


MISSED = {
    "features": (lambda: convolutions(False), with_features, "0"),
    "an autoencoder": (lambda: convolutions(False), with_reconstruction, "0"),
    "a group's features": (
        lambda: convolutions(True, groups=2),
        lambda m: images_loss(m) + (m[0].weight[:2].sum() - 1).square(),
        "0",
    ),
    "columns": (
        lambda: nn.Sequential(Transposed()),
        lambda m: loss_of(m) + (X @ m[0].weight).square().mean(),
        "0",
    ),
    "a pass of its own": (mlp, in_a_pass_of_its_own, "0"),
    "rows": (mlp, lambda model: loss_of(model) + F.linear(X, model[0].weight).square().mean(), "0"),
    "halves": (
        lambda: mlp().bfloat16(),
        lambda model: loss_of(model) + F.linear(X[:, :3].bfloat16(), model[2].weight.T).square().sum(),
        "2",
    ),
    "scores": (Scored, lambda m: tokens_loss(m(TOKENS) @ m.items.weight.T), "items"),
    "a head and its loss": (
        Tied,
        lambda m: tokens_loss(F.linear(m.features(TOKENS), m.tokens.weight)),
        "tokens",
    ),
    "near orthogonal": (
        mlp,
        lambda m: loss_of(m) + 0.1 * (m[0].weight.T @ m[0].weight - torch.eye(6)).square().sum(),
        "0",
    ),
}


@pytest.mark.parametrize("case", MISSED)
def test_what_the_loop_uses_besides_is_named(case):
    make, loss, name = MISSED[case]
    torch.manual_seed(0)
    model = make()
    kfac = KFAC(model)
    loss(model).backward()
    with pytest.warns(RuntimeWarning, match=f"miss some uses.*: '{name}'\\."):
        kfac.step()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")
def test_what_a_graph_hides_is_not_named(recwarn):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Tied()
    kfac = KFAC(model)
    features = torch.compile(model.features, backend="aot_eager")
    tokens_loss(model.head(features(TOKENS))).backward()
    kfac.step()
    assert not [one for one in recwarn if "miss some uses" in str(one.message)]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")
@pytest.mark.parametrize("compiled", [False, True])
def test_it_is_asked_in_the_first_step_only(compiled):
    torch._dynamo.reset()
    model = mlp()
    kfac = KFAC(model)
    if compiled:
        model.compile(backend="aot_eager")
    hooks = len(model[0].weight._backward_hooks)
    for _ in range(2):
        loss_of(model).backward()
        kfac.step()
        model.zero_grad()
    assert len(model[0].weight._backward_hooks or ()) < hooks
    kfac.detach()
    assert not model[0].weight._backward_hooks


def test_what_passes_before_the_first_step_found_is_one_number():
    model, counts = mlp(), []
    kfac = KFAC(model, compute_method="inverse")
    comparisons = [c.explained for c in kfac._engine.capture.by_layer]
    for _ in range(4):
        loss_of(model).backward()
        kept = [x for one in comparisons for x in vars(one).values()]
        kept = [x for some in kept for x in (some if isinstance(some, list) else [some])]
        counts.append(sum(isinstance(x, torch.Tensor) for x in kept))
    assert counts[0] == counts[-1] > 0
    kfac.detach()
