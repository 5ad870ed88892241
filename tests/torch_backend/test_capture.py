"""Statistics out of real forward and backward passes, against autograd's own gradients and loops."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from suite.core import statistics
from suite.torch import KFAC, detach, uses
from suite.torch.capture import LayerCapture
from suite.torch.hooks import ModeAround
from suite.torch.rows import rows_of
from suite.torch.watches import OutputWatch

torch.manual_seed(0)

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 3), (5, 4)),
    "linear without bias": (lambda: nn.Linear(4, 3, bias=False), (5, 4)),
    "linear on sequences": (lambda: nn.Linear(4, 3), (5, 2, 4)),
    "linear on one example": (lambda: nn.Linear(4, 3), (4,)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1), (5, 2, 8)),
    "conv2d": (lambda: nn.Conv2d(2, 3, (3, 2), padding=(1, 0)), (4, 2, 5, 6)),
    "conv2d dilated": (lambda: nn.Conv2d(2, 3, 2, dilation=2, bias=False), (4, 2, 5, 6)),
    "conv2d same": (lambda: nn.Conv2d(2, 3, (2, 4), padding="same"), (4, 2, 5, 6)),
    "conv2d valid": (lambda: nn.Conv2d(2, 3, 2, padding="valid"), (4, 2, 5, 6)),
    "conv2d grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), (4, 4, 5, 5)),
    "conv2d depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, padding=1), (4, 4, 5, 5)),
    "conv2d reflect": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (4, 2, 5, 5)),
    "conv2d circular": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (4, 2, 5, 5)),
    "conv2d without batch axis": (lambda: nn.Conv2d(2, 3, 3), (2, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, stride=(1, 2, 1)), (3, 2, 3, 4, 4)),
}


def double(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def taken(kfac: KFAC) -> list[statistics.LayerStatistics]:
    found = kfac._engine.capture.take_statistics()
    assert all(one is not None for one in found)
    return [one.main for one in found]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", LAYERS)
def test_rows_reproduce_the_gradient_and_the_sums(name):
    make, shape = LAYERS[name]
    layer = double(make)
    kfac = KFAC(layer)
    x = torch.randn(shape, dtype=torch.float64)
    y = layer(x)
    y.retain_grad()
    (y * torch.randn_like(y)).sum().backward()
    spec = kfac._engine.layers[0].spec
    a, g = rows_of(spec, x, y.grad, None)
    if spec.bias:
        a = torch.cat([a, torch.ones_like(a[..., :1])], dim=-1)
    # autograd's own gradient is Σ g aᵀ: rows in the wrong order or place would not give it
    own = kfac._engine.layers[0]
    gradient = own.gradient_matrix(*(p.grad for p in own.parameters()))
    torch.testing.assert_close(torch.einsum("bri,brj->bij", g, a), gradient, rtol=1e-12, atol=1e-12)
    (sums,) = taken(kfac)
    torch.testing.assert_close(sums.A, torch.einsum("bri,brj->bij", a, a), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sums.G, torch.einsum("bri,brj->bij", g, g), rtol=1e-12, atol=1e-12)
    assert int(sums.rows) == a.shape[1]


def test_large_sides_are_diagonal():
    layer = double(lambda: nn.Linear(6, 2))
    kfac = KFAC(layer, max_factor_size=5)
    x = torch.randn(7, 6, dtype=torch.float64)
    layer(x).square().sum().backward()
    (sums,) = taken(kfac)
    ones = torch.ones(7, 1, dtype=torch.float64)
    torch.testing.assert_close(sums.A[0], torch.cat([x, ones], 1).square().sum(0))
    assert sums.G.shape == (1, 2, 2)
    assert "diag 7" in kfac.routing()["weight"].factors


def test_eval_no_grad_and_frozen_input_leave_no_trace():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    kfac = KFAC(model)
    model.eval()
    model(torch.randn(4, 3)).sum().backward()
    model.train()
    with torch.no_grad():
        model(torch.randn(4, 3))
    model(torch.randn(4, 3))  # a forward pass without a backward pass
    assert kfac._engine.capture.take_statistics() == [None, None]


def noting(into: list, method: Callable[..., Any]) -> Callable[..., Any]:
    def noted(self: Any, *args: Any) -> Any:
        into.append(method.__name__)
        return method(self, *args)

    return noted


def test_steps_between_factor_updates_capture_nothing():
    model = nn.Linear(3, 2)
    kfac = KFAC(model, factor_update_steps=2)
    seen = []
    for _ in range(4):
        model(torch.randn(4, 3)).sum().backward()
        seen.append(kfac._engine.capture.by_layer[0].G.grad is not None)
        kfac.step()
    assert seen == [True, False, True, False]


def test_between_factor_updates_no_hook_asks_whether_there_is_anything_to_see(monkeypatch):
    asked = []
    for owner, name in (
        (LayerCapture, "observe"),
        (ModeAround, "enter"),
        (ModeAround, "observe"),
        (OutputWatch, "observe"),
    ):
        monkeypatch.setattr(owner, name, noting(asked, getattr(owner, name)))
    model = double(lambda: nn.Sequential(Scaled(), nn.ReLU(), nn.Linear(2, 2)))
    periods = {"factor_update_steps": 3, "skip_layers": ["2"]}
    kfac, counts = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), **periods), []
    for _ in range(7):
        model(torch.ones(4, 3, dtype=torch.float64)).sum().backward()
        kfac.step()
        kfac.zero_grad()
        counts.append(len(asked))
        asked.clear()
    assert [count > 0 for count in counts] == [True, False, False, True, False, False, True]


def test_hooks_sleep_after_a_forward_was_interrupted():
    class Interrupted(Scaled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.interrupts:
                raise KeyboardInterrupt
            return super().forward(x)

    model = Interrupted()
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), factor_update_steps=2)
    for number in range(4):
        for model.interrupts in (True, False) if number == 2 else (False,):
            model.train(not model.interrupts)
            try:
                model(torch.ones(4, 3)).sum().backward()
            except KeyboardInterrupt:
                assert number == 2
        kfac.step()
        kfac.zero_grad()
        hooks = [*model._forward_pre_hooks.values(), *model._forward_hooks.values()]
        assert hooks
        assert all(hook.awake == bool(number % 2) and not hook.owed for hook in hooks)


def test_hooks_look_at_a_model_that_is_yet_to_be_discovered_whether_statistics_are_wanted_or_not():
    model = nn.Linear(3, 2)
    kfac = KFAC(model)
    kfac._engine.capture.clock.want(False)
    model(torch.ones(4, 3))
    assert kfac._engine.capture.by_layer[0].first.calls == 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_counts_once(reentrant):
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    results = []
    for wrapped in (False, True):
        model = double(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
        kfac = KFAC(model)
        y = checkpoint(model, x, use_reentrant=reentrant) if wrapped else model(x)
        y.square().sum().backward()
        results.append(taken(kfac))
    for plain, recomputed in zip(*results, strict=True):
        for a, b in zip(plain, recomputed, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_layer_used_twice_and_in_place_ops_after_it():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu_(self.layer(input=torch.relu_(self.layer(x))))

    model = double(Twice)
    reference = copy.deepcopy(model)
    kfac = KFAC(model)
    x = torch.randn(5, 4, dtype=torch.float64)
    model(x).square().sum().backward()
    reference(x).square().sum().backward()
    torch.testing.assert_close(model.layer.weight.grad, reference.layer.weight.grad, rtol=0, atol=0)
    hidden = torch.relu(reference.layer(x)).detach()
    a = torch.cat([torch.cat([x, hidden]), torch.ones(10, 1, dtype=torch.float64)], 1)
    (sums,) = taken(kfac)
    torch.testing.assert_close(sums.A[0], a.T @ a)
    assert int(sums.rows) == 10


@pytest.mark.parametrize("compute_method", ["eigen", "inverse"])
def test_repeating_or_splitting_the_data_changes_nothing(compute_method):
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    directions = []
    for batches in (
        [(x, y)],
        [(x.repeat(3, 1), y.repeat(3, 1))],
        [(x[:2], y[:2]), (x[2:4], y[2:4]), (x[4:], y[4:])],
    ):
        model = double(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)))
        kfac = KFAC(model, compute_method=compute_method)
        for xs, ys in batches:
            (nn.functional.mse_loss(model(xs), ys) / len(batches)).backward()
        kfac.step()
        directions.append([p.grad for p in model.parameters()])
    for other in directions[1:]:
        for a, b in zip(directions[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_sum_loss_is_the_mean_loss_scaled():
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 1, dtype=torch.float64)
    factors = []
    for reduction in ("mean", "sum"):
        model = double(lambda: nn.Linear(4, 1))
        kfac = KFAC(model, loss_reduction=reduction)
        nn.functional.mse_loss(model(x), y, reduction=reduction).backward()
        kfac.step()
        factors.append(kfac.state_dict()["kfac"]["layers"][""])
    torch.testing.assert_close(factors[0]["A"], factors[1]["A"])
    torch.testing.assert_close(6 * factors[0]["G"], factors[1]["G"])


def test_autocast_keeps_float32_statistics():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    kfac = KFAC(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randn(16, 8)).float().square().mean()
    loss.backward()
    assert {one.A.dtype for one in taken(kfac)} == {torch.float32}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
def test_a_compiled_model_gives_the_same_statistics():
    x = torch.randn(5, 4, dtype=torch.float64)
    results = []
    for compiled in (False, True):
        model = double(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)))
        kfac = KFAC(model)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        run(x).square().sum().backward()
        results.append(taken(kfac))
    for eager, traced in zip(*results, strict=True):
        for a, b in zip(eager, traced, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("settings", "dtype"),
    [({}, torch.float32), ({"max_examples": 4}, torch.float64), ({"max_rows": 30}, torch.float32)],
)
def test_a_compiled_convolutional_network_gives_the_same_statistics(settings, dtype):
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 4, 3, 2),
        nn.Conv2d(4, 2, 1),
    ]
    model, x = nn.Sequential(*layers).to(dtype), torch.randn(6, 3, 7, 6, dtype=dtype)
    results = []
    for compiled in (False, True):
        one = copy.deepcopy(model)
        kfac = KFAC(one, **settings)
        run = torch.compile(one, backend="aot_eager", fullgraph=True) if compiled else one
        run(x).square().sum().backward()
        results.append(taken(kfac))
    for eager, traced in zip(*results, strict=True):
        for a, b in zip(eager, traced, strict=True):
            torch.testing.assert_close(a, b)


class Tied(nn.Module):
    """Its forward is watched, for the table's other use; heads are split as transformers do it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.query = nn.Embedding(7, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.query(self.tokens(x)).unflatten(2, (2, -1)).transpose(1, 2)
        return F.linear(torch.tanh(q.transpose(1, 2).flatten(2)), self.tokens.weight)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")  # dynamo looks at .grad
