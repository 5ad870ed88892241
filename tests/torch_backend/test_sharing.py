"""Layers that read the same input share one A; layers that share a weight are one block."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from conftest import same
from suite.torch import KFAC

T64 = torch.float64


class Attention(nn.Module):
    """Queries, keys and values of one input; `other` makes the keys' input another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(6, 2)
        self.out = nn.Linear(2, 3)
        self.other = False
        self.reentrant: bool | None = None  # of the checkpoint around it; None: there is none

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return self.out(self.mixed(x)).mean(1)
        mixed = checkpoint(self.mixed, x.requires_grad_(), use_reentrant=self.reentrant)
        return self.out(mixed).mean(1)

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        k = self.k(x + 0 if self.other else x)
        return torch.softmax(self.q(x) @ k.mT, -1) @ self.v(x)


def model_and_kfac(**settings):
    torch.manual_seed(0)
    model = Attention().to(T64)
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **settings)
    return model, kfac


def train(model, kfac, seeds, other=False):
    model.other = other
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(5, 7, 6, generator=generator, dtype=T64)
        kfac.zero_grad()
        F.cross_entropy(model(x), torch.arange(5) % 3).backward()
        kfac.step()


def factors(kfac):
    return kfac.state_dict()["kfac"]["layers"]


def leader_of(kfac):
    """Layer -> the one whose A it shares."""
    return dict(json.loads(kfac.state_dict()["kfac"]["inputs"])["inputs"])


def test_one_A_for_all_that_read_the_same_tensor():
    model, kfac = model_and_kfac()
    plan = kfac.memory_plan()
    train(model, kfac, range(3))
    shared = leader_of(kfac).keys()
    assert len(shared) == 2
    (leader,) = {"q", "k", "v"} - shared
    for name in shared:
        assert f"shares A with {leader}" in kfac.routing()[f"{name}.weight"].reason
    # The plan cannot know: two of the three 7x7 factors and their eigenbases are saved.
    usage = kfac.memory_usage()
    assert plan["factors"] - usage["factors"] == 2 * 49 * 8
    assert plan["inverses"] - usage["inverses"] == 2 * (49 + 7) * 8


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_share_as_well(reentrant):
    ends = []
    for kind in (None, reentrant):
        model, kfac = model_and_kfac(compute_method="inverse")
        model.reentrant = kind
        train(model, kfac, range(3))
        assert len(leader_of(kfac)) == 2
        ends.append([p.detach() for p in model.parameters()])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("form", [json.dumps, list])
def test_older_checkpoints_have_pairs_in_a_list(form):
    model, kfac = model_and_kfac()
    train(model, kfac, range(2))
    state = kfac.state_dict()
    state["kfac"]["inputs"] = form(json.loads(state["kfac"]["inputs"])["inputs"])
    _, again = model_and_kfac()
    again.load_state_dict(state)
    assert leader_of(again) == leader_of(kfac)
    assert len(leader_of(again)) == 2


@pytest.mark.parametrize("settings", [{}, {"compute_method": "ekfac"}], ids=["eigen", "ekfac"])
def test_sharing_changes_no_number(settings):
    """An input that is copied for each layer is the same input, and nothing is shared."""
    ends = []
    for other in (False, True):
        model, kfac = model_and_kfac(inv_update_steps=2, **settings)
        train(model, kfac, range(6), other)
        assert len(leader_of(kfac)) == (1 if other else 2)
        ends.append([p.detach() for p in model.parameters()])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_layers_that_turn_out_to_read_different_inputs_get_factors_of_their_own():
    model, kfac = model_and_kfac()
    train(model, kfac, range(2))
    before = kfac.memory_usage()["factors"]
    apart, again = model_and_kfac()
    train(apart, again, range(2), other=True)
    train(model, kfac, range(2, 5), other=True)
    train(apart, again, range(2, 5), other=True)
    assert kfac.memory_usage()["factors"] > before
    for name in "qkv":
        reason = kfac.routing()[f"{name}.weight"].reason
        assert ("shares A" in reason) == (name in leader_of(kfac))
    for a, b in zip(model.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_a_backward_pass_that_is_thrown_away_ends_no_sharing():
    ends = []
    for thrown in (False, True):
        model, kfac = model_and_kfac(inv_update_steps=2)
        train(model, kfac, range(2))
        model.zero_grad()
        for seed in (2, 3):
            if thrown:
                model(torch.ones(5, 7, 6, dtype=T64)).square().mean().backward()
                model.zero_grad()
            train_without_clearing(model, kfac, seed)
        assert leader_of(kfac) == {"q": "k", "v": "k"}
        ends.append((model.state_dict(), kfac.state_dict()["kfac"]["layers"]))
    assert same(*ends)


def train_without_clearing(model, kfac, seed):
    x = torch.randn(5, 7, 6, generator=torch.Generator().manual_seed(seed), dtype=T64)
    F.cross_entropy(model(x), torch.arange(5) % 3).backward()
    kfac.step()
    model.zero_grad()


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4, bias=False), nn.Linear(6, 3, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x), self.b(x)


