"""Which parameters K-FAC covers, and what it says about the others."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from suite.torch import KFAC, LSTM


class Net(nn.Module):
    """One of everything that needs a decision."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, groups=1)
        self.norm = nn.BatchNorm2d(4)
        self.linear = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.half_frozen = nn.Linear(4, 4)
        self.half_frozen.bias.requires_grad_(False)
        self.normed = weight_norm(nn.Linear(4, 4))
        self.attention = nn.MultiheadAttention(4, 2)
        self.embedding = nn.Embedding(5, 4)
        self.tied = nn.Linear(4, 5, bias=False)
        self.tied.weight = self.embedding.weight
        self.special = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.scale = nn.Parameter(torch.ones(()))


def test_every_parameter_is_in_the_report_with_a_reason():
    model = Net()
    routing = KFAC(model, skip_layers=["spec"]).routing()
    assert [route.parameter for route in routing] == [name for name, _ in model.named_parameters()] or (
        {route.parameter for route in routing} == {name for name, _ in model.named_parameters()}
    )
    treatment = {route.parameter: (route.treatment, route.reason) for route in routing}
    for name, factors in {
        "conv.weight": None,
        "conv.bias": None,
        "linear.weight": "5x5, 4x4",
        "linear.bias": "5x5, 4x4",
        "half_frozen.weight": None,
        "norm.weight": "2x2",
        "normed.bias": "4x4",
        "attention.in_proj_weight": "3 x (5x5, 4x4)",
        "attention.in_proj_bias": "3 x (5x5, 4x4)",
        "attention.out_proj.weight": "5x5, 4x4",
        "embedding.weight": "4x4, diag 5",  # and the tied head's: the table's side is diagonal
        "scale": "diag 1",
    }.items():
        assert treatment[name][0] == "kfac", name
        assert (factors or "") in routing[name].factors, name
    assert routing["half_frozen.weight"].factors == "4x4, 4x4"  # no bias in it
    assert treatment["frozen.weight"][0] == treatment["half_frozen.bias"][0] == "frozen"
    for name, why in {
        "special.0.weight": "skip_layers",
        "special.1.bias": "skip_layers",
    }.items():
        assert treatment[name][0] == "plain", name
        assert why in treatment[name][1], name
    table = str(routing)
    assert all(name in table for name, _ in model.named_parameters())
    assert "parameters preconditioned" in table


def test_a_shared_weight_is_one_block_and_its_biases_are_blocks_of_their_own():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    routing = KFAC(model).routing()
    assert routing["0.weight"].factors == "3x3, 3x3"
    assert "one block for 2 uses" in routing["0.weight"].reason
    assert routing["0.bias"].factors == routing["2.bias"].factors == "3x3"
    assert routing["1.weight"].factors == "4x4, 3x3"


def test_a_weight_that_two_kinds_of_layers_share_is_plain_and_says_so():
    model = nn.Sequential(nn.Conv1d(3, 3, 1), nn.Linear(3, 3), nn.Conv1d(3, 3, 1, stride=2))
    model[2].weight = model[0].weight
    routing = KFAC(model).routing()
    assert routing["0.weight"].treatment == "plain"
    assert "different kinds" in routing["0.weight"].reason
    assert routing["1.weight"].treatment == "kfac"


def test_a_shared_bias_is_plain():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].bias = model[0].bias
    routing = KFAC(model).routing()
    assert routing["0.bias"].treatment == "plain"
    assert routing["0.weight"].factors == routing["1.weight"].factors == "3x3, 3x3"


def test_a_module_with_two_names_is_one_layer():
    model = nn.ModuleDict({"first": nn.Linear(3, 4), "norm": nn.LayerNorm(4)})
    model["net"] = nn.Sequential(model["first"], model["norm"])
    routing = KFAC(model).routing()
    assert routing["first.bias"].treatment == "kfac"
    assert routing["first.weight"].factors == "4x4, 4x4"
    assert routing["norm.bias"].factors == "4 x (2x2)"


