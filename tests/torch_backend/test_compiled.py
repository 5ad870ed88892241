"""What torch.compile makes of a model with K-FAC attached: the same function, the same statistics.

The oracle is the model as it is, whose own tests compare it to dense formulas.
"""

from __future__ import annotations

import contextlib
import copy
import operator

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from suite.torch import KFAC, LSTM

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # dynamo's own
    pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning"),  # dynamo looks at .grad
    pytest.mark.skipif(torch.__version__ < (2, 8), reason="torch.compile does not trace modes"),
]


class BreaksInLoop(nn.Module):
    """Torch.compile gives its forward up, and compiles what that calls one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner, self.head = nn.Parameter(torch.ones(6)), nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        h = self.inner(x) * self.scale
        for _ in range(2):
            if h.sum() > -1e9:
                h = h + 0
        return self.head(h.tanh() - h.sigmoid() * h.exp())


class Routed(nn.Module):
    """A mixture of experts, whose shapes depend on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.head = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 5)
        self.experts = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def forward(self, x):
        x = torch.tanh(self.first(x))
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows][:, None])
        return self.head(x + out)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = LSTM(4, 6, batch_first=True), nn.Linear(6, 5)

    def forward(self, x):
        return self.head(self.cells(x)[0][:, -1])


class Tokens(nn.Module):
    """Positions that are looked up once for all examples, in ways that models have."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.tokens, self.table = how, nn.Embedding(20, 8), nn.Embedding(12, 8)
        self.norm, self.hidden, self.head = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 20)
        self.register_buffer("ids", torch.arange(12)[None])

    def forward(self, x):
        length, h = x.shape[1], self.tokens(x)
        if self.how == "arange":
            h = h + self.table(torch.arange(length))
        elif self.how == "buffer, in place":
            h += self.table(self.ids[:, :length])
        elif self.how == "scaled, with an axis more":
            h = h * 3 + 2 * self.table(torch.arange(length)).unsqueeze(0)
        elif self.how == "one of each example":
            h = h + self.table(x[:, :1] % 12)
        elif self.how == "expanded":
            h = h + self.table(self.ids[:, :length]).expand(len(x), -1, -1)
        elif self.how == "by keyword":
            h = h + torch.unsqueeze(input=self.table(torch.arange(length)), dim=0)
        h = self.norm(h)
        return self.head(h + torch.tanh(self.hidden(h)))


class Block(nn.Module):
    """Heads by `unflatten`, a method written in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.out = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        heads = self.inner(self.norm(x)).unflatten(-1, (2, 4)).transpose(1, 2)
        return x + self.out(torch.tanh(heads).transpose(1, 2).flatten(2))


class InBlocks(nn.Module):
    """Blocks under the mode that watches positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(20, 8), nn.Embedding(12, 8)
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.head = nn.Linear(8, 20)

    def forward(self, x):
        return self.head(self.blocks(self.tokens(x) + self.places(torch.arange(x.shape[1]))))


class Scores(nn.Module):
    """Relative positions, looked up once for all examples, in the scores of attention."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.tokens, self.table = how, nn.Embedding(20, 8), nn.Embedding(19, 2)
        self.to_qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 20)
        places = torch.arange(10)
        self.register_buffer("distances", places[:, None] - places + 9)

    def forward(self, x):
        n, h = x.shape[1], self.tokens(x)
        q, k, v = (part.transpose(1, 2) for part in self.to_qkv(h).view(len(x), n, 3, 2, 4).unbind(2))
        found, hidden = self.table(self.distances[:n, :n]), torch.ones(n, n).triu(1) * -1e4
        if self.how == "permuted":
            scores = 0.5 * found.permute(2, 0, 1).unsqueeze(0)
        elif self.how == "turned twice":
            scores = (found / 2).transpose(0, 2).transpose(-1, 1)[None] + hidden
        elif self.how == "shifted":
            scores = (found + 1).permute([2, 0, 1])[None]
        elif self.how == "expanded":
            scores = found[None].expand(len(x), n, n, 2).permute(0, 3, 1, 2)
        elif self.how == "masked":
            scores = torch.where(hidden == 0, found.permute(2, 0, 1)[None], -1e4).contiguous()
        elif self.how == "masked in each":
            scores = found.permute(2, 0, 1)[None].masked_fill((x < 3)[:, None, None], -1e4)
        if self.how in ("expanded", "masked", "masked in each"):
            y = F.scaled_dot_product_attention(q, k, v, scores)
        else:
            y = (q @ k.mT + scores + hidden).softmax(-1) @ v
        return self.head(y.transpose(1, 2).flatten(2))


