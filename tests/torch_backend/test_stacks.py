"""Stacks of matrices, one for each expert or head: a block for each.

The oracle has a linear layer of torch's own for each matrix, with the same weights and the same rows.
"""

from __future__ import annotations

import copy
import functools
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from conftest import assert_close
from suite.torch import KFAC, Gaussian
from torch_backend.rows_by_loops import double, held, numbers, stepped
from torch_backend.test_free import OPERATOR

N, D, H = 3, 4, 5  # matrices, features, hidden features


class Stacks(nn.Module):
    """`up` (n, out, in) and `down` (n, in, out)."""

    def __init__(self):
        super().__init__()
        self.up, self.down = (nn.Parameter(0.5 * torch.randn(N, H, D)) for _ in range(2))

    def layers(self):
        """(ups, downs) of the same weights, as linear layers."""
        ups = nn.ModuleList(nn.Linear(D, H, bias=False) for _ in range(N)).double()
        downs = nn.ModuleList(nn.Linear(H, D, bias=False) for _ in range(N)).double()
        with torch.no_grad():
            for layer, weight in zip([*ups, *downs], [*self.up, *self.down.mT], strict=True):
                layer.weight.copy_(weight)
        return ups, downs


class Chosen(Stacks):
    """One for each example, perhaps none for a matrix."""

    def forward(self, x):
        chosen, out = (2 * x[:, :N]).argmax(1), torch.zeros_like(x)
        for number in range(N):
            (rows,) = torch.where(chosen == number)
            if len(rows):
                out = out.index_add(0, rows, self.one(x[rows], number))
        return out

    def one(self, x, number):
        return torch.tanh(F.linear(x, self.up[number])) @ self.down[number]


class ByNumber(Chosen):
    """The number as a tensor, views and casts in between."""

    def one(self, x, number):
        up = self.up[torch.tensor(number)].to(x.dtype)
        return torch.mm(torch.tanh(x @ up.t()), self.down[number].clone())


def grouped(forward):
    """As transformers has its experts run: by another function than the one that the source has."""

    @functools.wraps(forward)
    def run(self, x):
        chosen, order = (2 * x[:, :N]).argmax(1).sort()
        ends = (chosen[:, None] == torch.arange(N)).sum(0).cumsum(0, dtype=torch.int32)
        hidden = torch.tanh(OPERATOR(x[order], self.up.transpose(-2, -1), offs=ends))
        return OPERATOR(hidden, self.down, offs=ends)[order.argsort()]

    return run


class Grouped(Chosen):
    forward = grouped(Chosen.forward)


class All(Stacks):
    """All of them for every example."""

    def forward(self, x):
        hidden = torch.tanh(torch.bmm(x.expand(N, *x.shape), self.up.transpose(1, 2)))
        return torch.matmul(hidden, self.down).sum(0)


class AddedTo(Stacks):
    """As an ensemble has them: with a sum by the same function."""

    def forward(self, x):
        hidden = torch.tanh(
            torch.baddbmm(x.new_ones(N, 1, H), x.expand(N, *x.shape), self.up.transpose(1, 2)) - 1
        )
        return torch.baddbmm(x.new_zeros(()), hidden, self.down).sum(0)


class Einsum(Stacks):
    def forward(self, x):
        hidden = torch.tanh(torch.einsum("nde, ehd -> neh", x[..., None].expand(-1, -1, N), self.up))
        return torch.einsum("neh,ehd->end", hidden, self.down).sum(0)


class Broadcast(Stacks):
    """Rows of all, and an axis in front of the matrices'."""

    def forward(self, x):
        hidden = torch.tanh(x @ self.up.mT)
        return (hidden[None] @ self.down)[0].sum(0)


class InFront(Stacks):
    """By a list of matrices, and of an axis of length 1."""

    def forward(self, x):
        hidden = torch.tanh(x.unsqueeze(0) @ self.up[[0, 1, 2]].transpose(1, 2))
        return (hidden @ self.down[torch.ones(N, dtype=torch.bool)]).sum(0)


class Selected(Stacks):
    """Two matrices for each example, some of them twice."""

    def forward(self, x):
        chosen = torch.stack([x[:, 0] > 0, x[:, 1] > 0], 1) + torch.tensor([0, 1])
        hidden = torch.tanh(x[:, None, None] @ self.up[chosen].mT)
        return (hidden @ self.down[chosen])[:, :, 0].sum(1)