@pytest.mark.parametrize("pattern", ["^1$", "Linear", "Lin"])
def test_skip_layers_matches_names_and_class_names(pattern):
    model = nn.Sequential(nn.Conv1d(1, 1, 1), nn.Linear(3, 3))
    routing = KFAC(model, skip_layers=[pattern]).routing()
    assert routing["0.weight"].treatment == "kfac"
    assert routing["1.weight"].treatment == "plain"


def test_a_subclass_with_its_own_forward_is_left_alone_where_its_function_is_not_known():
    class Noisy(nn.ConvTranspose1d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    routing = KFAC(nn.Sequential(Noisy(2, 2, 1), nn.Conv1d(2, 2, 1))).routing()
    assert "forward of its own" in routing["0.weight"].reason


def test_a_model_may_list_its_parameters_in_its_own_way():
    """As torchrl's losses do."""

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor = nn.Linear(3, 2)

        def named_parameters(self, prefix="", recurse=True):
            return ((name, p) for name, p in super().named_parameters(prefix, recurse))

    assert {route.treatment for route in KFAC(Loss()).routing()} == {"kfac"}


def test_a_model_without_any_layer_is_an_error_that_says_why():
    with pytest.raises(ValueError, match="would precondition nothing") as caught:
        KFAC(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)), skip_layers=["Linear", "Norm"])
    assert "skip_layers" in str(caught.value)


def test_a_lazy_layer_is_an_error_until_it_has_a_shape():
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
    with pytest.raises(ValueError, match="'0' is lazy"):
        KFAC(model)
    model(torch.randn(2, 4))
    assert KFAC(model).routing()["0.weight"].treatment == "kfac"


def test_gradients_keep_their_storage():
    model = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    kfac = KFAC(model)
    model(torch.randn(4, 2, 6, 6)).square().mean().backward()
    storage = model.weight.grad.data_ptr()
    kfac.step()
    assert model.weight.grad.data_ptr() == storage