def trained(model, batches, run=None, micro=1):
    """Outputs, and all parameters, after each step."""
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, base, kl_clip=None, damping=0.01, factor_update_steps=2)
    run, found = run or (lambda: model), []
    call = run()
    for x in batches:
        kfac.zero_grad()
        for part in x.chunk(micro):
            y = call(part)
            if x.is_floating_point():
                loss = y.square().mean()
            else:
                loss = F.cross_entropy(y.flatten(0, 1), part.roll(1, 1).flatten())
            (loss / micro).backward()
        kfac.step()
        found.append([y.detach(), *(p.detach().clone() for p in model.parameters())])
    return found


def pair_of(make, batches, backend, **settings):
    torch._dynamo.reset()
    ends = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = make().double()

        def run(model=model, compiled=compiled):
            return torch.compile(model, backend=backend, **settings) if compiled else model

        ends.append(trained(model, batches, run, micro=2))
    return ends


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("make", [BreaksInLoop, Routed, Recurrent])
def test_what_cannot_be_one_graph_is_the_same_function_and_step(make, backend):
    torch.manual_seed(1)
    shape = (6, 7, 4) if make is Recurrent else (24, 4)
    batches = [torch.randn(shape).double() for _ in range(3)]
    found, expected = pair_of(make, batches, backend)
    for own, others in zip(found, expected, strict=True):
        for a, b in zip(own, others, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-11)


class Inner(nn.Module):
    """Has a parameter by itself, and a layer whose weight the module around it knows, too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)

    def forward(self, x):
        return x + self.scale * self.layer(x).tanh()


class WithToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.blocks = nn.Parameter(torch.randn(4)), nn.Sequential(Inner(), Inner())

    def forward(self, x):
        return self.blocks(torch.stack([x, self.token.expand(len(x), -1)], 1))


def test_parameters_by_themselves_at_two_levels():
    batches = [torch.randn(6, 4).double() for _ in range(3)]
    found, expected = pair_of(WithToken, batches, "aot_eager")
    for own, others in zip(found, expected, strict=True):
        for a, b in zip(own, others, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


class Around(nn.Module):
    """Uses a child's weight by a function, and the parameters of another and its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.scaled, self.out = nn.Embedding(20, 8), Scaled(), nn.Linear(8, 20)
        self.shift = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        h = self.scaled(self.tokens(x)) + self.scaled.scale.tanh() + self.shift
        return F.linear(h, self.out.weight, self.out.bias)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.ones(8)), nn.RMSNorm(8)

    def forward(self, x):
        return self.norm(x) * self.scale


@pytest.mark.parametrize(
    "make",
    [
        InBlocks,
        Around,
        lambda: Tokens("arange"),
        lambda: Scores("permuted"),
        lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)),
    ],
    ids=["blocks", "around", "positions", "scores", "plain"],
)
def test_it_is_compiled_once_with_statistics_and_once_without(make):
    torch._dynamo.reset()
    model, graphs, counts, awake = make(), [], [], []
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), factor_update_steps=2)

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    run = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(5):
        kfac.zero_grad()
        x = torch.randn(6, 8) if isinstance(model, nn.Sequential) else torch.randint(0, 20, (6, 10))
        run(x).square().mean().backward()
        kfac.step()
        counts.append(len(graphs))
        hooks = [
            h
            for m in model.modules()
            for h in (*m._forward_pre_hooks.values(), *m._forward_hooks.values())
        ]
        awake.append({hook.awake for hook in hooks})
    assert counts == [1, 2, 2, 2, 2]
    assert awake == [{False}, {True}, {False}, {True}, {False}]  # all of them


