"""A user of kfac-pytorch changes an import: names keep their meaning, and on request numbers, too."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from suite.torch import AssignmentStrategy, ComputeMethod, DistributedStrategy, KFACPreconditioner
from suite.torch import kfac_pytorch as kfac

T64 = torch.float64


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Conv2d(4, 3, 2, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(12, 5),
        nn.Tanh(),
        nn.Linear(5, 3),
    ).to(T64)


class Reference:
    """kfac-pytorch 0.4 by its documentation and papers (arXiv:2007.00784): plain loops over layers.

    A and G are means of outer products over rows; a convolution's rows are divided by its number of
    output positions first; running averages start at the identity; 'inverse' adds all of the damping to
    both factors; gradients are scaled by √(kl_clip / Σ lr² ⟨direction, gradient⟩), at most 1.
    """

    def __init__(self, model, method, decay=0.95, damping=0.001, kl_clip=0.001, lr=0.1):
        self.layers = [m for m in model if isinstance(m, (nn.Linear, nn.Conv2d))]
        self.method, self.decay, self.damping = method, decay, damping
        self.kl_clip, self.lr = kl_clip, lr
        self.A, self.G, self.seen = {}, {}, {}
        for m in self.layers:
            m.register_forward_hook(self.see)

    def see(self, module, args, y):
        y.register_hook(lambda g: self.seen.setdefault(module, []).append((args[0].detach(), g)))

    def factors(self, module, a, g):
        places = 1
        if isinstance(module, nn.Conv2d):
            places = g.shape[2] * g.shape[3]
            a = F.unfold(a, module.kernel_size, 1, module.padding, module.stride)
            a, g = a.transpose(1, 2).flatten(0, 1), g.flatten(2).transpose(1, 2).flatten(0, 1)
        if module.bias is not None:
            a = torch.cat([a, torch.ones_like(a[:, :1])], 1)
        a, g = a / places, g / places
        return a.T @ a / len(a), g.T @ g / len(g)

    @torch.no_grad()
    def step(self):
        total, directions = 0.0, []
        for m in self.layers:
            both = [self.factors(m, a, g) for a, g in self.seen.pop(m)]
            for kept, i in ((self.A, 0), (self.G, 1)):
                new = sum(pair[i] for pair in both) / len(both)
                old = kept.get(m, torch.eye(len(new), dtype=new.dtype))
                kept[m] = self.decay * old + (1 - self.decay) * new
            gradient = m.weight.grad.flatten(1)
            if m.bias is not None:
                gradient = torch.cat([gradient, m.bias.grad[:, None]], 1)
            if self.method == "inverse":
                A, G = (
                    torch.linalg.inv(x + self.damping * torch.eye(len(x), dtype=x.dtype))
                    for x in (self.A[m], self.G[m])
                )
                direction = G @ gradient @ A
            else:
                (dA, QA), (dG, QG) = torch.linalg.eigh(self.A[m]), torch.linalg.eigh(self.G[m])
                inner = QG.T @ gradient @ QA / (dG[:, None] * dA + self.damping)
                direction = QG @ inner @ QA.T
            directions.append(direction)
            total += float((direction * gradient).sum()) * self.lr**2
        scale = min(1.0, math.sqrt(self.kl_clip / abs(total)))
        for m, direction in zip(self.layers, directions, strict=True):
            width = m.weight[0].numel()
            m.weight.grad = scale * direction[:, :width].reshape(m.weight.shape)
            if m.bias is not None:
                m.bias.grad = scale * direction[:, -1]


@pytest.mark.parametrize("method", ["eigen", "inverse"])
@pytest.mark.parametrize("passes", [1, 2])
def test_the_compatible_scaling_gives_that_packages_trajectory(method, passes):
    ends = []
    for ours in (True, False):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if ours:
            kfac = KFACPreconditioner(
                model, compute_method=method, factor_scaling="kfac_pytorch", accumulation_steps=passes
            )
        else:
            kfac = Reference(model, method)
        generator = torch.Generator().manual_seed(1)
        for _ in range(10):
            optimizer.zero_grad()
            for _ in range(passes):
                x = torch.randn(6, 2, 6, 6, generator=generator, dtype=T64)
                y = torch.randint(0, 3, (6,), generator=generator)
                F.cross_entropy(model(x), y).backward()
            kfac.step()
            optimizer.step()
        ends.append([p.detach() for p in model.parameters()])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_only_that_packages_layers_are_covered_under_its_scaling():
    routing = KFACPreconditioner(network(), factor_scaling="kfac_pytorch").routing()
    plain = {route.parameter for route in routing if route.treatment == "plain"}
    assert plain == {"1.weight", "1.bias"}
    assert "kfac-pytorch" in routing["1.weight"].reason


def test_its_arguments_and_attributes_exist():
    kfac = KFACPreconditioner(
        network(),
        factor_update_steps=1,
        inv_update_steps=1,
        damping=lambda step: 0.1 / (1 + step),
        factor_decay=0.9,
        kl_clip=0.01,
        lr=lambda step: 0.5,
        accumulation_steps=2,
        compute_method="EIGEN",
        compute_eigenvalue_outer_product=True,
        symmetry_aware=True,
        grad_scaler=lambda: 2.0,
        factor_dtype=torch.float32,
        inv_dtype=torch.float32,
        skip_layers=["Flatten"],
        update_factors_in_hook=False,
        loglevel=logging.INFO,
    )
    assert (kfac.damping, kfac.factor_decay, kfac.kl_clip, kfac.lr) == (0.1, 0.9, 0.01, 0.5)
    assert (kfac.steps, kfac.factor_update_steps, kfac.inv_update_steps) == (0, 1, 1)
    assert kfac.compute_method is ComputeMethod.EIGEN
    assert kfac.assignment_strategy is AssignmentStrategy.COMPUTE
    assert kfac.distributed_strategy is DistributedStrategy.COMM_OPT
    assert (kfac.grad_worker_fraction, kfac.colocate_factors, kfac.symmetry_aware) == (1.0, True, True)
    assert (kfac.allreduce_bucket_cap_mb, kfac.compute_eigenvalue_outer_product) == (25.0, True)
    assert (kfac.factor_dtype, kfac.inv_dtype) == (torch.float32, torch.float32)
    assert kfac.skip_layers == ["Flatten"]
    assert kfac.grad_scaler() == 2.0
    for setting in ("compute_method='eigen'", "skip_layers=['Flatten']", "inv_dtype=torch.float32"):
        assert setting in repr(kfac)
    state = kfac.state_dict(False)
    assert all(not layer for layer in state["kfac"]["layers"].values())


def test_its_modules_have_their_names():
    assert kfac.preconditioner.KFACPreconditioner is KFACPreconditioner
    assert kfac.enums.ComputeMethod.INVERSE is ComputeMethod.INVERSE
    assert {kfac.scheduler.LambdaParamScheduler, kfac.scheduler.KFACParamScheduler}


def test_exp_decay_factor_averaging_is_the_mean_of_what_was_seen_until_it_decays_slower():
    decay = kfac.hyperparams.exp_decay_factor_averaging(0.8)
    averages, seen = 0.0, [3.0, 1.0, 4.0, 1.0]
    for step, x in enumerate(seen, 1):
        averages = decay(step) * averages + (1 - decay(step)) * x
    assert averages == pytest.approx(sum(seen) / len(seen))
    assert (decay(0), decay(5), decay(6), decay(1000)) == (0.0, 0.8, 0.8, 0.8)
    assert kfac.hyperparams.exp_decay_factor_averaging(1.0)(100) == 0.99
    with pytest.raises(ValueError, match=r"min_value must be > 0 and <= 1, got 1\.1"):
        kfac.hyperparams.exp_decay_factor_averaging(1.1)


def test_its_learning_rate_is_a_number_by_default():
    assert KFACPreconditioner(network()).lr == 0.1


@pytest.mark.parametrize("wrapped", [False, True])
def test_skip_layers_takes_names_as_modules_around_have_them(wrapped):
    """kfac-pytorch's names are those of `named_modules()` of DistributedDataParallel."""
    model = network()
    if wrapped:
        model = nn.ModuleDict({"module": model})
    for pattern in ([r"^module\.6$"] if wrapped else []) + ["^6$", r"6$"]:
        routing = KFACPreconditioner(model, skip_layers=[pattern]).routing()
        assert {r.parameter for r in routing if r.treatment == "plain"} == {"6.weight", "6.bias"}


