"""Biases of layers, and scales and shifts of norms, that a model uses besides: K-FAC names the layer."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from suite.torch import KFAC


class Used(nn.Module):
    """A layer in front of one whose bias, or scale, is used besides."""

    def __init__(self, layer, use):
        super().__init__()
        self.first, self.layer, self.use = nn.Linear(4, 4), layer, use

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.use(h, self.layer)


LAYERS = {
    "linear": lambda: nn.Linear(4, 4),
    "convolution": lambda: nn.Conv1d(4, 4, 1),
    "transposed convolution": lambda: nn.ConvTranspose1d(4, 4, 1),
    "norm": lambda: nn.LayerNorm(4),
    "batch norm": lambda: nn.BatchNorm1d(4),
}


def called(h, layer):
    return layer(h[..., None]).flatten(1) if hasattr(layer, "kernel_size") else layer(h)


MISSED = {
    "a gain": ("linear", lambda h, layer: layer(h) + layer.bias * h),
    "a view of a cast": ("linear", lambda h, layer: layer(h) + layer.bias.double()[None] * h),
    "channels": ("convolution", lambda h, layer: called(h, layer) + layer.bias * h),
    "channels of outputs": (
        "transposed convolution",
        lambda h, layer: called(h, layer) + layer.bias * h,
    ),
    "a scale": ("norm", lambda h, layer: layer(h) + layer.weight * h),
    "a shift": ("norm", lambda h, layer: layer(h) + layer.bias * h),
    "a scale of a batch": ("batch norm", lambda h, layer: layer(h) + layer.weight * h),
}


def warns_of_uses(model, recwarn, x=None):
    kfac = KFAC(model)
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4).sin() if x is None else x
    model(x).square().mean().backward()
    kfac.step()
    return [str(one.message) for one in recwarn if "miss some uses" in str(one.message)]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")
@pytest.mark.parametrize(
    ("case", "compiled"),
    # In graphs functions of the weight of a transposed convolution are not watched, either.
    [
        (case, c)
        for case in MISSED
        for c in (False, True)
        if not c or "transposed" not in MISSED[case][0]
    ],
)
def test_other_uses_are_named(case, compiled, recwarn):
    kind, use = MISSED[case]
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Used(LAYERS[kind](), use).double()
    if compiled:
        model.compile(backend="aot_eager")
    (said,) = warns_of_uses(model, recwarn)
    assert "'layer" in said
    assert "'first'" not in said


FINE = {
    "twice": ("linear", lambda h, layer: layer(h) + layer(h.sin())),
    "by functions": ("linear", lambda h, layer: F.linear(h, layer.weight, layer.bias) + layer(h)),
    "added": ("linear", lambda h, layer: h @ layer.weight.T + layer.bias),
    "not in the loss": ("linear", lambda h, layer: layer(h) + (layer.bias * h).detach()),
    "one more": ("norm", lambda h, layer: F.layer_norm(h, (4,), 1 + layer.weight, layer.bias)),
    "by a function": ("convolution", lambda h, layer: F.conv1d(h[..., None], layer.weight, layer.bias)),
    "in evaluation": ("batch norm", lambda h, layer: layer.eval()(h)),
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:these layers got a gradient:RuntimeWarning")
@pytest.mark.parametrize(
    ("case", "compiled"),
    # Graphs do not tell which uses the loss is made of.
    [(case, c) for case in FINE for c in (False, True) if not c or case != "not in the loss"],
)
def test_calls_of_the_layer_are_not(case, compiled, recwarn):
    kind, use = FINE[case]
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Used(LAYERS[kind](), use).double()
    if compiled:
        model.compile(backend="aot_eager")
    assert not warns_of_uses(model, recwarn)