@pytest.mark.parametrize("which", [1, 2, 3], ids=["norm", "hidden", "head"])
def test_what_a_frozen_layer_sees_is_no_statistics_of_it_when_it_is_trained_again(which):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 3)).double()
    models = [model, copy.deepcopy(model)]
    runs = models[0], torch.compile(models[1], backend="aot_eager", fullgraph=True)
    optimizers = [KFAC(m, torch.optim.SGD(m.parameters(), lr=0.1), inv_update_steps=1) for m in models]
    for step in range(5):
        x, y = torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,))
        for one, run, optimizer in zip(models, runs, optimizers, strict=True):
            one[which].requires_grad_(step not in (1, 2))
            optimizer.zero_grad()
            F.cross_entropy(run(x), y).backward()
            optimizer.step()
        assert optimizers[0].counted_terms == optimizers[1].counted_terms == 8
        for p, q in zip(*(m.parameters() for m in models), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def test_a_spectral_norm_is_that_of_each_of_two_passes():
    """A discriminator's, of what is real and what is made."""
    torch._dynamo.reset()
    norm = nn.utils.parametrizations.spectral_norm
    model = nn.Sequential(nn.Linear(4, 6), norm(nn.Linear(6, 6)), nn.Linear(6, 1)).double()
    models = [model, copy.deepcopy(model)]
    models[1][1].compile(backend="aot_eager")
    optimizers = [KFAC(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in models]
    for _ in range(3):
        real, made = torch.randn(2, 8, 4, dtype=torch.float64)
        for one, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            (F.softplus(-one(real)).mean() + F.softplus(one(made)).mean()).backward()
            optimizer.step()
        for p, q in zip(*(m.parameters() for m in models), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


class Masked(nn.Linear):
    def __init__(self, as_bool: bool) -> None:
        super().__init__(4, 6)
        self.as_bool = as_bool
        self.register_buffer("mask", (torch.arange(24).view(6, 4) % 3 > 0).double())

    def forward(self, x):
        mask = self.mask.bool() if self.as_bool else self.mask
        return F.linear(x, self.weight * mask, self.bias)


@pytest.mark.parametrize("as_bool", [True, False])
def test_masks_of_weights_are_known_by_their_dtype(as_bool):
    torch._dynamo.reset()
    model = nn.Sequential(Masked(as_bool), nn.Linear(6, 3)).double()
    models = [model, copy.deepcopy(model)]
    runs = models[0], torch.compile(models[1], backend="aot_eager", fullgraph=True)
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,))
    for one, run in zip(models, runs, strict=True):
        optimizer = KFAC(one, torch.optim.SGD(one.parameters(), lr=0.1))
        F.cross_entropy(run(x), y).backward()
        missed = one is models[1] and not as_bool
        with pytest.warns(RuntimeWarning, match="'0'") if missed else contextlib.nullcontext():
            optimizer.step()
    if as_bool:
        for p, q in zip(*(m.parameters() for m in models), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


class ByEinsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixing, self.layer = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(torch.einsum("bsd,de->bse", x, self.mixing))


class ByEinsumOfBothSides(ByEinsum):
    def __init__(self) -> None:
        super().__init__()
        self.mixing = nn.Parameter(torch.randn(2, 4, 2))

    def forward(self, x):
        return self.layer(torch.einsum("bsid,iod->bso", x.unflatten(-1, (2, 2)), self.mixing))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("make", [ByEinsum, ByEinsumOfBothSides])
def test_einsum_of_a_parameter_counts_once(make, backend):
    torch._dynamo.reset()
    x, model = torch.randn(6, 3, 4), make()
    kfac = KFAC(model)
    torch.compile(model, backend=backend, fullgraph=True)(x).sum().backward()
    mixing, layer = kfac._engine.capture.by_layer
    rows = x.flatten(0, 1)
    torch.testing.assert_close(mixing.A.grad[0], rows.T @ rows)
    assert float(mixing.counts.grad[0]) == float(layer.counts.grad[0]) == 18


class Views(nn.Module):
    """Returns views of one tensor that a layer, or a parameter by itself, has made."""

    def __init__(self, kind: str, views) -> None:
        super().__init__()
        self.kind, self.views, self.other = kind, views, nn.Linear(8, 24)
        self.layer = nn.Embedding(30, 24) if kind == "table" else nn.Linear(8, 24)
        self.scale, self.experts = nn.Parameter(torch.ones(24)), nn.Parameter(torch.randn(2, 24, 24))

    def forward(self, x):
        if self.kind == "table":
            return self.views(self.layer(torch.arange(30).reshape(6, 5)))
        h = F.linear(x, self.layer.weight, self.layer.bias) if self.kind == "function" else self.layer(x)
        if self.kind == "scale":
            h = h * self.scale
        if self.kind == "stack":
            h = h @ self.experts[0] + h @ self.experts[1]
            return self.views(h @ self.experts[0])
        return self.views(self.other(x) if self.kind == "not covered" else h)


class OfViews(nn.Module):
    def __init__(self, *settings) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.head = Views(*settings), nn.Linear(1, 3)

    def forward(self, x):
        return self.head(torch.stack([y.square().mean().reshape(1) for y in self.block(x)]))


@pytest.mark.parametrize(
    "views",
    [
        lambda h: (h.permute(1, 0, 2), h.permute(1, 0, 2)[..., :4]),
        lambda h: (h.permute(1, 0, 2), h),
        lambda h: (h[..., :8], h[..., 8:]),
        lambda h: tuple(h.unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)[i] for i in range(3)),
    ],
    ids=["turned", "and itself", "slices", "q, k and v"],
)
@pytest.mark.parametrize("kind", ["layer", "function", "table", "scale", "stack", "not covered"])
def test_outputs_of_a_graph_that_are_views_of_one_tensor_keep_their_gradients(kind, views):
    """Where a forward goes on outside of its graph: after a block that is compiled, or a graph break."""
    x, found = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(1)), []
    for how in ("without K-FAC", "eager", "compiled"):
        torch._dynamo.reset()
        model = OfViews(kind, views)
        kfac = None if how == "without K-FAC" else KFAC(model, skip_layers=["other"])
        if how == "compiled":
            model.block.compile(backend="aot_eager")
        model(x).square().mean().backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        slots = [one.slots()[:3] for one in kfac._engine.capture.by_layer] if kfac else []
        found.append((grads, [slot.grad for some in slots for slot in some]))
    plain, eager, compiled = found
    assert plain[0].keys() == compiled[0].keys()
    for name, gradient in plain[0].items():
        torch.testing.assert_close(compiled[0][name], gradient)
    for own, others in zip(compiled[1], eager[1], strict=True):
        torch.testing.assert_close(own, others)