def test_a_class_name_in_skip_layers_takes_a_container_only_whole():
    class Conv2dBlock(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc = nn.Conv2d(2, 2, 1), nn.Linear(2, 2)

    def skipped(*patterns):
        model = nn.Sequential(Conv2dBlock(), nn.Linear(2, 2))
        routing = KFACPreconditioner(model, skip_layers=patterns).routing()
        return {r.parameter.rpartition(".")[0] for r in routing if r.treatment == "plain"}

    assert skipped("Conv2d") == {"0.conv"}
    assert skipped("Conv2dBlock") == skipped("^0$") == {"0.conv", "0.fc"}
    said = r"patterns of skip_layers match no module: \['conv3'\]"
    with pytest.warns(RuntimeWarning, match=said) as caught:
        assert skipped("conv3", "fc") == {"0.fc"}
    assert caught[0].filename == __file__


def test_its_checkpoints_are_refused_by_name():
    with pytest.raises(ValueError, match="are those of factor_scaling='kfac_pytorch' alone"):
        KFACPreconditioner(network()).load_state_dict({"steps": 3, "layers": {}})


def after(kfac, model, optimizer, batches):
    """Parameters after steps on these batches."""
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        kfac.step()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("method", ["eigen", "inverse"])
def test_its_checkpoints_are_continued_under_its_scaling(method, prefix):
    generator = torch.Generator().manual_seed(1)
    batches = [
        (
            torch.randn(6, 2, 6, 6, generator=generator, dtype=T64),
            torch.randint(0, 3, (6,), generator=generator),
        )
        for _ in range(8)
    ]
    model = network()
    theirs = Reference(model, method)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    after(theirs, model, optimizer, batches[:4])
    names = {module: f"{prefix}{name}" for name, module in model.named_modules()}
    saved = {"steps": 4, "damping": 0.001, "factor_decay": 0.95, "kl_clip": 0.001, "lr": 0.1}
    saved |= {"factor_update_steps": 1, "inv_update_steps": 1}
    factors = {names[m]: {"A": theirs.A[m], "G": theirs.G[m]} for m in theirs.layers}
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    expected = after(theirs, model, optimizer, batches[4:])

    model = network()
    model.load_state_dict(weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ours = KFACPreconditioner(model, compute_method=method, factor_scaling="kfac_pytorch", damping=1.0)
    ours.load_state_dict({**saved, "layers": factors})
    assert (ours.steps, ours.damping) == (4, 0.001)
    for a, b in zip(after(ours, model, optimizer, batches[4:]), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_a_checkpoint_of_its_for_another_model_is_refused_by_layer():
    ours = KFACPreconditioner(network(), factor_scaling="kfac_pytorch")
    layers = {name: {"A": torch.eye(2), "G": torch.eye(3)} for name in ("0", "3", "6")}
    with pytest.raises(ValueError, match=r"layers missing \['8'\]"):
        ours.load_state_dict({"steps": 3, "layers": layers})
    with pytest.raises(ValueError, match=r"state of layer '0' must have shape \(1, 19, 19\) for A"):
        ours.load_state_dict({"steps": 3, "layers": {**layers, "8": layers["6"]}})
    with pytest.warns(RuntimeWarning, match="of step 3, has no factors"):
        ours.load_state_dict({"steps": 3})
    assert ours.steps == 3


@pytest.mark.parametrize(
    ("saved", "loads"),
    [
        ({"factor_scaling": "kfac_pytorch"}, {}),
        ({}, {"factor_scaling": "kfac_pytorch"}),
        ({"loss_reduction": "sum"}, {}),
    ],
)
def test_factors_of_another_scale_are_refused(saved, loads):
    def stepped(**settings):
        model = network()
        kfac = KFACPreconditioner(model, skip_layers=["BatchNorm2d"], **settings)
        x, y = torch.ones(4, 2, 6, 6, dtype=T64), torch.arange(4) % 3
        after(kfac, model, torch.optim.SGD(model.parameters(), lr=0.1), [(x, y)])
        return kfac

    record, other = stepped(**saved).state_dict(), stepped(**loads)
    (name,) = {**saved, **loads}
    default = {"factor_scaling": "fisher", "loss_reduction": "mean"}[name]
    wanted, got = loads.get(name, default), saved.get(name, default)
    with pytest.raises(ValueError, match=f"{name} of the state_dict must be '{wanted}', got '{got}'"):
        other.load_state_dict(record)
    record["kfac"]["inputs"] = "[]"  # as in older ones, which do not tell
    other.load_state_dict(record)


def test_factors_of_the_same_scale_are_taken_and_a_state_without_any_has_none():
    """A mean over all ranks' terms is a mean."""
    model = network()
    kfac = KFACPreconditioner(model, loss_reduction="mean")
    F.cross_entropy(model(torch.ones(4, 2, 6, 6, dtype=T64)), torch.arange(4) % 3).backward()
    kfac.step()
    whole, empty = kfac.state_dict(), kfac.state_dict(include_factors=False)
    kfac.detach()
    kfac = KFACPreconditioner(model, loss_reduction="global_mean")
    kfac.load_state_dict(whole)
    kfac.detach()
    kfac = KFACPreconditioner(model, loss_reduction="sum", compute_method="inverse")
    with pytest.warns(RuntimeWarning, match="of step 1, has no factors"):
        kfac.load_state_dict(empty)


def test_a_state_without_factors_says_that_averages_begin_anew():
    model = network()
    own = KFACPreconditioner(model)
    F.cross_entropy(model(torch.ones(4, 2, 6, 6, dtype=T64)), torch.arange(4) % 3).backward()
    own.step()
    saved = own.state_dict(include_factors=False)
    own.detach()
    with pytest.warns(RuntimeWarning, match="of step 1, has no factors"):
        KFACPreconditioner(model).load_state_dict(saved)


def test_a_reset_batch_leaves_no_statistics():
    model = network()
    kfac = KFACPreconditioner(model)
    F.cross_entropy(model(torch.randn(4, 2, 6, 6, dtype=T64)), torch.zeros(4).long()).backward()
    kfac.reset_batch()
    assert all(taken is None for taken in kfac._engine.capture.take_statistics())


def test_factors_alone_give_inverses_back():
    model = network()
    kfac = KFACPreconditioner(model, inv_update_steps=5)

    def step() -> None:
        model.zero_grad()
        F.cross_entropy(model(torch.ones(4, 2, 6, 6, dtype=T64)), torch.arange(4) % 3).backward()
        kfac.step()

    step()
    slim = kfac.state_dict(include_inverses=False)
    names = {name for layer in slim["kfac"]["layers"].values() for name in layer}
    assert names == {"A", "A_weight", "G", "G_weight"}
    kfac.detach()
    for compute in (True, False):
        again = KFACPreconditioner(model, inv_update_steps=5)
        again.load_state_dict(slim, compute_inverses=compute)
        ready = [bool(s["G_ready"].all()) for s in again.state_dict()["kfac"]["layers"].values()]
        assert set(ready) == {compute}
        again.detach()


@pytest.mark.parametrize(("saved", "loads"), [("eigen", "inverse"), ("inverse", "eigen")])
def test_averages_without_inverses_serve_another_method(saved, loads):
    """As if the method had been that from the beginning: here nothing has moved before."""

    def made(method):
        model = network()
        kfac = KFACPreconditioner(model, compute_method=method, damping=0.1)
        return model, kfac, torch.optim.SGD(model.parameters(), lr=0.0)

    x, y = torch.ones(4, 2, 6, 6, dtype=T64), torch.arange(4) % 3
    model, first, optimizer = made(saved)
    after(first, model, optimizer, [(x, y)])
    record = first.state_dict(include_inverses=False)
    ends = []
    for kind in (record, None):
        model, kfac, optimizer = made(loads)
        if kind is None:
            after(kfac, model, optimizer, [(x, y)])
        else:
            kfac.load_state_dict(kind)
        after(kfac, model, optimizer, [(x, y)])
        ends.append([p.grad for p in model.parameters()])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    with pytest.raises(ValueError, match=f"compute_method of the state_dict must be '{loads}'"):
        kfac.load_state_dict(first.state_dict())


def test_numbers_that_change_are_attributes_to_set():
    kfac = KFACPreconditioner(network(), lr=lambda step: 0.1)
    kfac.damping = 0.5
    kfac.inv_update_steps = 7
    assert (kfac.damping, kfac.inv_update_steps) == (0.5, 7)
    with pytest.raises(ValueError, match="damping must be >= 0, got -1"):
        kfac.damping = -1
    with pytest.raises(ValueError, match="lr was given as a function of the step count"):
        kfac.lr = 0.2
    assert (kfac.damping, kfac.lr) == (0.5, 0.1)


def test_a_checkpoints_entries_are_those_of_its_version():
    """What stores nested dicts flat wants all of them in every file: another one is another version."""
    own = KFACPreconditioner(network()).state_dict()["kfac"]
    assert own["version"] == 3
    entries = (
        "version compute_method steps skipped_steps refreshed_at draws hyperparameters layers inputs"
    )
    assert own.keys() == {*entries.split(), "discovered", "gathered", "factors", "inverses"}
