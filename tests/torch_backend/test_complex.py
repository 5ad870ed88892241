"""Complex parameters of a module's own, as of a Fourier neural operator: the diagonal of their parts."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from conftest import assert_close
from suite.torch import KFAC, AdaptiveKFAC
from torch_backend.rows_by_loops import both_reductions, double, held, loss_of, numbers, stepped


def complexes(*shape, seed=0):
    return torch.complex(numbers(*shape, seed=seed), numbers(*shape, seed=seed + 1))


class Used(nn.Module):
    """An operation between the spectrum of x and complex parameters."""

    def __init__(self, operation, shapes):
        super().__init__()
        made = (0.5 * complexes(*shape, seed=10 + i) for i, shape in enumerate(shapes))
        self.own = nn.ParameterList(map(nn.Parameter, made))
        self.operation, self.before = operation, nn.Linear(4, 4)
        self.head = nn.Linear(numbers(3, 2, 4).shape[1] * 2, 3)

    def forward(self, x, own=None):
        y = self.operation(torch.fft.fft(self.before(x)), *(own or self.own))
        y = torch.view_as_real(y.reshape(len(x), 2, -1).mean(-1)).flatten(1)
        return self.head(torch.tanh(y))


# operation(rows, *parameters), the same with parameters (*rows, *shape), shapes, the axes of the rows
USES = {
    "x + p": (lambda x, p: x + p, lambda x, p: x + p, [(4,)], (3, 2)),
    "x * p": (lambda x, p: x * p, lambda x, p: x * p, [(4,)], (3, 2)),
    "real x * p": (lambda x, p: x.real * p, lambda x, p: x.real * p, [(2, 4)], (3,)),
    "x * 2 p": (lambda x, p: x * (2 * p), lambda x, p: x * (2 * p), [(4,)], (3, 2)),
    "x * grid p": (
        lambda x, p: x * (torch.arange(1.0, 5.0) * p),
        lambda x, p: x * (torch.arange(1.0, 5.0) * p),
        [(4,)],
        (3, 2),
    ),
    "x * p / a number": (
        lambda x, p: x * (p / torch.tensor(4.0)),
        lambda x, p: x * (p / torch.tensor(4.0)),
        [(4,)],
        (3, 2),
    ),
    "modes": (
        lambda x, p: torch.einsum("nit,iot->not", x[..., :3], p),
        lambda x, p: torch.einsum("nit,niot->not", x[..., :3], p),
        [(2, 4, 3)],
        (3,),
    ),
    "x @ W": (
        lambda x, W: x @ W,
        lambda x, W: torch.einsum("nti,ntio->nto", x, W),
        [(4, 5)],
        (3, 2),
    ),
    "linear, with a shift": (
        lambda x, W, b: nn.functional.linear(x, W) + b,
        lambda x, W, b: torch.einsum("nti,ntoi->nto", x, W) + b,
        [(5, 4), (5,)],
        (3, 2),
    ),
    "W @ x": (
        lambda x, W: W.transpose(0, 1) @ x,
        lambda x, W: torch.einsum("nkio,nik->nok", W, x),
        [(2, 3)],
        (3, 4),
    ),
    "a vector": (lambda x, p: x @ p, lambda x, p: (x * p).sum(-1), [(4,)], (3, 2)),
    "gate": (
        lambda x, p: p * x + (1 - p) * x.square(),
        lambda x, p: p * (x - x.square()) + x.square(),
        [(4,)],
        (3, 2),
    ),
    "two views of one": (
        lambda x, p: x[..., 1:] * p[0] + p[1, None],
        lambda x, p: x[..., 1:] * p[:, :, 0] + p[:, :, 1],
        [(2, 3)],
        (3, 2),
    ),
}


@both_reductions
@pytest.mark.parametrize("name", USES)
def test_complex_parameters_have_the_diagonal_of_their_parts(name, reduction):
    """A parameter of its own for every row: autograd gives each row's gradient."""
    operation, by_row, shapes, rows = USES[name]
    x, model = numbers(3, 2, 4), double(lambda: Used(operation, shapes))
    other = copy.deepcopy(model)
    per_row = [p.detach().expand(*rows, *p.shape).clone().requires_grad_() for p in model.own]
    other.operation = by_row
    y = other(x, per_row)
    torch.testing.assert_close(y, model(x))
    loss_of(y, reduction).backward()
    kfac = stepped(model, x, reduction=reduction)
    terms = len(x) if reduction == "mean" else 1
    for i, p in enumerate(per_row):
        A, G = held(kfac)[f"own.{i}"]
        expected = torch.view_as_real(p.grad).square().sum(tuple(range(len(rows))))
        # A sum of products has its squares by the difference of two sums.
        torch.testing.assert_close(A * G[:, 0], terms * expected.reshape(1, -1), rtol=1e-9, atol=1e-12)
        assert kfac.routing()[f"own.{i}"].treatment == "kfac"


