"""Every kind of layer in the habits of training loops: accumulation, scaling, copies, compilation."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from conftest import same
from suite.torch import KFAC, LSTM, Categorical

T64 = torch.float64


class Everything(nn.Module):
    """A layer of every kind that K-FAC knows, on tokens and on an image made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.bag = nn.Embedding(7, 4, padding_idx=0), nn.EmbeddingBag(7, 4, mode="sum")
        self.position = nn.Parameter(torch.randn(1, 9, 4) * 0.1)
        self.scale = nn.Parameter(torch.ones(4))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm, self.rms = nn.LayerNorm(4), nn.RMSNorm(4)
        self.lstm = LSTM(4, 4, batch_first=True)
        self.conv = nn.Conv1d(4, 4, 3, padding=1, groups=2)
        self.group = nn.GroupNorm(2, 4)
        self.up = nn.ConvTranspose1d(4, 4, 3, stride=2)
        self.weight_norm = parametrizations.weight_norm(nn.Linear(4, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position[:, : tokens.shape[1]]
        h = self.norm(x)
        x = x + self.scale * self.attention(h, h, h, need_weights=False)[0]
        x = self.lstm(self.rms(x))[0]
        x = self.up(torch.tanh(self.group(self.conv(x.mT)))).mT
        x = torch.tanh(self.weight_norm(x)).mean(1) + self.bag(tokens)
        return self.head(x)


def everything(dtype: torch.dtype = T64) -> Everything:
    torch.manual_seed(0)
    return Everything().to(dtype)


def data(seed: int, n: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, 7, (n, 6), generator=generator),
        torch.randint(0, 3, (n,), generator=generator),
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def step(model, kfac, x, y, parts=1):
    kfac.zero_grad()
    for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
        (F.cross_entropy(model(a), b) / parts).backward()
    kfac.step()


def close(a: nn.Module, b: nn.Module, **tolerance) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=lambda m, name=name: f"{name}: {m}", **tolerance)


def test_nothing_is_left_out():
    routing = KFAC(everything()).routing()
    assert {route.parameter for route in routing if route.treatment != "kfac"} == set()


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("method", ["eigen", "inverse", "ekfac"])
def test_micro_batches_and_repeated_data_give_the_step_of_the_whole_batch(method, sharing):
    ends = []
    for way in ("whole", "in parts", "twice"):
        model = everything()
        kfac = KFAC(model, sgd(model), compute_method=method, weight_sharing=sharing, inv_update_steps=2)
        for seed in range(4):
            x, y = data(seed, 64)  # enough for full rank: else the null space's basis is anyone's
            if way == "twice":
                x, y = x.repeat(2, 1), y.repeat(2)
            step(model, kfac, x, y, 4 if way == "in parts" else 1)
        ends.append(model)
    close(ends[0], ends[1], rtol=1e-7, atol=1e-9)
    close(ends[0], ends[2], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("method", ["eigen", "inverse", "newton_schulz", "ekfac"])
@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_a_resumed_run_is_the_uninterrupted_run(method, stop):
    def fresh():
        model = everything()
        settings = {"factor_update_steps": 2, "inv_update_steps": 3, "compute_method": method}
        return model, KFAC(model, sgd(model), **settings)

    model, kfac = fresh()
    for seed in range(stop):
        step(model, kfac, *data(seed))
    saved = copy.deepcopy((model.state_dict(), kfac.state_dict()))
    resumed, again = fresh()
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    for seed in range(stop, 7):
        step(model, kfac, *data(seed))
        step(resumed, again, *data(seed))
    assert same(model.state_dict(), resumed.state_dict())
    assert same(kfac.state_dict(), again.state_dict())


def test_a_loss_scale_leaves_statistics_unscaled():
    taken = []
    for scale in (1.0, 1024.0):
        model = everything(torch.float32)
        kfac = KFAC(model, grad_scaler=lambda scale=scale: scale)
        x, y = data(0)
        (F.cross_entropy(model(x), y) * scale).backward()
        taken.append(kfac._engine.capture.take_statistics(lambda scale=scale: scale))
        kfac.detach()
    for a, b in zip(*taken, strict=True):
        assert a.main.A.dtype == a.main.G.dtype == torch.float32
        # Of norms and free parameters A holds the gradients and G counts: compare the products.
        one, other = (s.main.A.double().sum() * s.main.G.double().sum() for s in (a, b))
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-12)


def test_bfloat16_autocast_trains():
    model = everything(torch.float32)
    kfac = KFAC(model, sgd(model), inv_update_steps=5)
    losses = []
    x, y = data(0, 16)
    for _ in range(40):
        kfac.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        kfac.step()
        losses.append(loss.item())
    assert kfac.skipped_steps == 0
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_a_copy_of_the_model_computes_the_same_and_captures_nothing(copied):
    model = everything()
    model.weight_norm = nn.Linear(4, 4, dtype=T64)  # torch does not pickle parametrized modules
    kfac = KFAC(model, sgd(model))
    step(model, kfac, *data(0))
    average = copied(model)  # as for an average of weights
    x, _ = data(1)
    torch.testing.assert_close(average(x), model(x), rtol=1e-12, atol=1e-12)
    kfac.reset_batch()
    average(x).sum().backward()
    assert all(taken is None for taken in kfac._engine.capture.take_statistics())
    other = KFAC(average)  # a copy can have a K-FAC of its own
    step(average, other, *data(2))


@pytest.mark.parametrize("settings", [{"max_rows": 3}, {"fisher": "mc", "likelihood": "categorical"}])
@pytest.mark.parametrize("method", ["eigen", "inverse"])
def test_the_default_device_is_not_where_statistics_come_to_be(method, settings):
    ends = []
    for default in ("cpu", "meta"):
        model = everything()
        with torch.device(default):
            kfac = KFAC(model, sgd(model), compute_method=method, **settings)
        for seed in range(3):
            x, y = data(seed)
            kfac.zero_grad()
            F.cross_entropy(model(x), y).backward()
            with torch.device(default):
                kfac.step()
        kfac.load_state_dict(kfac.state_dict())
        ends.append(list(model.parameters()))
    assert same(*ends)


def test_detaching_restores_the_model():
    def shape_of(model):
        return {
            name: (
                sorted(vars(module)),
                len(module._forward_hooks),
                len(module._forward_pre_hooks),
                module.forward.__func__,
            )
            for name, module in model.named_modules()
        }

    model = everything()
    before = shape_of(model)
    kfac = KFAC(model, fisher="mc", likelihood="categorical")
    assert shape_of_or_none(shape_of, model) != before
    kfac.detach()
    assert shape_of(model) == before


def shape_of_or_none(shape_of, model):
    try:
        return shape_of(model)
    except AttributeError:  # an attention's forward is an object while K-FAC is attached
        return None


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")  # dynamo looks at .grad
@pytest.mark.parametrize("what", ["model", "step"])
def test_compilation_changes_no_number_and_stops_after_warm_up(what):
    torch._dynamo.reset()
    ends, graphs = [], []
    for compiled in (False, True):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(
            nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, dtype=T64),
            nn.Flatten(),
            nn.Linear(24, 3, dtype=T64),
        )
        kfac = KFAC(model, sgd(model), factor_update_steps=2, inv_update_steps=4)
        run = torch.compile(model, backend="aot_eager") if compiled and what == "model" else model
        advance = (
            torch.compile(kfac.step, backend="aot_eager") if compiled and what == "step" else kfac.step
        )
        for seed in range(10):
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(5, 6, 4, generator=generator, dtype=T64)
            kfac.zero_grad()
            F.cross_entropy(run(x), torch.arange(5) % 3).backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                advance()
            graphs.append(torch._dynamo.utils.counters["stats"].get("unique_graphs", 0))
        ends.append(model)
    close(ends[0], ends[1], rtol=1e-9, atol=1e-12)
    assert graphs[10 + 3] == graphs[-1]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        return x + F.linear(torch.tanh(self.up(self.norm(x))), self.down.weight, self.down.bias)