@pytest.mark.parametrize("first", ["b", "ab"])
def test_a_head_does_not_wait_for_one_that_is_no_part_of_the_loss(first):
    """The head that runs first sums A for both, but only if its output has a gradient."""
    torch.manual_seed(0)
    model = TwoHeads().to(T64)
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.0), factor_decay=0.5)
    inputs = [torch.randn(5, 6, dtype=T64) for _ in range(3)]
    for step, x in enumerate(inputs):
        kfac.zero_grad()
        a, b = model(x)
        loss = b.square().mean() + (a.square().mean() if step == 0 and "a" in first else 0.0)
        loss.backward()
        kfac.step()
    weights = (0.125, 0.25, 0.5) if first == "b" else (0.25, 0.0, 0.5)
    expected = sum(w * x.T @ x / 5 for w, x in zip(weights, inputs, strict=True))
    torch.testing.assert_close(factors(kfac)["b"]["A"][0], expected, rtol=1e-12, atol=1e-12)
    assert leader_of(kfac) == {}


@pytest.mark.parametrize("first", ["apart", "together"])
def test_heads_with_a_micro_batch_each_have_an_A_each(first):
    """Both run in every forward pass, and a loss reaches one of them in each."""
    torch.manual_seed(0)
    model = TwoHeads().to(T64)
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.0), factor_decay=0.5)
    inputs = [torch.randn(2, 5, 6, dtype=T64) for _ in range(3)]
    for step, (for_a, for_b) in enumerate(inputs):
        kfac.zero_grad()
        if step == 0 and first == "together":
            sum(y.square().mean() for y in model(for_b)).backward()
        else:
            model(for_a)[0].square().mean().backward()
            model(for_b)[1].square().mean().backward()
        kfac.step()
    weights = (0.125, 0.25, 0.5) if first == "apart" else (0.25, 0.0, 0.5)
    expected = sum(w * x.T @ x / 5 for w, (_, x) in zip(weights, inputs, strict=True))
    torch.testing.assert_close(factors(kfac)["b"]["A"][0], expected, rtol=1e-12, atol=1e-12)
    assert leader_of(kfac) == {}


def test_heads_that_run_in_another_order_share_on_and_lose_nothing():
    """Where the one that sums A for both comes second the other does not know that it will come."""
    torch.manual_seed(0)
    model = TwoHeads().to(T64)
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.0), factor_decay=0.5)
    inputs = [torch.randn(2, 5, 6, dtype=T64) for _ in range(3)]
    for step, parts in enumerate(inputs):
        kfac.zero_grad()
        for x, order in zip(parts, ("ab", "ba" if step == 1 else "ab"), strict=True):
            sum(getattr(model, head)(x).square().mean() for head in order).backward()
        kfac.step()
    assert leader_of(kfac) == {"b": "a"}
    rows = [x.reshape(-1, 6) for x in inputs]
    expected = sum(w * x.T @ x / 10 for w, x in zip((0.125, 0.25, 0.5), rows, strict=True))
    for name in ("a", "b"):
        torch.testing.assert_close(factors(kfac)[name]["A"][0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", ["eigen", "inverse", "ekfac"])
def test_a_checkpoint_knows_who_shares(method):
    model, kfac = model_and_kfac(compute_method=method, inv_update_steps=3)
    train(model, kfac, range(4))
    state, weights = copy.deepcopy(kfac.state_dict()), copy.deepcopy(model.state_dict())
    train(model, kfac, range(4, 8))
    resumed, again = model_and_kfac(compute_method=method, inv_update_steps=3)
    resumed.load_state_dict(weights)
    again.load_state_dict(state)
    train(resumed, again, range(4, 8))
    assert same(model.state_dict(), resumed.state_dict())
    assert same(kfac.state_dict(), again.state_dict())


def test_a_tied_head_is_one_block_and_learns():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.body = nn.Embedding(11, 5), nn.Linear(5, 5)
            self.head = nn.Linear(5, 11, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.body(self.embedding(tokens))))

    torch.manual_seed(0)
    model = Tied().to(T64)
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.2))
    route = kfac.routing()["embedding.weight"]
    assert route.factors == "5x5, diag 11"
    assert "one block for 2 uses" in route.reason
    tokens, losses = torch.arange(11).repeat(2, 1), []
    for _ in range(40):
        kfac.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), (tokens + 1).flatten() % 11)
        loss.backward()
        kfac.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


def test_an_embedding_of_a_large_vocabulary_takes_megabytes():
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(50257, 64), nn.Linear(64, 50257))
    plan = KFAC(model).memory_plan()
    # Two diagonals of the vocabulary, 64x64 and 65x65 dense; eigenvalues and vectors likewise.
    count = 2 * 50257 + 64**2 + 65**2
    assert plan["factors"] == 4 * count
    assert plan["inverses"] == 4 * (count + 64 + 65)