@pytest.mark.skipif(torch.__version__ < (2, 8), reason="torch.compile breaks off at sets of functions")
def test_a_watched_forward_is_compiled_in_one_piece():
    torch.manual_seed(0)
    model, x = Tied().double(), torch.randint(7, (3, 5))
    results = []
    for compiled in (False, True):
        one = copy.deepcopy(model)
        kfac = KFAC(one)
        run = torch.compile(one, backend="aot_eager", fullgraph=True) if compiled else one
        for _ in range(2):  # the first finds out who reads what
            run(x).square().sum().backward()
            results.append(taken(kfac))
    for eager, traced in zip(results[:2], results[2:], strict=True):
        for a, b in zip(eager, traced, strict=True):
            for found, expected in zip(a, b, strict=True):
                torch.testing.assert_close(found, expected)


def test_the_hooked_model_computes_what_it_did():
    model = double(lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(18, 2)))
    reference = copy.deepcopy(model)
    kfac = KFAC(model)
    x = torch.randn(3, 1, 5, 5, dtype=torch.float64)
    for one in (model, reference):
        one(x).square().sum().backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0)
    kfac.detach()
    assert all(not module._forward_hooks for module in model.modules())


def test_copies_of_the_model_do_not_feed_the_original():
    model = nn.Linear(3, 2)
    kfac = KFAC(model)
    twin = copy.deepcopy(model)
    twin(torch.randn(4, 3)).sum().backward()
    assert kfac._engine.capture.take_statistics() == [None]
    KFAC(twin)  # and can have a K-FAC of its own


