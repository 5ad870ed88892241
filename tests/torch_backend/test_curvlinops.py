"""K-FAC's blocks against those of curvlinops, an independent implementation, on equal numbers."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn

from conftest import assert_close
from suite.core.likelihoods import Categorical, Gaussian
from suite.torch import KFAC

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its linear_operator uses torch.jit.script
    curvlinops = pytest.importorskip("curvlinops")

N, C = 5, 3


class Tokens(nn.Module):
    """A linear layer on sequences of 4, whose loss has a term a token, or one an example (`pooled`)."""

    def __init__(self, pooled=False):
        super().__init__()
        self.first, self.last, self.pooled = nn.Linear(6, 4), nn.Linear(4, C), pooled

    def forward(self, x):
        y = torch.tanh(self.first(x))
        return self.last(y.mean(1) if self.pooled else y)


class TokensFirst(Tokens):
    """Classes on axis 1, as cross-entropy has them."""

    def forward(self, x):
        return super().forward(x).movedim(-1, 1)


NETWORKS = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, C, bias=False)),
        (N, 6),
    ),
    "conv2d": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0)),
            nn.Tanh(),
            nn.Conv2d(3, 2, 2, dilation=2, padding=2, bias=False),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(50, C),
        ),
        (N, 2, 5, 4),
    ),
    "pooled tokens": (lambda: Tokens(pooled=True), (N, 4, 6)),
    "tokens": (Tokens, (N, 4, 6)),
    "tokens, classes first": (TokensFirst, (N, 4, 6)),
}


def targets(loss, outputs):
    generator = torch.Generator().manual_seed(1)
    if loss == "mse":
        return torch.randn(outputs.shape, generator=generator, dtype=outputs.dtype)
    return torch.randint(0, C, (len(outputs), *outputs.shape[2:]), generator=generator)


def blocks(kfac):
    """{layer: A ⊗ G} over (out, in + bias), row by row."""
    found = {}
    for name, record in kfac.state_dict()["kfac"]["layers"].items():
        A, G = (record[side][0] / record[f"{side}_weight"] for side in "AG")
        found[name] = torch.kron(G, A)
    return found


def their_blocks(model, operator):
    """The same out of curvlinops' matrix over (weight, bias) of every layer."""
    starts, size = {}, 0
    for p in model.parameters():
        starts[p], size = size, size + p.numel()
    matrix = operator @ torch.eye(size, dtype=torch.float64)
    found = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | nn.Conv2d):
            continue
        weight = module.weight
        places = starts[weight] + torch.arange(weight.numel()).reshape(len(weight), -1)
        if module.bias is not None:
            column = starts[module.bias] + torch.arange(len(weight))
            places = torch.cat([places, column[:, None]], 1)
        places = places.flatten()
        found[name] = matrix[places][:, places]
    return found


CASES = [
    (network, loss, sharing)
    for network in NETWORKS
    for loss in ("mse", "cross-entropy")
    for sharing in ("expand", "reduce")
    # tokens are terms of the loss: nothing to reduce; each loss has its place for the classes
    if not (network.startswith("tokens") and sharing == "reduce")
    if network != ("tokens" if loss == "cross-entropy" else "tokens, classes first")
]


def criterion_of(loss, reduction):
    return (nn.MSELoss if loss == "mse" else nn.CrossEntropyLoss)(reduction=reduction)


def likelihood_of(loss, reduction):
    # torch's mean squared error is a mean over coordinates, too
    return Gaussian(0.5 * (C if reduction == "mean" else 1)) if loss == "mse" else Categorical()


def loss_scale(loss, fisher, reduction):
    """curvlinops' factor, which gives an empirical Fisher the size of the other kinds'."""
    return math.sqrt(C) if (loss, fisher, reduction) == ("mse", "empirical", "mean") else 1.0


def example(network, loss):
    make, shape = NETWORKS[network]
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(shape, dtype=torch.float64)
    return model, x, targets(loss, model(x).detach())


every_kind = pytest.mark.parametrize(
    ("fisher", "reduction"), [(f, r) for f in ("empirical", "type-2") for r in ("mean", "sum")]
)


@every_kind
@pytest.mark.parametrize(("network", "loss", "sharing"), CASES)
def test_blocks_are_those_of_curvlinops(network, loss, sharing, fisher, reduction):
    model, x, y = example(network, loss)
    criterion = criterion_of(loss, reduction)
    operator = curvlinops.KFACLinearOperator(
        model, criterion, list(model.parameters()), [(x, y)], fisher_type=fisher,
        kfac_approx=sharing, separate_weight_and_bias=False, check_deterministic=False,
    )  # fmt: skip
    expected = their_blocks(model, operator)
    options = {}
    if fisher == "type-2":
        options["likelihood"] = likelihood_of(loss, reduction)
        if network == "tokens, classes first":
            options["output_of"] = lambda outputs: outputs.movedim(1, -1)
    kfac = KFAC(model, fisher=fisher, weight_sharing=sharing, loss_reduction=reduction, **options)
    (loss_scale(loss, fisher, reduction) * criterion(model(x), y)).backward()
    kfac.step()
    found = blocks(kfac)
    assert found.keys() == expected.keys()
    for name, block in found.items():
        assert_close(block, expected[name])


@every_kind
@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
def test_ekfac_blocks_are_those_of_curvlinops(loss, fisher, reduction):
    """Without shared weights: with them, curvlinops' rows are examples and ours positions."""
    model, x, y = example("linear", loss)
    criterion = criterion_of(loss, reduction)
    operator = curvlinops.EKFACLinearOperator(
        model, criterion, list(model.parameters()), [(x, y)], fisher_type=fisher,
        separate_weight_and_bias=False, check_deterministic=False,
    )  # fmt: skip
    expected = their_blocks(model, operator)
    options = {"likelihood": likelihood_of(loss, reduction)} if fisher == "type-2" else {}
    kfac = KFAC(
        model, fisher=fisher, loss_reduction=reduction, compute_method="ekfac",
        inv_update_steps=2, factor_decay=0.0, **options,
    )  # fmt: skip
    for _ in range(2):  # a basis, then moments in it; gradients change, parameters do not
        model.zero_grad()
        (loss_scale(loss, fisher, reduction) * criterion(model(x), y)).backward()
        kfac.step()
    for name, record in kfac.state_dict()["kfac"]["layers"].items():
        basis = torch.kron(record["G_vectors"][0], record["A_vectors"][0])
        moments = record["products"] / record["products_weight"]
        assert_close(basis @ torch.diag(moments.flatten()) @ basis.T, expected[name])