class WithShallowCopy(nn.Module):
    """Of which the copy has the layer's hooks, and other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        copied = copy.copy(self.layer)
        copied._parameters = {
            "weight": nn.Parameter(torch.zeros(4, 4)),
            "bias": nn.Parameter(torch.zeros(4)),
        }
        self.copied = (copied,)

    def forward(self, x):
        return self.layer(x) + self.copied[0](x)


def test_a_shallow_copy_in_a_compiled_model_has_no_part_in_statistics():
    x = torch.randn(6, 4)
    model = WithShallowCopy()
    kfac = KFAC(model)
    torch.compile(model, backend="eager")(x).sum().backward()
    (captured,) = kfac._engine.capture.take_statistics()
    torch.testing.assert_close(captured.main.A[0, :-1, :-1], x.T @ x)
    torch.testing.assert_close(captured.main.G[0], torch.full((4, 4), 6.0))


def test_blocks_that_are_compiled_one_by_one_are_one_graph_each():
    torch.manual_seed(1)
    batches = [torch.randint(0, 20, (6, 5)) for _ in range(4)]
    torch._dynamo.reset()
    ends = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = InBlocks().double()
        for block in model.blocks if compiled else ():
            block.compile(backend="aot_eager", fullgraph=True)
        ends.append(trained(model, batches))
    for own, others in zip(*ends, strict=True):
        for a, b in zip(own, others, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(20, 8), nn.Embedding(12, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 20)

    def forward(self, x):
        h = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return self.head(h)


@pytest.mark.parametrize("how", ["block.compile()", "torch.compile(block)"])
@pytest.mark.parametrize("sizes", [(8, 8), (8, 3)], ids=["evaluated in between", "a smaller rest"])
def test_checkpoints_of_blocks_that_are_compiled_run_again_what_ran(how, sizes):
    torch._dynamo.reset()
    found, batches = [], [torch.randint(0, 20, (n, 8)) for n in sizes]
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Checkpointed().double()
        kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), damping=0.01)
        for i, block in enumerate(model.blocks if compiled else ()):
            if how == "block.compile()":
                block.compile(backend="aot_eager")
            else:
                model.blocks[i] = torch.compile(block, backend="aot_eager")
        for _ in range(4):
            kfac.zero_grad()
            for x in batches:
                (model(x).square().sum() / 100).backward()
            kfac.step()
            if sizes == (8, 8):
                with torch.no_grad():
                    model.eval()(batches[0])
                model.train()
        found.append([p.detach().clone() for p in model.parameters()])
        kfac.detach()
    for block in model.blocks:
        assert "Apart" not in str(vars(block).get("_compiled_call_impl")) + str(
            vars(block).get("forward")
        )
    for own, others in zip(*found, strict=True):
        torch.testing.assert_close(own, others, rtol=1e-9, atol=1e-11)


class Placed(Block):
    """A block that looks up positions, and has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.scale = nn.Embedding(12, 8), nn.Parameter(torch.ones(8))

    def forward(self, x):
        return super().forward(x + self.places(torch.arange(x.shape[1])) * 1) * self.scale