# Complex weights (i, o, t) of two real parameters.
MADE = {
    "complex": lambda re, im: torch.complex(re, im),
    "by name": lambda re, im: torch.complex(imag=im, real=re),
    "1j": lambda re, im: re + 1j * im,
    "a difference": lambda re, im: re - im * 2j,
    "turned over": lambda re, im: 0.5j * im + re,
    "stacked": lambda re, im: torch.view_as_complex(torch.stack([re, im], -1)),
    "cast": lambda re, im: re.to(torch.complex128) + 1j * im,
    "scaled": lambda re, im: 0.5 * torch.complex(re, im),
    "divided": lambda re, im: torch.complex(re, im) / 3,
    "turned": lambda re, im: 1j * torch.complex(re, im),
    "exponential": lambda re, im: torch.complex(-re.exp(), im),
    "moved": lambda re, im: torch.complex(re.mT, im.mT).mT,
}


@pytest.mark.parametrize("by", ["modes", "matrix", "entries"])
@pytest.mark.parametrize("made", MADE)
def test_two_real_parameters_make_a_complex_one(made, by):
    """A parameter of its own for every example: autograd gives each one's gradient."""
    make = MADE[made]
    operation, by_row = {
        "modes": (
            lambda x, p: torch.einsum("nit,iot->not", x, p[:, :, :4]),
            lambda x, p: torch.einsum("nit,niot->not", x, p[:, :, :, :4]),
        ),
        "matrix": (
            lambda x, p: x[:, 0] @ p[0],
            lambda x, p: torch.einsum("nt,nto->no", x[:, 0], p[:, 0]),
        ),
        "entries": (lambda x, p: x * p[:, 0], lambda x, p: x * p[:, :, 0]),
    }[by]
    x, model = numbers(3, 2, 4), double(lambda: Used(None, []))
    shape = (2, 4, 4)
    model.own = nn.ParameterList([nn.Parameter(numbers(*shape, seed=s)) for s in (10, 11)])
    other = copy.deepcopy(model)
    model.operation = lambda x, re, im: operation(x, make(re, im))
    other.operation = lambda x, re, im: by_row(x, make(re, im))
    per_row = [p.detach().expand(3, *shape).clone().requires_grad_() for p in model.own]
    y = other(x, per_row)
    torch.testing.assert_close(y, model(x))
    loss_of(y).backward()
    kfac = stepped(model, x)
    for i, p in enumerate(per_row):
        assert kfac.routing()[f"own.{i}"].treatment == "kfac"
        A, G = held(kfac)[f"own.{i}"]
        expected = len(x) * p.grad.square().sum(0)
        torch.testing.assert_close(A * G[:, 0], expected.reshape(1, -1), rtol=1e-9, atol=1e-12)


def test_reduce_sums_over_each_example():
    operation, by_row, shapes, rows = USES["x * p"]
    x, model = numbers(3, 2, 4), double(lambda: Used(operation, shapes))
    other = copy.deepcopy(model)
    per_row = [p.detach().expand(*rows, *p.shape).clone().requires_grad_() for p in model.own]
    other.operation = by_row
    loss_of(other(x, per_row), "sum").backward()
    A, G = held(stepped(model, x, reduction="sum", weight_sharing="reduce"))["own.0"]
    expected = torch.view_as_real(per_row[0].grad.sum(1)).square().sum(0)
    assert_close(A * G[:, 0], expected.reshape(1, -1))