class Looped(Stacks):
    """The matrices in turn."""

    def forward(self, x):
        out = 0
        for up, down in zip(self.up, self.down, strict=True):
            out = out + torch.tanh(F.linear(x + 0, up)) @ down
        return out


class Enumerated(Stacks):
    """Their numbers beside them, of views and casts of a stack."""

    def forward(self, x):
        outs = []
        for number, up in enumerate(self.up.mT.to(x.dtype).unbind(0)):
            outs.append(torch.tanh((x + 0) @ up) @ self.down[number])
        return torch.stack(outs).sum(0)


class Unbound(Stacks):
    """Pairs of them, by variables."""

    def forward(self, x):
        ups, downs = self.up.unbind(), torch.unbind(self.down, 0)
        out = x.new_zeros(x.shape)
        for number in range(len(ups)):
            up, down = ups[number], downs[number]
            out = out + torch.tanh(F.linear(x + 0, up)) @ down
        return out


class Named(Stacks):
    def forward(self, x):
        first, second, third = self.up
        one = torch.tanh(F.linear(x + 0, first)) @ self.down[0]
        two = torch.tanh(F.linear(x + 0, second)) @ self.down[1]
        return one + two + torch.tanh(F.linear(x + 0, third)) @ self.down[2]


class Layers(nn.Module):
    """The same by linear layers."""

    def __init__(self, stacks):
        super().__init__()
        self.ups, self.downs = stacks.layers()
        self.chooses, self.selects = isinstance(stacks, Chosen), isinstance(stacks, Selected)

    def forward(self, x):
        if self.selects:
            out = torch.zeros_like(x)
            for number in range(N):
                for place, first in enumerate((0, 1)):
                    (rows,) = torch.where((x[:, place] > 0).int() + first == number)
                    if len(rows):
                        hidden = torch.tanh(self.ups[number](x[rows]))
                        out = out.index_add(0, rows, self.downs[number](hidden))
            return out
        if not self.chooses:
            pairs = zip(self.ups, self.downs, strict=True)
            return sum(down(torch.tanh(up(x + 0))) for up, down in pairs)  # each with an A of its own
        chosen, out = (2 * x[:, :N]).argmax(1), torch.zeros_like(x)
        for number in range(N):
            (rows,) = torch.where(chosen == number)
            if len(rows):
                hidden = torch.tanh(self.ups[number](x[rows]))
                out = out.index_add(0, rows, self.downs[number](hidden))
        return out


KINDS = [Chosen, ByNumber, Grouped, All, Einsum, Broadcast, InFront, Selected]
KINDS += [AddedTo, Looped, Enumerated, Unbound, Named]


def network(kind, outputs=2):
    return double(lambda: nn.Sequential(nn.Linear(D, D), nn.Tanh(), kind(), nn.Linear(D, outputs)))


def by_layers(model):
    other = copy.deepcopy(model)
    other[2] = Layers(model[2])
    return other


def batches(unseen=False, rows=9):
    """Of three steps; with `unseen` some without rows of a matrix."""
    found = [numbers(rows, D, seed=seed) for seed in range(3)]
    return [x - (10 * torch.eye(N, D)[i] if unseen else 0) for i, x in enumerate(found)]


def trained(model, data, parts=1, run=None, **settings):
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kfac = KFAC(model, base, damping=0.01, **settings)
    for x in data:
        kfac.zero_grad()
        for part in x.chunk(parts):
            ((run or model)(part).square().mean() / parts).backward()
        kfac.step()
    return kfac


def assert_alike(model, other, rtol=1e-9):
    ups, downs = other[2].ups, other[2].downs
    pairs = [
        (model[2].up, torch.stack([layer.weight for layer in ups])),
        (model[2].down, torch.stack([layer.weight.T for layer in downs])),
        *zip(model[0].parameters(), other[0].parameters(), strict=True),
        *zip(model[3].parameters(), other[3].parameters(), strict=True),
    ]
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol / 100)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("method", ["eigen", "inverse", "newton_schulz", "ekfac"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_is_as_many_layers(kind, method):
    model, data = network(kind), batches()
    settings = {"compute_method": method, "kl_clip": None}
    if method == "ekfac":  # measures in bases that are kept, and should not be arbitrary
        model, data = network(kind, outputs=6), batches(rows=90)
        settings["inv_update_steps"] = 3
    other = by_layers(model)
    kfac = trained(model, data, **settings)
    trained(other, data, **settings)
    assert_alike(model, other)
    routes = {route.parameter: (route.treatment, route.factors) for route in kfac.routing()}
    assert routes["2.up"] == ("kfac", f"{N} x ({D}x{D}, {H}x{H})")
    assert routes["2.down"] == ("kfac", f"{N} x ({H}x{H}, {D}x{D})")


@pytest.mark.filterwarnings("ignore:these layers got a gradient but were not seen:RuntimeWarning")
def test_a_matrix_without_rows_keeps_its_average():
    """It has a gradient of zeros then, where a layer has none."""
    model = network(Chosen)
    other = by_layers(model)
    data = [*batches(), *batches(unseen=True), *batches()]
    for one in (model, other):
        base = torch.optim.SGD(one.parameters(), lr=0.1)
        kfac = KFAC(one, base, damping=0.01, kl_clip=None)
        for x in data:
            kfac.zero_grad()
            one(x).square().mean().backward()
            for p in one.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            kfac.step()
    assert_alike(model, other)


@pytest.mark.parametrize(
    "settings",
    [
        {"fisher": "type-2", "likelihood": "gaussian"},
        {"max_factor_size": 4},
        {"factor_update_steps": 2, "inv_update_steps": 2},
        {"packed_factors": True, "compute_method": "inverse"},
        {"loss_reduction": "sum"},
    ],
    ids=str,
)
def test_settings_mean_the_same_for_stacks(settings):
    if "likelihood" in settings:
        settings = settings | {"likelihood": Gaussian(1.0)}
    model = network(Chosen)
    other = by_layers(model)
    trained(model, batches(), **settings)
    trained(other, batches(), **settings)
    assert_alike(model, other)


class Checkpointed(nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")  # dynamo looks at .grad
@pytest.mark.parametrize("how", ["parts", "checkpoint", "reentrant", "compiled", "copied", "pickled"])
@pytest.mark.parametrize("kind", [Chosen, Grouped, All, AddedTo, Einsum, Broadcast])
def test_it_is_seen_however_the_model_runs(kind, how):
    torch._dynamo.reset()
    model = network(kind)
    other, x = by_layers(model), batches()
    trained(other, x, parts=3 if how == "parts" else 1)
    run = None
    if how in ("checkpoint", "reentrant"):
        wrapped = Checkpointed(model[2], how == "reentrant")
        run = nn.Sequential(model[0], model[1], wrapped, model[3])
    elif how == "compiled":
        run = torch.compile(model, backend="aot_eager")
    elif how in ("copied", "pickled"):
        first = trained(model, x[:1])
        copied = (
            copy.deepcopy((model, first))
            if how == "copied"
            else pickle.loads(pickle.dumps((model, first)))
        )
        model, kfac = copied
        for one in x[1:]:
            kfac.zero_grad()
            model(one).square().mean().backward()
            kfac.step()
        assert_alike(model, other)
        return
    trained(model, x, parts=3 if how == "parts" else 1, run=run)
    assert_alike(model, other)


def test_a_checkpoint_resumes_to_the_last_bit():
    model = network(Chosen)
    kfac = trained(model, batches()[:2])
    again = network(Chosen)
    again.load_state_dict(model.state_dict())
    fresh = trained(again, [])
    fresh.load_state_dict(copy.deepcopy(kfac.state_dict()))
    for one, optimizer in ((model, kfac), (again, fresh)):
        optimizer.zero_grad()
        one(batches()[2]).square().mean().backward()
        optimizer.step()
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


class InOut(nn.Module):
    """Heads of attention, (n, in, out), or otherwise below."""

    def __init__(self, kind):
        super().__init__()
        stack = numbers(N, H, D)
        values = {"in, out": stack.mT, "out, in": stack, "layer": stack.flatten(0, 1)}
        self.weight = nn.Parameter(values[kind].clone())

    def by_head(self, x):
        return torch.einsum("bnd,hde->bhne", x, self.weight)

    def forward(self, x):
        return torch.tanh(self.by_head(x)).mean((1, 2))


class OutIn(InOut):
    def by_head(self, x):
        return torch.einsum("hed,bnd->bhne", self.weight, x)


class AnyPlaces(InOut):
    def by_head(self, x):
        return torch.einsum("...nd,hde->...hne", x, self.weight)


class OneLayer(InOut):
    def by_head(self, x):
        return F.linear(x, self.weight).unflatten(-1, (N, H)).movedim(2, 1)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("method", ["eigen", "inverse", "ekfac"])
@pytest.mark.parametrize(
    ("make", "kind"), [(InOut, "in, out"), (OutIn, "out, in"), (AnyPlaces, "in, out")]
)
def test_heads_that_get_the_same_inputs_are_one_layer(make, kind, method):
    data, ends = [numbers(6, 3, D, seed=seed) for seed in range(3)], []
    settings = {"compute_method": method, "inv_update_steps": 3 if method == "ekfac" else 1}
    for one, how in ((make, kind), (OneLayer, "layer")):
        model = double(lambda one=one, how=how: nn.Sequential(one(how), nn.Linear(H, 2)))
        kfac = trained(model, data, **settings)
        assert kfac.routing()["0.weight"].factors == f"{D}x{D}, {N * H}x{N * H}"
        weight = model[0].weight.detach()
        ends.append(weight.mT if how == "in, out" else weight.reshape(N, H, D))
    assert_close(ends[0], ends[1], 1e-9 if method != "ekfac" else 1e-6)


class Heads(nn.Module):
    """A use that is not understood beside one that is."""

    def __init__(self):
        super().__init__()
        self.heads = nn.Parameter(torch.randn(N, H, D))

    def forward(self, x):
        return torch.einsum("nd,ehd->neh", x, self.heads).mean(1)


class Strange(Heads):
    def forward(self, x):
        return torch.bmm(x.expand(N, *x.shape), self.heads.mT.flip(0)).mean(0)


class Kept(Heads):
    def forward(self, x):
        y = torch.bmm(x.expand(N, *x.shape), self.heads.mT)
        self.norm = self.heads[0].square().sum()
        return y.mean(0)


@pytest.mark.filterwarnings("ignore:these layers got a gradient but were not seen:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:statistics miss some uses of these weights:RuntimeWarning")
@pytest.mark.parametrize("kind", [Strange, Kept])
def test_a_stack_with_other_uses_is_none(kind):
    model = double(lambda: nn.Sequential(kind(), nn.Linear(H, 2)))
    kfac = stepped(model, numbers(6, D))
    assert kfac.routing()["0.heads"].factors == f"diag {N * H * D}"


class Dispatched(Heads):
    """As transformers' experts: another function runs than the source has."""

    def forward(self, x):
        return torch.stack([F.linear(x, self.heads[i]) for i in range(N)]).mean(0)


def test_a_use_that_the_source_does_not_show_is_reported_unless_it_is_a_product():
    model = double(lambda: nn.Sequential(Dispatched(), nn.Linear(H, 2)))
    kfac = KFAC(model)
    original = Dispatched.forward
    try:
        Dispatched.forward = lambda self, x: x @ self.heads.cumsum(0)[0].T
        model(numbers(6, D)).square().mean().backward()
    finally:
        Dispatched.forward = original
    with (
        pytest.warns(RuntimeWarning, match="statistics miss some uses of these weights.*'0.heads'"),
        pytest.warns(RuntimeWarning, match="not seen running.*'0.heads'"),
    ):
        kfac.step()


class Parts(nn.Module):
    """A stack and a scale, which a module around uses, too."""

    def __init__(self):
        super().__init__()
        self.up, self.scale = nn.Parameter(torch.randn(N, D, D)), nn.Parameter(torch.ones(D))

    def forward(self, x):
        return (x @ self.up).mean(0) * self.scale


class PartlyCheckpointed(Parts):
    def forward(self, x):
        return super().forward(x) + checkpoint(self.again, x, use_reentrant=False)

    def again(self, x):
        return torch.tanh(x) @ self.up[0] * self.scale


class Around(nn.Module):
    def __init__(self, use, parts=Parts):
        super().__init__()
        self.parts, self.use = parts(), use

    def forward(self, x):
        return self.parts(x) + self.use(torch.tanh(x), self.parts)


@pytest.mark.parametrize(
    ("use", "parts", "missed"),
    [
        (lambda x, parts: 0, Parts, None),
        (lambda x, parts: x @ parts.up[1], Parts, ": '1.parts.up'. "),
        (lambda x, parts: x * parts.scale, Parts, None),  # which is followed there
        (lambda x, parts: x * parts.scale.shape[0] * parts.up.detach()[0, 0], Parts, None),
        pytest.param(
            *(lambda x, parts: 0, PartlyCheckpointed, ": '1.parts.scale', '1.parts.up'. "),
            marks=pytest.mark.skipif(
                not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"),
                reason="torch does not tell of checkpoints inside of a forward",
            ),
        ),
    ],
)
def test_uses_outside_of_the_forward_and_in_a_checkpoint_within_it_are_reported(use, parts, missed):
    model = double(lambda: nn.Sequential(nn.Linear(D, D), Around(use, parts)))
    kfac = KFAC(model)
    for step in range(2):
        model(numbers(6, D)).square().mean().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kfac.step()
        said = [str(w.message) for w in caught if "statistics miss some uses" in str(w.message)]
        assert len(said) == len(caught) == (step == 0 and missed is not None)
        if said:
            assert missed in said[0]


def test_derivatives_of_stacks_are_missed_aloud():
    model = network(All)
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = numbers(6, D).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (model(x).square().mean() + slope.square().mean()).backward()
    with pytest.warns(RuntimeWarning, match=r"create_graph=True.*'2.down', '2.up'"):
        kfac.step()


def test_rows_of_stacks_are_terms_where_nothing_comes_after_them():
    x = numbers(7, D)
    for kind, make, expected in [
        (All, lambda m: m(x).square().mean(), N * len(x)),
        (Chosen, lambda m: m(x).square().mean(), len(x)),
        (InOut, lambda m: m(x[:, None]).square().mean(), len(x)),
    ]:
        model = double(lambda kind=kind: kind("in, out") if kind is InOut else kind())
        kfac = KFAC(model)
        make(model).backward()
        kfac.step()
        assert kfac.counted_terms == expected


class OfOthers(nn.Module):
    """Uses another module's stack by another name."""

    def __init__(self, other):
        super().__init__()
        self.other, self.mine = other, other.up

    def forward(self, x):
        return self.other(x) + F.linear(F.linear(x, self.mine[0]), self.mine[0].T)


class AllOfOne(Heads):
    """Of length 1 where there are matrices: not followed."""

    def forward(self, x):
        return torch.einsum("bhd,hed->bhe", x[:, None], self.heads).mean(1)


@pytest.mark.filterwarnings("ignore:these layers got a gradient but were not seen:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:statistics miss some uses of these weights:RuntimeWarning")
def test_what_is_not_followed_is_not_taken_for_something_else():
    model = double(lambda: nn.Sequential(OfOthers(All()), nn.Linear(D, 2)))
    kfac = stepped(model, numbers(6, D))
    assert kfac.routing()["0.mine"].factors.startswith("diag")
    model = double(lambda: nn.Sequential(AllOfOne(), nn.Linear(H, 2)))
    for rows in (6, 7):
        kfac = stepped(model, numbers(rows, D))
        assert kfac.routing()["0.heads"].treatment == "waiting"
        kfac.detach()


def test_nobody_is_sent_to_a_stack():
    class PerToken(Heads):
        def forward(self, x, chosen):
            return torch.bmm(x[:, None], self.heads.mT[chosen]).squeeze(1)

    model = double(PerToken)
    kfac = KFAC(model)
    chosen = torch.arange(6) % N
    y = model(numbers(6, D), chosen).square().mean()
    (y + model(numbers(0, D), chosen[:0]).sum()).backward()
    kfac.step()
    assert kfac.routing()["heads"].treatment == "kfac"


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
def test_sparse_inputs_of_a_matrix(layout):
    class One(Heads):
        def forward(self, x):
            return torch.mm(x, self.heads[1].T)

    x, ends = numbers(6, D), []
    for given in (x, getattr(x, layout)()):
        model = double(lambda: nn.Sequential(One(), nn.Linear(H, 2)))
        ends.append(held(stepped(model, given))["0.heads"])
    for a, b in zip(*ends, strict=True):
        assert_close(a, b)


def test_stacks_do_not_reduce_rows_and_do_not_say_so():
    model = double(lambda: nn.Sequential(All(), nn.Linear(D, 2)))
    assert "reduce" not in KFAC(model, weight_sharing="reduce").routing()["0.up"].reason


def test_statistics_are_those_of_each_matrix_own_rows():
    model = network(Chosen)
    kfac = KFAC(model, kl_clip=None, loss_reduction="sum")
    x = torch.tanh(model[0](batches()[0])).detach()
    model[2:](x).square().sum().backward()
    kfac.step()
    chosen = (2 * x[:, :N]).argmax(1)
    state = kfac.state_dict()["kfac"]["layers"]["2.up"]
    A = state["A"] / state["A_weight"].reshape(-1, 1, 1)
    for number in range(N):
        rows = x[chosen == number]
        assert_close(A[number], rows.T @ rows / len(rows))