class LoRA(nn.Module):
    """A frozen layer with a trained update of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def test_adapters_train_beside_a_frozen_layer():
    torch.manual_seed(0)
    model = nn.Sequential(LoRA(nn.Linear(6, 6), 2), nn.Tanh(), LoRA(nn.Linear(6, 3), 2))
    kfac = KFAC(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    routing = kfac.routing()
    treatments = {route.parameter.split(".", 1)[1]: route.treatment for route in routing}
    assert treatments == {
        "base.weight": "frozen",
        "base.bias": "frozen",
        "down.weight": "kfac",
        "up.weight": "kfac",
    }
    x, y, losses = torch.randn(16, 6), torch.arange(16) % 3, []
    for _ in range(30):
        kfac.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        kfac.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_a_parametrization_that_is_not_known_is_plain_and_says_so():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    nn.utils.parametrizations.orthogonal(model[0])
    routing = KFAC(model).routing()
    route = routing["0.parametrizations.weight.original"]
    assert route.treatment == "plain"
    assert "parametrization" in route.reason


class Exponential(nn.Module):
    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        return scale.exp()


class Scaled(nn.Module):
    def __init__(self, parametrized: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.scale = nn.Linear(4, 3), nn.Parameter(torch.zeros(3))
        self.parametrized = parametrized
        if parametrized:
            nn.utils.parametrize.register_parametrization(self, "scale", Exponential())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * (self.scale if self.parametrized else self.scale.exp())


def test_layers_inside_of_a_module_with_a_parametrization_are_layers_like_others():
    found = []
    for parametrized in (False, True):
        model = Scaled(parametrized)
        kfac = KFAC(model, kl_clip=None)
        model(torch.linspace(-1, 1, 24).reshape(6, 4)).square().mean().backward()
        kfac.step()
        assert kfac.routing()["inner.weight"].treatment == "kfac"
        found.append(model.inner.weight.grad)
    route = kfac.routing()["parametrizations.scale.original"]
    assert (route.treatment, "parametrization" in route.reason) == ("plain", True)
    torch.testing.assert_close(found[1], found[0])


def of_attention(key: str) -> nn.Module:
    attention = nn.MultiheadAttention(4, 2)
    spectral_norm(attention.out_proj if key == "weight" else attention, key)
    return attention


class Recurrent(nn.Module):
    def __init__(self, norm, name: str) -> None:
        super().__init__()
        self.inner = norm(LSTM(3, 4, bidirectional=True), name)

    def forward(self, x: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.inner(x)


@pytest.mark.parametrize(
    ("make", "plain", "width"),
    [
        (
            lambda: of_attention("weight"),
            {"out_proj.parametrizations.weight.original", "out_proj.bias"},
            4,
        ),
        (
            lambda: of_attention("in_proj_weight"),
            {"parametrizations.in_proj_weight.original", "in_proj_bias"},
            4,
        ),
        (
            lambda: Recurrent(weight_norm, "weight_hh_l0"),
            {
                *(f"inner.parametrizations.weight_hh_l0.original{i}" for i in range(2)),
                "inner.bias_hh_l0",
            },
            3,
        ),
        (
            lambda: Recurrent(nn.utils.weight_norm, "weight_ih_l0_reverse"),
            {*(f"inner.weight_ih_l0_reverse_{part}" for part in "gv"), "inner.bias_ih_l0_reverse"},
            3,
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
def test_a_weight_that_attention_or_a_recurrent_layer_computes_is_plain(make, plain, width):
    model = make()
    kfac = KFAC(model, damping=0.1)
    assert {r.parameter for r in kfac.routing() if r.treatment == "plain"} == plain
    x = torch.randn(5, 2, width)
    model(x, x, x)[0].square().sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    kfac.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p.grad, gradients[name])}
    assert changed == gradients.keys() - plain


def test_of_a_pruned_layer_the_bias_is_plain_if_it_is_pruned_and_says_why():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for name in ("weight", "bias"):
        prune.random_unstructured(model[0], name, 0.5)
    kfac = KFAC(model)
    model(torch.randn(5, 3)).square().mean().backward()
    kfac.step()
    routing = kfac.routing()
    assert routing["0.weight_orig"].treatment == "kfac"
    assert routing["0.bias_orig"].treatment == "plain"
    assert "is computed" in routing["0.bias_orig"].reason


class WithActivation(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias).relu()


def pruned(layer, name="weight"):
    return prune.random_unstructured(layer, name, 0.5)


@pytest.mark.parametrize("make", [nn.utils.spectral_norm, spectral_norm, pruned])
def test_a_computed_weight_of_a_layer_with_a_forward_of_its_own_is_plain(make):
    routing = KFAC(nn.Sequential(make(WithActivation(3, 3)), nn.Linear(3, 3))).routing()
    plain = [route for route in routing if route.treatment == "plain"]
    assert len(plain) == 2
    assert all("a forward of its own" in route.reason for route in plain)


def test_a_weight_whose_parts_are_computed_in_turn_is_plain():
    model = nn.Sequential(
        pruned(nn.utils.spectral_norm(nn.Linear(3, 3)), "weight_orig"), nn.Linear(3, 3)
    )
    kfac = KFAC(model)
    assert "0.weight_orig_orig" in {r.parameter for r in kfac.routing() if r.treatment == "plain"}
    model(torch.randn(5, 3)).square().mean().backward()
    kfac.step()


class Doubling(prune.RandomUnstructured):
    def apply_mask(self, module):
        return 2 * super().apply_mask(module)


def test_pruning_that_does_more_is_not_known():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    Doubling.apply(model[0], "weight", 0.5)
    assert KFAC(model).routing()["0.weight_orig"].treatment == "plain"


@pytest.mark.parametrize(
    ("make", "remove"),
    [
        (nn.utils.spectral_norm, nn.utils.remove_spectral_norm),
        (spectral_norm, lambda layer: nn.utils.parametrize.remove_parametrizations(layer, "weight")),
        (weight_norm, lambda layer: nn.utils.parametrize.remove_parametrizations(layer, "weight")),
        (pruned, lambda layer: prune.remove(layer, "weight")),
    ],
)
def test_what_made_a_weight_may_be_removed(make, remove):
    model = nn.Sequential(make(nn.Linear(3, 3)), nn.Linear(3, 3))
    kfac = KFAC(model)
    model(torch.randn(5, 3)).square().mean().backward()
    kfac.step()
    kfac.zero_grad()
    remove(model[0])
    model(torch.randn(5, 3)).square().mean().backward()
    assert model[0].weight.grad is not None


def test_a_layer_that_is_both_pruned_and_normed_is_plain():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    prune.random_unstructured(model[0], "weight", 0.5)
    layer = nn.utils.spectral_norm(nn.Linear(3, 3))
    for hook in layer._forward_pre_hooks.values():
        model[0].register_forward_pre_hook(hook)
    assert KFAC(model).routing()["0.weight_orig"].treatment == "plain"


def test_a_layer_without_outputs_is_no_obstacle():
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
    model[1].weight, model[1].bias = (nn.Parameter(p[:0].detach()) for p in model[1].parameters())
    model[1].out_features = 0
    kfac = KFAC(model)
    x = torch.randn(4, 3)
    (model[0](x).square().sum() + model[1](x).sum()).backward()
    kfac.step()
    assert kfac.steps == 1


@pytest.mark.parametrize("kind", [nn.Bilinear, nn.LSTM])
def test_layers_that_are_not_covered_say_why(kind):
    arguments = {nn.Bilinear: (2, 2, 2), nn.LSTM: (2, 2)}[kind]
    routing = KFAC(nn.ModuleList([nn.Linear(2, 2), kind(*arguments)])).routing()
    reasons = {r.reason for r in routing if r.treatment == "plain"}
    assert len(reasons) == 1
    assert kind.__name__ in reasons.pop()


def test_the_kind_of_weight_sharing_may_depend_on_the_kind_of_layer():
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Linear(4, 3))
    kfac = KFAC(model, weight_sharing={"Conv1d": "reduce"})
    assert "reduce" in kfac.routing()["0.weight"].reason
    assert "reduce" not in kfac.routing()["1.weight"].reason
    for wrong in ("spread", {"Linear": "spread"}):
        with pytest.raises(ValueError, match=r"weight_sharing.*must be one of 'expand', 'reduce'"):
            KFAC(nn.Linear(2, 2), weight_sharing=wrong)


@pytest.mark.filterwarnings("ignore:.*jit.script.*deprecated")
def test_torchscript_children_are_plain_and_say_why():
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(4, 8), nn.Tanh())), nn.Linear(8, 3))
    kfac = KFAC(model)
    model(torch.randn(5, 4)).sum().backward()
    kfac.step()
    assert kfac.routing()["1.weight"].treatment == "kfac"
    assert "TorchScript" in kfac.routing()["0.0.weight"].reason
    with pytest.raises(TypeError, match="ScriptModule"):
        KFAC(model[0])


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("kind", [weight_norm, nn.utils.weight_norm])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_norm_in_half_precision(kind, dtype):
    layers = {"linear": (nn.Linear(3, 4), (5, 3)), "conv": (nn.Conv1d(3, 4, 2), (5, 3, 6))}
    for layer, shape in layers.values():
        model = kind(layer).to(dtype)
        kfac = KFAC(model, kl_clip=None)
        model(torch.randn(shape, dtype=dtype)).square().mean().backward()
        kfac.step()
        assert kfac.metrics()["layers"]["magnitude"]["ready"]