class Spectral(nn.Module):
    """A spectral convolution, of complex weights, or of pairs of numbers, or of two real ones each."""

    def __init__(self, *, of="complex"):
        super().__init__()
        weight, shift = 0.3 * complexes(2, 4, 3), 0.3 * complexes(4, 1, seed=3)
        if of == "pairs":
            weight, shift = map(torch.view_as_real, (weight, shift))
        elif of == "two":
            self.weight_i, self.shift_i = (
                nn.Parameter(weight.imag.clone()),
                nn.Parameter(shift.imag.clone()),
            )
            weight, shift = weight.real, shift.real
        self.weight, self.shift = nn.Parameter(weight.clone()), nn.Parameter(shift.clone())
        self.of = of

    def forward(self, x):
        weight, shift = self.weight, self.shift
        if self.of == "pairs":
            weight, shift = torch.view_as_complex(weight), torch.view_as_complex(shift)
        elif self.of == "two":
            weight, shift = weight + 1j * self.weight_i, torch.complex(shift, self.shift_i)
        f = torch.fft.rfft(x)
        out = torch.zeros(len(x), 4, f.shape[-1], dtype=f.dtype)
        out[:, :, :3] = torch.einsum("bix,iox->box", f[:, :, :3], weight) + shift
        return torch.fft.irfft(out, n=x.shape[-1])


class Operator(nn.Module):
    def __init__(self, *, of="complex"):
        super().__init__()
        self.lift, self.spectral, self.head = nn.Linear(1, 2), Spectral(of=of), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.spectral(self.lift(x).mT)).mT)


def parts(model):
    own = {name: p.detach() for name, p in model.named_parameters()}
    found = []
    for name, p in own.items():
        if p.is_complex():
            found.append(torch.view_as_real(p))
        elif f"{name}_i" in own:
            found.append(torch.stack([p, own[f"{name}_i"]], -1))
        elif not name.endswith("_i"):
            found.append(p)
    return found


def trained(model, steps=6, run=None, chunks=1, **settings):
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    kfac = KFAC(model, base, damping=0.01, **settings)
    for step in range(steps):
        kfac.zero_grad()
        for x in numbers(6, 8, 1, seed=step).chunk(chunks):
            ((model if run is None else run)(x).sin().square().mean() / chunks).backward()
        kfac.step()
    return kfac


def assert_alike(model, other):
    for a, b in zip(parts(model), parts(other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "settings",
    [{}, {"compute_method": "inverse", "kl_clip": 0.1}, {"chunks": 2}, {"packed_factors": True},
     {"factor_update_steps": 2, "inv_update_steps": 3}, {"fisher": "type-2", "likelihood": "gaussian"}],
    ids=str,
)  # fmt: skip
def test_complex_parameters_are_those_of_their_parts(settings):
    model, *others = (double(lambda of=of: Operator(of=of)) for of in ("complex", "pairs", "two"))
    before = parts(copy.deepcopy(model))
    kfac = trained(model, **settings)
    for other in others:
        trained(other, **settings)
        assert_alike(model, other)
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(parts(model), before, strict=True))
    route = kfac.routing()["spectral.weight"]
    assert (route.treatment, route.factors, route.shape) == ("kfac", "diag 48", (2, 4, 3))


def test_adaptive_steps_of_complex_parameters_are_those_of_their_parts():
    models = [double(lambda of=of: Operator(of=of)) for of in ("complex", "pairs", "two")]
    before = parts(copy.deepcopy(models[0]))
    found = []
    for model in models:
        optimizer = AdaptiveKFAC(KFAC(model, damping=0.1, compute_method="inverse"))
        x, target = numbers(20, 8, 1), numbers(20, 8, 1, seed=1).sin()

        def closure(model=model, x=x, target=target):
            residuals = model(x) - target
            return residuals.square().mean(), residuals

        found.append([float(optimizer.step(closure)) for _ in range(8)])
    for other in models[1:]:
        assert_alike(models[0], other)
    assert found[0] == pytest.approx(found[1], rel=1e-9)
    assert found[0][-1] < 0.99 * found[0][0]
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(parts(models[0]), before, strict=True))