@pytest.mark.skipif(torch.__version__ < (2, 8), reason="torch.compile breaks off at sets of functions")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")
@pytest.mark.parametrize("settings", [{}, {"max_rows": 3}], ids=str)
def test_blocks_compiled_one_by_one_share_what_was_compiled(settings):
    """There are as many graphs for six blocks as for three, and no number changes."""
    ends, graphs = [], []
    for blocks, is_compiled in ((6, False), (6, True), (3, True)):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        body = [Block() for _ in range(blocks)]
        model: nn.Module = nn.Sequential(nn.Linear(4, 4), *body, nn.Linear(4, 3)).double()
        kfac = KFAC(model, sgd(model), factor_update_steps=2, inv_update_steps=4, **settings)
        for block in body if is_compiled else ():
            block.compile(backend="aot_eager", fullgraph=True)
        for seed in range(6):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed), dtype=T64)
            kfac.zero_grad()
            F.cross_entropy(model(x), torch.arange(5) % 3).backward()
            kfac.step()
        ends.append(model)
        graphs.append(torch._dynamo.utils.counters["stats"].get("unique_graphs", 0))
        assert not torch._dynamo.utils.counters["recompile_limit"]
    close(ends[0], ends[1], rtol=1e-9, atol=1e-12)
    assert 0 == graphs[0] < graphs[1] == graphs[2]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_hooks_that_a_compiled_model_ignores_are_an_error():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    compiled = torch.compile(model, backend="aot_eager")
    compiled(torch.ones(3, 4)).sum().backward()
    kfac = KFAC(model)
    compiled(torch.ones(3, 4)).sum().backward()
    before = copy.deepcopy(kfac.state_dict())
    with pytest.raises(RuntimeError, match=r"torch\.compile has compiled before"):
        kfac.step()
    assert same(before, kfac.state_dict())


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch.compile's imports
def test_names_are_without_the_parts_that_wrappers_add():
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    wrapped = nn.ModuleDict({"module": nn.ModuleDict({"_orig_mod": inner})})
    names = [route.parameter for route in KFAC(wrapped).routing()]
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]
    kfac = KFAC(torch.compile(nn.Sequential(nn.Linear(2, 2))), skip_layers=[])
    assert [route.parameter for route in kfac.routing()] == ["0.weight", "0.bias"]