def test_nothing_stays_alive_after_del():
    model = nn.Linear(3, 2)
    kfac = KFAC(model)
    model(torch.randn(4, 3)).sum().backward()
    kfac.step()
    gone = weakref.ref(kfac._engine)
    del kfac
    gc.collect()
    assert gone() is None
    model(torch.randn(4, 3)).sum().backward()  # the hook that is left does nothing
    KFAC(model)


def test_two_on_one_model_is_an_error_until_the_first_is_detached():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    first = KFAC(model[1])
    with pytest.raises(ValueError, match="'1' already has a K-FAC attached"):
        KFAC(model)
    assert not model[0]._forward_hooks
    first.detach()
    KFAC(model)


def test_detach_takes_off_what_a_trainer_keeps():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    other = nn.Linear(3, 2)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, model[1], other)]
    kept = KFAC(model, optimizers[0])
    elsewhere = KFAC(other, optimizers[2])
    with pytest.raises(ValueError, match=r"already has .*suite\.torch\.detach\(model\)"):
        KFAC(model[1], optimizers[1])
    detach(model[1])
    KFAC(model[1], optimizers[1])
    model(torch.randn(4, 3)).sum().backward()
    with pytest.warns(RuntimeWarning, match="K-FAC was detached"):
        kept.step()
    other(torch.randn(4, 3)).sum().backward()
    elsewhere.step()
    assert elsewhere.routing()["weight"].treatment == "kfac"