class WithPlaced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.block, self.head = nn.Embedding(20, 8), Placed(), nn.Linear(8, 20)

    def forward(self, x):
        return self.head(self.block(self.tokens(x)))


@pytest.mark.parametrize("how", ["force_eager", "module disabled", "forward disabled"])
def test_blocks_that_run_as_they_are_after_all(how):
    torch._dynamo.reset()
    torch.manual_seed(1)
    batches, ends = [torch.randint(0, 20, (6, 5)) for _ in range(4)], []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, stance = WithPlaced().double(), "default"

        def run(model=model, compiled=compiled):
            if compiled and how == "force_eager":
                model.block.compile(backend="aot_eager")
            elif compiled and how == "module disabled":
                model.block = torch.compiler.disable(model.block)
            elif compiled:
                model.block.forward = torch.compiler.disable(model.block.forward)
            return model

        if compiled and how == "force_eager":
            stance = "force_eager"
        with torch.compiler.set_stance(stance):
            ends.append(trained(model, batches, run))
    for own, others in zip(*ends, strict=True):
        for a, b in zip(own, others, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


POSITIONS = [
    "arange",
    "buffer, in place",
    "scaled, with an axis more",
    "one of each example",
    "expanded",
]


@pytest.mark.parametrize(
    ("make", "how"),
    [
        *((Tokens, how) for how in POSITIONS),
        *((Scores, how) for how in ("permuted", "turned twice", "shifted", "expanded")),
        *((Scores, how) for how in ("masked", "masked in each")),
    ],
)
def test_what_is_looked_up_for_all_counts_once_an_example_in_one_graph(make, how, recwarn):
    torch.manual_seed(1)
    batches = [torch.randint(0, 20, (16, 10)) for _ in range(4)]
    found, expected = pair_of(lambda: make(how), batches, "aot_eager", fullgraph=True)
    for own, others in zip(found, expected, strict=True):
        for a, b in zip(own, others, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    assert not [w for w in recwarn if "compiled graph" in str(w.message)]


class WithArrays(nn.Module):
    """Some NumPy beside the layers, a parameter of its own and a stack, as in DINOv3."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale, self.experts = nn.Parameter(torch.ones(4)), nn.Parameter(torch.randn(2, 4, 4))

    def forward(self, x):
        found = [np.asarray(compute(np.log(2.0)), dtype=np.float32) for compute in COMPUTE]
        factors = torch.stack([torch.from_numpy(one).sum() for one in found])
        h = self.layer(x) * self.scale * factors.sum()
        return h @ self.experts[0] + h @ self.experts[1], factors


EXPRESSIONS = """
    -a; +a; ~(a > 1); a + 3; 3 + a; a - 3; 3 - a; a * 3; a / 3; 3 / a; a // 0.2; 3 // a; a % 0.2; 3 % a
    a ** 0.2; 3 ** a; a > 0.5; a >= 0.5; a < 0.5; a <= 0.5; a == 0.5; a != 0.5; True & (a < 1)
    (a < 1) | False; True ^ (a < 1); np.full((2, 2), a) @ np.ones((2, 2)); operator.iadd(a, 2)
    operator.isub(a, 2); operator.imul(a, 2); operator.itruediv(a, 2); operator.ifloordiv(a, 0.2)
    operator.imod(a, 0.2); operator.ipow(a, 2)
"""


COMPUTE = [
    eval(f"lambda a: {expression.strip()}", {"np": np, "operator": operator})
    for expression in EXPRESSIONS.strip().replace("\n", ";").split(";")
]


def test_arrays_of_numpy_are_part_of_a_graph():
    x, found = torch.randn(6, 4), []
    for attached in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = WithArrays()
        kfac = KFAC(model) if attached else None
        y, factors = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
        y.square().sum().backward()
        found.append([factors, y.detach(), *(p.grad for p in model.parameters())])
        assert kfac is None or all(kfac._engine.capture.take_statistics())
    assert len(found[0][0]) == 33
    for own, others in zip(*found, strict=True):
        torch.testing.assert_close(own, others)


@pytest.mark.parametrize("how", ["by keyword"])
def test_positions_that_are_not_followed_in_a_graph_are_named_in_a_warning(how):
    torch._dynamo.reset()
    model = Tokens(how)
    kfac, run = KFAC(model), torch.compile(model, backend="eager")
    for _ in range(2):
        run(torch.randint(0, 20, (16, 10))).square().mean().backward()
        if kfac.steps:
            kfac.step()  # it is said once
            continue
        with pytest.warns(RuntimeWarning, match="looked up in a compiled graph.*'table'$"):
            kfac.step()


@pytest.mark.parametrize(
    "cut",
    [
        lambda p, n: p[:n],
        lambda p, n: (2 * p.exp())[:n],
        lambda p, n: torch.split(p, [n, len(p) - n])[0],
    ],
)
def test_a_length_that_is_marked_as_dynamic_stays_so(cut):
    torch._dynamo.reset()

    class Sliced(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
            self.positions = nn.Parameter(torch.randn(32, 8))

        def forward(self, x):
            return self.head(torch.tanh(self.table(x) + cut(self.positions, x.shape[1])))

    model, graphs = Sliced(), []
    kfac = KFAC(model, factor_update_steps=1)

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    run, counts = torch.compile(model, backend=backend), []
    for length in range(7, 23, 2):
        x = torch.randint(0, 20, (4, length))
        torch._dynamo.mark_dynamic(x, 1)
        run(x).square().mean().backward()
        kfac.step()
        model.zero_grad()
        counts.append(len(graphs))
    assert counts[-1] < len(counts)


@pytest.mark.parametrize(
    "convolution",
    [
        lambda: nn.Conv1d(8, 8, 3, padding=1),
        lambda: nn.Conv1d(8, 8, 5, padding=2, groups=8),
        lambda: nn.Conv2d(2, 8, (3, 2), stride=2),
    ],
    ids=["1", "depthwise", "2"],
)
def test_sizes_of_images_that_change_stay_dynamic(convolution):
    ends = []
    for compiles in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, graphs = nn.Sequential(convolution(), nn.Tanh()).double(), []
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        kfac = KFAC(model, base, compute_method="inverse")
        axes = 1 if isinstance(model[0], nn.Conv1d) else 2

        def backend(graph, inputs, graphs=graphs):
            graphs.append(graph)
            return graph.forward

        run, counts = torch.compile(model, backend=backend) if compiles else model, []
        for length in range(7, 23, 2):
            x = torch.randn(4, 8 // axes**2, *[length] * axes, dtype=torch.float64)
            if compiles:
                torch._dynamo.mark_dynamic(x, 2)
            kfac.zero_grad()
            run(x).square().mean().backward()
            kfac.step()
            counts.append(len(graphs))
        assert counts[-1] <= 4 < len(counts)
        ends.append([p.detach() for p in model.parameters()])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:these layers ran inside of torch.func's transforms:RuntimeWarning")
def test_what_torch_func_makes_of_a_layer_in_a_compiled_loss_has_no_part_in_its_statistics():
    """A PINN: derivatives of a residual by torch.func, values at the boundary."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    x, boundary = torch.randn(7, 2).double(), torch.randn(5, 2).double()
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    kfac = KFAC(model, damping=0.1, kl_clip=None)

    def loss_of():
        slope = torch.func.grad(lambda x: model(x).sum())(x)
        each = torch.vmap(torch.func.grad(lambda x: model(x[None])[0, 0]))(x)
        return (slope - each - 1).square().mean() + model(boundary).square().mean()

    torch.compile(loss_of, backend="aot_eager", fullgraph=True)().backward()
    with pytest.warns(RuntimeWarning, match=r"torch.func's transforms.* some in what is compiled"):
        kfac.step()
    rows = torch.cat([boundary, torch.ones(5, 1).double()], 1)
    layer = kfac.state_dict()["kfac"]["layers"]["0"]
    torch.testing.assert_close((layer["A"] / layer["A_weight"])[0], rows.mT @ rows / 5)


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 5)).double()