def test_skip_layers_reaches_into_containers_and_free_parameters():
    routing = KFAC(
        everything(), skip_layers=["^attention$", "position", "LSTM", "weight_norm"]
    ).routing()
    plain = {route.parameter.split(".")[0] for route in routing if route.treatment == "plain"}
    assert plain == {"attention", "position", "lstm", "weight_norm"}
    assert all(r.reason == "named by skip_layers" for r in routing if r.treatment == "plain")


@pytest.mark.parametrize("where", ["token", "position", "attention.in_proj_weight", "group.weight"])
def test_a_gradient_that_is_not_finite_skips_the_step(where):
    model = everything()
    kfac = KFAC(model, sgd(model))
    step(model, kfac, *data(0))
    before = copy.deepcopy((model.state_dict(), kfac._engine.state_dict(gather=True)))
    x, y = data(1)
    kfac.zero_grad()
    F.cross_entropy(model(x), y).backward()
    name = f"{where}.weight" if where == "token" else where
    dict(model.named_parameters())[name].grad.view(-1)[0] = float("nan")
    with pytest.warns(RuntimeWarning, match="was skipped"):
        kfac.step()
    assert same(before, (model.state_dict(), kfac._engine.state_dict(gather=True)))
    assert kfac.skipped_steps == kfac.metrics()["skipped_steps"] == 1
    step(model, kfac, *data(2))
    assert kfac.steps == 2


def blocks_of(model: nn.Module, run, **settings) -> dict[str, torch.Tensor]:
    """A ⊗ G of every block of every layer, as trained on by one step of `run`."""
    kfac = KFAC(model, kl_clip=None, loss_reduction="sum", **settings)
    run(model)
    kfac.step()
    found = {}
    for name, record in kfac.state_dict()["kfac"]["layers"].items():
        if "A" not in record:
            continue  # another layer has it
        A, G = (record[side] / record[f"{side}_weight"].reshape(-1, *(1,) * (record[side].ndim - 1))
                for side in ("A", "G"))  # fmt: skip
        A, G = (torch.diag_embed(x) if x.ndim == 2 else x for x in (A, G))
        found[name] = torch.stack([torch.kron(a, g) for a, g in zip(A, G, strict=True)])
    kfac.detach()
    return found


@pytest.mark.parametrize("fisher", ["type-2", "mc"])
def test_a_sampled_fisher_is_the_sum_of_empirical_ones_for_every_kind_of_layer(fisher, monkeypatch):
    """Of losses whose gradients by the logits are the columns of the Hessian's root, or the samples."""
    x, y = data(0)
    torch.manual_seed(1)
    logits = everything().eval()(x).detach()  # without dropout or batch statistics, as in training
    if fisher == "type-2":
        p = torch.softmax(logits, -1)
        cotangents = [p[:, c, None].sqrt() * (torch.eye(3, dtype=T64)[c] - p) for c in range(3)]
    else:
        cotangents, original = [], Categorical.sample_gradient
        monkeypatch.setattr(
            Categorical,
            "sample_gradient",
            lambda self, f, noise: (cotangents.append(original(self, f, noise)), cotangents[-1])[1],
        )
    got = blocks_of(
        everything(),
        lambda m: F.cross_entropy(m(x), y, reduction="sum").backward(),
        fisher=fisher,
        likelihood="categorical",
        fisher_samples=3,
    )
    parts = [blocks_of(everything(), lambda m, v=v: (m(x) * v).sum().backward()) for v in cotangents]
    assert len(parts) == 3
    assert set(got) == set(parts[0])
    share = 1 if fisher == "type-2" else 1 / 3
    for name, block in got.items():
        expected = share * sum(part[name] for part in parts)
        torch.testing.assert_close(
            block, expected, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )
