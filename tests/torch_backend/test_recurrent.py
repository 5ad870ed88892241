"""The recurrent modules against torch.nn's own, and what forward hooks see of them."""

from __future__ import annotations

import copy
import io
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from suite.torch import KFAC, recurrent

L, N, D_IN, H = 5, 4, 3, 6  # steps, batch, features, hidden units

KINDS = {
    "RNN": ("RNN", {}),
    "RNN relu": ("RNN", {"nonlinearity": "relu"}),
    "LSTM": ("LSTM", {}),
    "LSTM projected": ("LSTM", {"proj_size": 2}),
    "GRU": ("GRU", {}),
}
every_kind = pytest.mark.parametrize("kind", list(KINDS))


def pair(kind, **options):
    """A module of torch.nn and ours with its parameters, in float64."""
    name, fixed = KINDS[kind]
    options = {"dtype": torch.float64, **fixed, **options}
    torch.manual_seed(0)
    theirs = getattr(nn, name)(D_IN, H, **options)
    ours = getattr(recurrent, name)(D_IN, H, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def leaf(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def example(kind, form, given, layers=1, bidirectional=False, batch_first=False):
    """Leaves that need gradients, and (input, hx) made of them; 'packed' is in no order of length."""
    count = layers * (2 if bidirectional else 1)
    x = leaf(N, L, D_IN, seed=1) if batch_first else leaf(L, N, D_IN, seed=1)
    batch = (N,)
    if form == "unbatched":
        x, batch = leaf(L, D_IN, seed=1), ()
    h = leaf(count, *batch, 2 if "projected" in kind else H, seed=2)
    leaves, hx = [x], None
    if given:
        hx, leaves = h, [*leaves, h]
        if kind.startswith("LSTM"):
            c = leaf(count, *batch, H, seed=3)
            hx, leaves = (h, c), [*leaves, c]
    if form == "packed":
        x = pack_padded_sequence(x, LENGTHS, batch_first=batch_first, enforce_sorted=False)
    elif form == "packed sorted":
        x = pack_padded_sequence(x, sorted(LENGTHS, reverse=True), batch_first=batch_first)
    return leaves, x, hx


LENGTHS = [3, 5, 1, 3]


def flat(result):
    """All tensors of (output, hidden)."""
    output, hidden = result
    hidden = hidden if isinstance(hidden, tuple) else (hidden,)
    return [output.data if isinstance(output, PackedSequence) else output, *hidden]


def gradients(module, leaves, result):
    """Of a sum that weighs every number of the result otherwise."""
    loss = sum((t * torch.linspace(-1, 2, t.numel(), dtype=t.dtype).view(t.shape)).sum() for t in result)
    inputs = [*leaves, *module.parameters()]
    return torch.autograd.grad(loss, inputs, retain_graph=True)  # both modules share the packing


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


GRID = list(
    itertools.product(
        (1, 2), (True, False), (False, True), (False, True), ("batched", "packed", "unbatched")
    )
)


@every_kind
@pytest.mark.parametrize(("layers", "bias", "batch_first", "bidirectional", "form"), GRID)
@pytest.mark.parametrize("given", [True, False], ids=["hx", "no hx"])
def test_results_and_gradients_are_those_of_torch_nn(
    kind, layers, bias, batch_first, bidirectional, form, given
):
    theirs, ours = pair(
        kind, num_layers=layers, bias=bias, batch_first=batch_first, bidirectional=bidirectional
    )
    leaves, x, hx = example(kind, form, given, layers, bidirectional, batch_first)
    expected, got = theirs(x, hx), ours(x, hx)
    assert_same(flat(got), flat(expected))
    assert_same(gradients(ours, leaves, flat(got)), gradients(theirs, leaves, flat(expected)))
    assert type(got[1]) is type(expected[1])
    assert type(got[0]) is type(expected[0])


@every_kind
@pytest.mark.parametrize("form", ["packed", "packed sorted"])
def test_a_packed_sequence_comes_back_packed_in_the_same_order(kind, form):
    theirs, ours = pair(kind)
    _, x, _ = example(kind, form, given=False)
    expected, got = theirs(x)[0], ours(x)[0]
    for name in ("batch_sizes", "sorted_indices", "unsorted_indices"):
        torch.testing.assert_close(getattr(got, name), getattr(expected, name))
    assert_same([pad_packed_sequence(got)[0]], [pad_packed_sequence(expected)[0]])


@every_kind
@pytest.mark.parametrize("form", ["batched", "packed"])
def test_dropout_lies_between_layers_and_only_in_training(kind, form):
    theirs, ours = pair(kind, num_layers=3, dropout=0.5)
    _, x, hx = example(kind, form, given=True, layers=3)
    torch.manual_seed(5)
    expected = flat(theirs(x, hx))
    torch.manual_seed(5)
    got = flat(ours(x, hx))
    assert_same(got, expected)  # torch draws the same masks from the same seed
    theirs.eval(), ours.eval()
    assert_same(flat(ours(x, hx)), flat(theirs(x, hx)))
    assert not torch.allclose(flat(ours(x, hx))[0], got[0])


@every_kind
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_parameters_and_state_dicts_are_those_of_torch_nn(kind, bias, bidirectional):
    theirs, ours = pair(kind, num_layers=2, bias=bias, bidirectional=bidirectional)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    torch.manual_seed(9)
    fresh = type(theirs)(D_IN, H, 2, bias=bias)
    torch.manual_seed(9)
    own = type(ours)(D_IN, H, 2, bias=bias)
    assert_same(list(own.parameters()), list(fresh.parameters()))  # drawn alike
    theirs.load_state_dict(ours.state_dict())
    assert isinstance(ours, type(theirs))


@every_kind
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("form", ["batched", "packed", "unbatched"])
def test_forward_hooks_see_every_product(kind, bias, form):
    """Each parameter's gradient is rebuilt from the inputs and output gradients that hooks saw."""
    _, ours = pair(kind, num_layers=2, bias=bias, bidirectional=True)
    seen = {}

    def hook(product, args, output):
        output.retain_grad()
        seen.setdefault(product, []).append((args[0], output))

    products = [m for m in ours.modules() if isinstance(m, recurrent.Product)]
    for product in products:
        product.register_forward_hook(hook)
    _, x, hx = example(kind, form, given=True, layers=2, bidirectional=True)
    sum(t.square().sum() for t in flat(ours(x, hx))).backward()

    names = [name for p in products for name in (p.weight_name, p.bias_name) if name is not None]
    assert sorted(names) == sorted(ours.state_dict())
    count = {"batched": L * N, "packed": sum(LENGTHS), "unbatched": L}[form]
    for product in products:
        calls = seen[product]
        assert len(calls) == (1 if "_ih_" in product.weight_name else L)
        a = torch.cat([x.reshape(-1, x.shape[-1]) for x, _ in calls])
        g = torch.cat([y.grad.reshape(-1, y.shape[-1]) for _, y in calls])
        assert len(a) == count  # no padding
        assert_same([g.T @ a], [ours.get_parameter(product.weight_name).grad])
        if product.bias_name is not None:
            assert_same([g.sum(0)], [ours.get_parameter(product.bias_name).grad])


def test_products_are_named_after_their_parameters():
    ours = recurrent.LSTM(D_IN, H, proj_size=2, bidirectional=True)
    names = {name for name, _ in ours.named_children()}
    sides = ("ih", "hh", "hr")
    assert names == {f"product_{side}_l0{end}" for side in sides for end in ("", "_reverse")}
    assert ours.product_hr_l0.bias_name is None
    assert ours.product_ih_l0_reverse.bias_name == "bias_ih_l0_reverse"


def in_memory(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": in_memory,
}


@every_kind
@pytest.mark.parametrize("way", list(COPIES))
def test_copies_compute_the_same_with_parameters_of_their_own(kind, way):
    _, ours = pair(kind, num_layers=2)
    other = COPIES[way](ours)
    assert type(other) is type(ours)
    _, x, hx = example(kind, "batched", given=True, layers=2)
    assert_same(flat(other(x, hx)), flat(ours(x, hx)))
    with torch.no_grad():
        other.weight_hh_l1.zero_()
    assert ours.weight_hh_l1.abs().max() > 0
    assert not torch.allclose(flat(other(x, hx))[0], flat(ours(x, hx))[0])


@every_kind
def test_a_module_that_changes_its_dtype_computes_in_it(kind):
    _, ours = pair(kind, dtype=torch.float32)
    theirs, _ = pair(kind, dtype=torch.float32)
    _, x, hx = example(kind, "batched", given=True)
    assert_same(flat(ours.to(torch.float64)(x, hx)), flat(theirs.to(torch.float64)(x, hx)))


@every_kind
def test_other_weights_through_functional_call(kind):
    theirs, ours = pair(kind)
    _, x, hx = example(kind, "batched", given=True)
    other = {name: 0.5 * p.detach() for name, p in ours.named_parameters()}
    expected = torch.func.functional_call(theirs, other, (x, hx))
    assert_same(flat(torch.func.functional_call(ours, other, (x, hx))), flat(expected))


@every_kind
def test_no_examples(kind):
    theirs, ours = pair(kind)
    x = torch.zeros(L, 0, D_IN, dtype=torch.float64)
    assert [t.shape for t in flat(ours(x))] == [t.shape for t in flat(theirs(x))]


@every_kind
def test_wrong_inputs_are_refused_with_torch_nns_exceptions(kind):
    theirs, ours = pair(kind)
    lstm = kind.startswith("LSTM")

    def hidden(*shape):
        sizes = (2 if "projected" in kind else H, H)
        parts = tuple(torch.zeros(*shape, size, dtype=torch.float64) for size in sizes)
        return parts if lstm else parts[0]

    x = torch.zeros(L, N, D_IN, dtype=torch.float64)
    packed = pack_padded_sequence(x, [5, 4, 2, 1])
    wrong = [
        (x[0, 0], None),
        (x[None], None),
        (x[..., :2], None),
        (x.float(), None),
        (x[:0], None),
        (x, hidden(2, N)),
        (x, hidden(1, N + 1)),
        (x, hidden(1)),
        (x[:, 0], hidden(1, N)),
        (packed, hidden(1, N + 1)),
        (packed, hidden(2, N)),
    ]
    for args in wrong:
        with pytest.raises((ValueError, RuntimeError)) as expected:
            theirs(*args)
        with pytest.raises(expected.type, match=r"must|[Ee]xpected|does not match"):
            ours(*args)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, D_IN)
        self.encoder = nn.ModuleList([nn.GRU(D_IN, H, batch_first=True), nn.RNN(H, H)])
        self.decoder = nn.Sequential(nn.LSTM(H, H, 2, bidirectional=True))
        self.alias = self.decoder[0]

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.encoder:
            x = layer(x)[0]
        return self.alias(x)[0]


CELLS = {
    "RNNCell": {},
    "RNNCell relu": {"nonlinearity": "relu"},
    "LSTMCell": {},
    "GRUCell": {},
}


def cells(kind, **options):
    """A cell of torch.nn and ours with its parameters, in float64."""
    options = {"dtype": torch.float64, **CELLS[kind], **options}
    torch.manual_seed(0)
    theirs = getattr(nn, kind.split()[0])(D_IN, H, **options)
    ours = getattr(recurrent, kind.split()[0])(D_IN, H, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.parametrize("kind", list(CELLS))
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch", [(N,), ()], ids=["batched", "unbatched"])
@pytest.mark.parametrize("given", [True, False], ids=["hx", "no hx"])
def test_cells_are_those_of_torch_nn(kind, bias, batch, given):
    theirs, ours = cells(kind, bias=bias)
    found = []
    for module in (theirs, ours):
        x, h, c = (leaf(*batch, size, seed=i) for i, size in enumerate((D_IN, H, H)))
        hx = None if not given else (h, c) if kind == "LSTMCell" else h
        result = module(x, hx)
        parts = result if isinstance(result, tuple) else (result,)
        inputs = [x, *([h, c][: len(parts)] if given else []), *module.parameters()]
        loss = sum((part.sin() * (i + 1)).sum() for i, part in enumerate(parts))
        found.append([*parts, *torch.autograd.grad(loss, inputs)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", list(CELLS))
def test_cells_refuse_what_torch_nns_refuse(kind):
    state = (leaf(N, H, seed=1),) * (2 if kind == "LSTMCell" else 1)
    state = state if len(state) > 1 else state[0]
    for module in cells(kind):
        for x in (leaf(N, D_IN + 1, seed=0), leaf(2, N, D_IN, seed=0)):
            with pytest.raises((RuntimeError, ValueError)):
                module(x)
        with pytest.raises((RuntimeError, ValueError, IndexError)):
            module(leaf(D_IN, seed=0), state)


class Unrolled(nn.Module):
    """A layer by its cell."""

    def __init__(self, layer, cell):
        super().__init__()
        self.cell = cell
        cell.load_state_dict({k.removesuffix("_l0"): v for k, v in layer.state_dict().items()})

    def forward(self, x):
        state, outputs = None, []
        for step in x:
            state = self.cell(step, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs), state


class OfSteps(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.head = inner, nn.Linear(H, 2).double()

    def forward(self, x):
        return self.head(self.inner(x)[0])


@pytest.mark.parametrize("method", ["eigen", "inverse"])
@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
def test_a_cell_is_preconditioned_as_its_layer_is(kind, method):
    _, layer = pair(kind)
    cell = recurrent.replace_recurrent(getattr(nn, f"{kind}Cell")(D_IN, H, dtype=torch.float64))
    models = [OfSteps(layer), OfSteps(Unrolled(layer, cell))]
    models[1].head.load_state_dict(models[0].head.state_dict())
    for model in models:
        optimizer = KFAC(
            model, torch.optim.SGD(model.parameters(), lr=0.1), kl_clip=None, compute_method=method
        )
        for seed in range(3):
            optimizer.zero_grad()
            model(leaf(L, N, D_IN, seed=seed)).square().mean().backward()
            optimizer.step()
        assert all(route.treatment == "kfac" for route in optimizer.routing())
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_replace_recurrent_keeps_objects_parameters_and_results():
    torch.manual_seed(0)
    model = Model().double()
    model.encoder[1].eval()
    tokens = torch.arange(20).view(4, 5) % 7
    expected = model(tokens)
    keys, parameters, modules = list(model.state_dict()), list(model.parameters()), [model.alias]
    assert recurrent.replace_recurrent(model) is model
    assert_same([model(tokens)], [expected])
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert model.alias is modules[0] is model.decoder[0]
    kinds = [type(model.encoder[0]), type(model.encoder[1]), type(model.alias)]
    assert kinds == [recurrent.GRU, recurrent.RNN, recurrent.LSTM]
    assert [m.training for m in (*model.encoder, model.alias)] == [True, False, True]


@pytest.mark.parametrize("name", ["RNN", "LSTM", "GRU"])
def test_replace_recurrent_takes_a_layer_itself_once_or_twice(name):
    layer = getattr(nn, name)(D_IN, H)
    assert recurrent.replace_recurrent(recurrent.replace_recurrent(layer)) is layer
    assert type(layer) is getattr(recurrent, name)
    assert len(list(layer.children())) == 2
    x = torch.randn(L, N, D_IN)
    again = copy.deepcopy(layer)
    torch.testing.assert_close(again(x)[0], layer(x)[0])


def test_replace_recurrent_leaves_subclasses_alone():
    class Scaled(nn.GRU):
        def forward(self, input, hx=None):
            output, hidden = super().forward(input, hx)
            return 2 * output, hidden

    model = nn.Sequential(Scaled(D_IN, H))
    recurrent.replace_recurrent(model)
    assert type(model[0]) is Scaled