def ends_of(steps, model, count=3):
    """Parameters after steps by `steps(kfac, x)`."""
    torch._dynamo.reset()
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), damping=0.01, factor_update_steps=2)
    for x in torch.randn(count, 7, 4, generator=torch.Generator().manual_seed(1)).double():
        kfac.zero_grad()
        steps(kfac, x)
    return [p.detach() for p in model.parameters()]


def test_hooks_are_not_compiled_where_a_whole_step_is():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def step(kfac, x):
        model(x).square().mean().backward()
        kfac.step()

    model = small()
    expected = ends_of(step, model)
    model = small()
    found = ends_of(torch.compile(step, backend=backend), model)
    assert len(graphs) == 2  # with statistics and without
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_backward_passes_of_a_compiled_model_may_be_compiled_by_themselves():
    model, call = small(), None

    def step(kfac, x):
        call(x).square().mean().backward()
        kfac.step()

    def step_compiled(kfac, x):
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
            call(x).square().mean().backward()
        kfac.step()

    call = model
    expected = ends_of(step, model)
    model = small()
    call = torch.compile(model, backend="aot_eager")
    found = ends_of(step_compiled, model)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_checkpoint_is_part_of_a_graph_if_torch_compile_may_do_its_notes_once():
    torch._dynamo.reset()
    name = "skip_fwd_side_effects_in_bwd_under_checkpoint"
    if not hasattr(torch._dynamo.config, name):
        pytest.skip("this torch has no such setting")
    batches = [torch.randint(0, 20, (4, 8)) for _ in range(3)]
    with torch._dynamo.config.patch(**{name: True}):
        found, expected = pair_of(Checkpointed, batches, "aot_eager", fullgraph=True)
    for own, others in zip(found, expected, strict=True):
        for a, b in zip(own, others, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