def test_two_on_parts_of_one_model_are_as_two_on_two_models():
    def train(whole: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.ModuleDict(
            {k: nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for k in ("first", "second")}
        )
        kfacs = []
        for part, other in (("first", "second"), ("second", "first")):
            base = torch.optim.SGD(model[part].parameters(), lr=0.1, momentum=0.9)
            on = (model, base) if whole else (model[part], base)
            kfacs.append(KFAC(*on, skip_layers=[other] if whole else None))
        for _ in range(6):
            for kfac in kfacs:
                for each in kfacs:
                    each.zero_grad()
                (model["second"](model["first"](torch.randn(8, 3))) - 1).square().mean().backward()
                kfac.step()
        return list(model.parameters())

    for one, two in zip(train(whole=True), train(whole=False), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_two_models_that_share_a_weight_may_have_one_each():
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    second.weight = first.weight
    kfacs = [KFAC(model) for model in (first, second)]
    for model, kfac in zip((first, second), kfacs, strict=True):
        model(torch.randn(4, 3)).square().sum().backward()
        kfac.step()
        kfac.zero_grad()
        assert kfac.routing()["weight"].treatment == "kfac"


def test_layers_that_are_never_called_are_reported():
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.called, self.read = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.called(x) @ self.read.weight.T

    model = Functional()
    kfac = KFAC(model, kl_clip=None)
    model(torch.randn(4, 3)).square().sum().backward()
    before = model.read.weight.grad.clone()
    with pytest.warns(RuntimeWarning, match="'read'"):
        kfac.step()
    torch.testing.assert_close(model.read.weight.grad, before, rtol=0, atol=0)
    assert "no statistics yet" in kfac.routing()["read.weight"].reason
    assert kfac.routing()["read.weight"].treatment == "waiting"
    assert kfac.routing()["called.weight"].treatment == "kfac"
    assert "no statistics yet" not in kfac.routing()["called.weight"].reason
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        model(torch.randn(4, 3)).square().sum().backward()
        kfac.step()


def test_a_weight_that_is_used_outside_of_its_layer_is_reported_once():
    class Reused(nn.Module):
        def __init__(self, functional: bool) -> None:
            super().__init__()
            self.embedding, self.body = nn.Embedding(5, 3), nn.Linear(3, 3)
            self.functional = functional

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.body(self.body(self.embedding(tokens)))
            return x @ self.embedding.weight.sin().T if self.functional else x

    for functional in (True, False):
        model = Reused(functional)
        kfac = KFAC(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                for _ in range(2):  # micro-batches
                    model(torch.arange(5)).square().sum().backward()
                kfac.step()
        said = [str(w.message) for w in caught]
        assert len(said) == functional
        assert all("'embedding'" in s and "'body'" not in s for s in said)


def test_a_free_parameter_with_a_use_that_is_not_understood_is_reported():
    class Free(nn.Module):
        def __init__(self, strange: bool) -> None:
            super().__init__()
            self.scale, self.layer, self.strange = nn.Parameter(torch.ones(3)), nn.Linear(3, 3), strange

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layer(x) * self.scale
            return x * self.scale.cumsum(0) if self.strange else x

    for strange in (True, False):
        model = Free(strange)
        kfac = KFAC(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model(torch.randn(4, 3)).square().sum().backward()
                kfac.step()
        assert len(caught) == strange
        assert all("'scale'" in str(w.message) for w in caught)


def test_a_forward_that_raises_leaves_no_mode_behind():
    class Raises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.layer = nn.Parameter(torch.ones(3)), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x * self.scale)

    model = Raises()
    kfac = KFAC(model)
    before = torch.overrides._len_torch_function_stack()
    with pytest.raises(RuntimeError):
        model(torch.randn(4, 2))
    assert torch.overrides._len_torch_function_stack() == before
    model(torch.randn(4, 3)).sum().backward()
    kfac.step()


def test_a_bias_whose_weight_is_frozen_lets_inputs_change_in_place():
    layer = nn.Linear(3, 3)
    layer.weight.requires_grad_(False)
    kfac = KFAC(nn.Sequential(layer, nn.Linear(3, 2)))
    x = torch.randn(4, 3)
    y = layer(x)
    x.add_(1)
    y.sum().backward()
    assert kfac._engine.capture.take_statistics()[0] is not None


def test_training_in_eval_mode_is_reported():
    model = nn.Linear(3, 2).eval()
    kfac = KFAC(model)
    model(torch.randn(4, 3)).sum().backward()
    with pytest.warns(RuntimeWarning, match="saw no layer run in training mode"):
        kfac.step()


def test_the_loss_has_as_many_terms_as_the_last_layer_has_rows():
    torch.manual_seed(0)
    pooled = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Tanh(), nn.AdaptiveAvgPool1d(1), nn.Flatten())
    model = nn.Sequential(pooled, nn.Linear(2, 2)).double()
    kfac = KFAC(model)
    y = model(torch.randn(5, 1, 6, dtype=torch.float64))
    y.retain_grad()
    y.square().sum(1).mean().backward()
    kfac.step()
    layers = kfac.state_dict()["kfac"]["layers"]
    # 5 terms: G = (1/5) Σ (5 g)(5 g)ᵀ, also for the convolution with its 20 rows
    G = layers["1"]["G"][0] / layers["1"]["G_weight"][0]
    torch.testing.assert_close(G, 5 * y.grad.T @ y.grad)


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("skip", [[], ["head"]])
def test_the_number_of_terms_survives_checkpointing_and_an_uncovered_head(reentrant, skip):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Conv1d(1, 2, 3, padding=1), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            body = self.body
            y = body(x) if reentrant is None else checkpoint(body, x, use_reentrant=reentrant)
            return self.head(torch.tanh(y).mean(-1))

    model = double(Net)
    kfac = KFAC(model, skip_layers=skip)
    x = torch.randn(5, 1, 7, dtype=torch.float64, requires_grad=True)
    model(x).square().mean().backward()
    taken = kfac._engine.capture.take_statistics()
    assert float(kfac._engine.agreements.terms_of(taken)) == pytest.approx(5)
    kfac.detach()
    assert all(not module._forward_hooks for module in model.modules())


def test_clearing_the_models_gradients_clears_its_statistics():
    layer = double(lambda: nn.Linear(1, 1, bias=False))
    kfac = KFAC(layer)
    layer(torch.full((1, 1), 100.0, dtype=torch.float64)).sum().backward()
    layer.zero_grad()
    layer(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
    assert float(taken(kfac)[0].A) == 1


def test_gradients_do_not_depend_on_whether_statistics_are_captured():
    gradients = []
    for wanted in (True, False):
        model = double(lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)))
        kfac = KFAC(model)
        kfac._engine.capture.clock.want(wanted)
        model(torch.ones(3, 4, dtype=torch.float64)).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


class Scaled(nn.Linear):
    """With parameters of its own beside a layer."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.body, self.scale = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.body(x) * self.scale)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # forward_ad's own
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")  # torch 2.14's
def test_derivatives_forward_are_those_without_kfac():
    model, x = Scaled().double(), torch.randn(5, 3, dtype=torch.float64)
    _, expected = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    kfac = KFAC(model)
    with forward_ad.dual_level():
        y = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))
    torch.testing.assert_close(y.tangent, expected, rtol=1e-12, atol=1e-12)
    kfac.detach()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # forward_ad's own
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")  # torch 2.14's
@pytest.mark.parametrize("how", ["hessian", "vmap", "forward mode"])
def test_layers_that_also_run_where_nothing_is_seen_are_warned_of(how):
    """A PINN: derivatives of a residual by torch.func, values at the boundary."""
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    kfac, x, boundary = KFAC(model), torch.randn(5, 2), torch.randn(3, 2)

    def u(x):
        return model(x)[0]

    if how == "forward mode":
        with forward_ad.dual_level():
            residual = forward_ad.unpack_dual(model(forward_ad.make_dual(x, x))).tangent
    else:
        residual = torch.vmap(torch.func.hessian(u) if how == "hessian" else u)(x)
    (residual.square().mean() + model(boundary).square().mean()).backward()
    # Second derivatives by the input have no part of the last layer's own output.
    names = "'0'" if how == "hessian" else "'0', '2'"
    with pytest.warns(RuntimeWarning, match=f"sees nothing: .* their other calls alone: {names}. "):
        kfac.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once, and not of what is only logged
        (torch.vmap(u)(x).square().mean() + model(boundary).square().mean()).backward()
        kfac.step()


def test_transforms_that_are_no_part_of_the_loss_are_no_matter():
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    kfac, x = KFAC(model), torch.randn(5, 2)

    def loss_of(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logged = torch.vmap(torch.func.grad(loss_of), (None, 0))(dict(model.named_parameters()), x)
        slopes = torch.vmap(torch.func.jacrev(model))(x)
        assert slopes.requires_grad
        assert len(logged) == 4
        model(x).square().mean().backward()
        kfac.step()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_inputs_are_rows_like_others(layout):
    x = torch.randn(7, 4) * (torch.rand(7, 4) > 0.5)
    found = []
    for given in (x, x.to_sparse(layout=layout)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(given).square().mean().backward()
        kfac.step()
        found.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_inputs_pass_and_what_they_reach_keeps_its_gradient(layout):
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.stack([part.mean(0) for part in self.first(x).unbind()]))

    model = Nested()
    x = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=layout)
    plain = torch.autograd.grad(model(x).square().mean(), model.first.weight)[0]
    kfac = KFAC(model, kl_clip=None)
    model(x).square().mean().backward()
    with pytest.warns(RuntimeWarning, match="were not seen running.*'first'"):
        kfac.step()
    assert torch.equal(model.first.weight.grad, plain)


class Codebook(nn.Module):
    """The nearest row, found without a gradient, and looked up."""

    def __init__(self):
        super().__init__()
        self.rows, self.free, self.out = nn.Embedding(5, 3), nn.Parameter(torch.ones(3)), nn.Linear(3, 2)

    def forward(self, x):
        self.norms = [self.out.weight.norm().item(), self.free.square().sum().detach()]
        self.unused = self.rows.weight.abs().mean(), (self.free * self.free).sum()
        nearest = torch.cdist(x, self.rows.weight).argmin(1)
        return self.out(self.rows(nearest) * self.free)


def test_uses_that_the_loss_does_not_depend_on_are_not_missed():
    torch.manual_seed(0)
    model = Codebook().double()
    kfac = KFAC(model)
    model(torch.randn(8, 3, dtype=torch.float64)).square().mean().backward()
    kfac.step()  # without a warning
    assert {route.treatment for route in kfac.routing()} == {"kfac"}


@pytest.mark.parametrize("unused", [0, 1])
def test_uses_that_it_depends_on_are(unused):
    torch.manual_seed(0)
    model = Codebook().double()
    kfac = KFAC(model)
    (model(torch.randn(8, 3, dtype=torch.float64)).square().mean() + model.unused[unused]).backward()
    with pytest.warns(RuntimeWarning, match=f"miss some uses.*: '{('rows', 'free')[unused]}'"):
        kfac.step()


def test_parts_in_eval_mode_are_said_to_be_in_eval_mode():
    """As a model of transformers by `from_pretrained`, in a module that trains."""
    model = nn.ModuleDict({"inner": nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).eval()})
    assert model.training
    kfac = KFAC(model)
    model["inner"](torch.randn(5, 3)).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"are in eval mode.*of the whole model"):
        kfac.step()


def test_a_hook_that_is_put_in_front_later_does_not_change_what_is_seen():
    """What a layer computed has one gradient, whatever others make of it."""
    found = []
    for prepend in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        kfac = KFAC(model)
        model[0].register_forward_hook(lambda module, args, y: 10 * y, prepend=prepend)
        x = torch.randn(12, 5, dtype=torch.float64)
        model(x).square().mean().backward()
        kfac.step()
        found.append(kfac.state_dict()["kfac"]["layers"]["0"]["G"])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)


def test_a_model_that_is_called_in_a_loop_is_looked_at_call_by_call(monkeypatch):
    """The first step's look at what was called goes through a call's own part of autograd's graph."""
    sizes, reached = [], uses.reached_from

    def counted(*args):
        found = reached(*args)
        sizes.append(len(found))
        return found

    monkeypatch.setattr(uses, "reached_from", counted)
    torch.manual_seed(0)
    field = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    kfac = KFAC(field)
    z = torch.randn(6, 4)
    for _ in range(30):
        z = z + field(z) / 30
    z.square().mean().backward()
    kfac.step()
    assert len(sizes) == 30
    assert max(sizes) < 20