def test_a_checkpoint_goes_on_as_if_nothing_had_been():
    model = double(Operator)
    other = copy.deepcopy(model)
    trained(model)
    kfac = trained(other, steps=3)
    kept = io.BytesIO()
    torch.save({"model": other.state_dict(), "kfac": kfac.state_dict()}, kept)
    kept.seek(0)
    state = torch.load(kept, weights_only=True)
    resumed = double(Operator)
    resumed.load_state_dict(state["model"])
    base = torch.optim.SGD(resumed.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    kfac = KFAC(resumed, base, damping=0.01)
    kfac.load_state_dict(state["kfac"])
    for step in range(3, 6):
        kfac.zero_grad()
        resumed(numbers(6, 8, 1, seed=step)).sin().square().mean().backward()
        kfac.step()
    assert all(map(torch.equal, parts(model), parts(resumed)))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")  # dynamo looks at .grad
@pytest.mark.skipif(torch.__version__ < (2, 8), reason="torch.compile does not trace modes")
@pytest.mark.parametrize("of", ["complex", "pairs", "two"])
def test_a_compiled_model_is_the_same(of):
    torch._dynamo.reset()
    model = double(lambda: Operator(of=of))
    other = copy.deepcopy(model)
    trained(other)
    trained(model, run=torch.compile(model, backend="aot_eager", fullgraph=True))
    assert_alike(model, other)


@pytest.mark.parametrize("part", [0, 1])
def test_a_part_that_is_not_finite_changes_nothing(part):
    model = double(Operator)
    kfac = trained(model, steps=2)
    before, state = parts(copy.deepcopy(model)), copy.deepcopy(kfac.state_dict()["kfac"]["layers"])
    kfac.zero_grad()
    model(numbers(6, 8, 1)).square().mean().backward()
    torch.view_as_real(model.spectral.weight.grad)[0, 0, 0, part] = float("inf")
    with pytest.warns(RuntimeWarning, match="skipped"):
        kfac.step()
    assert kfac.skipped_steps == 1
    assert all(map(torch.equal, parts(model), before))
    after = kfac.state_dict()["kfac"]["layers"]
    assert all(torch.equal(after[name]["G"], record["G"]) for name, record in state.items())


def test_gradients_that_are_conjugates_by_a_mark_are_written_to():
    model = double(Operator)
    other = copy.deepcopy(model)
    for one in (model, other):
        kfac = KFAC(one, kl_clip=None)
        one(numbers(6, 8, 1)).square().mean().backward()
        if one is other:
            weight = one.spectral.weight
            weight.grad = weight.grad.conj().resolve_conj().conj()
            assert weight.grad.is_conj()
        kfac.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "how",
    [
        lambda x, p: x * p.exp(),
        lambda x, p: x * (p * (1 + 1j)),
        lambda x, p: x * p.conj(),
        lambda x, p: x * p.abs(),
        lambda x, p: x + p.real,
    ],
    ids=["function", "turned", "conjugate", "length", "real part"],
)
def test_uses_that_are_not_understood_are_named(how):
    model = double(lambda: Used(lambda x, p: how(x, p) + p, [(4,)]))
    kfac = KFAC(model)
    model(numbers(3, 2, 4)).square().mean().backward()
    with pytest.warns(RuntimeWarning, match="statistics miss some uses of these weights.*'own.0'"):
        kfac.step()


def test_complex_layers_keep_their_gradient_and_are_named():
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.Linear(4, 4, dtype=torch.complex128), nn.Linear(4, 1)

        def forward(self, x):
            return self.head(self.inner(x + 0j).real)

    model = double(Complex)
    kfac = stepped(model, numbers(3, 4))
    route = kfac.routing()["inner.weight"]
    assert (route.treatment, route.reason) == ("plain", "complex weights of layers are not covered")
    assert kfac.routing()["inner.bias"].treatment == "plain"
