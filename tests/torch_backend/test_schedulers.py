from __future__ import annotations

import pytest
import torch
from torch import nn

from suite.torch.kfac import KFAC
from suite.torch.schedulers import KFACParamScheduler, LambdaParamScheduler

NAMES = ("factor_update_steps", "inv_update_steps", "damping", "factor_decay", "kl_clip", "lr")


def preconditioner(**options):
    return KFAC(nn.Linear(2, 2), **options)


def values(kfac, *names):
    return [kfac.hyperparameter(name) for name in names]


def test_epoch_scheduler_multiplies_at_its_epochs():
    kfac = preconditioner(damping=0.8, factor_update_steps=2, inv_update_steps=10)
    scheduler = KFACParamScheduler(kfac, 0.5, [2, 3, 5], 3, [1, 4])
    seen = []
    for _ in range(6):
        seen.append(values(kfac, "damping", "factor_update_steps", "inv_update_steps"))
        scheduler.step()
    assert seen == [
        [0.8, 2, 10],
        [0.8, 6, 30],
        [0.4, 6, 30],
        [0.2, 6, 30],
        [0.2, 18, 90],
        [0.1, 18, 90],
    ]
    assert all(type(v) is int for v in values(kfac, "factor_update_steps", "inv_update_steps"))


def test_epoch_scheduler_rounds_periods_down_once_not_at_each_epoch():
    kfac = preconditioner(factor_update_steps=5, inv_update_steps=7)
    scheduler = KFACParamScheduler(kfac, update_freq_alpha=1.5, update_freq_schedule=[1, 2, 3])
    scheduler.step(3)
    assert values(kfac, "factor_update_steps", "inv_update_steps") == [16, 23]  # 16.9, 23.6


@pytest.mark.parametrize("start_epoch", [0, 1, 2, 7])
def test_epoch_scheduler_that_starts_late_is_where_an_early_one_would_be(start_epoch):
    options = {"damping_alpha": 0.1, "damping_schedule": [5, 0, 2], "update_freq_alpha": 2}
    options["update_freq_schedule"] = [1]
    early, late = preconditioner(damping=1.0), preconditioner(damping=1.0)
    scheduler = KFACParamScheduler(early, **options)
    for _ in range(start_epoch):
        scheduler.step()
    KFACParamScheduler(late, **options, start_epoch=start_epoch)
    assert values(late, *NAMES) == values(early, *NAMES)
    expected = {0: 0.1, 1: 0.1, 2: 0.01, 7: 0.001}[start_epoch]
    assert late.hyperparameter("damping") == pytest.approx(expected)


def test_epoch_scheduler_goes_to_any_epoch_and_back():
    kfac = preconditioner(damping=1.0)
    scheduler = KFACParamScheduler(kfac, 0.5, [3, 6])
    seen = []
    for epoch in (6, 2, 3, None, None, None):
        scheduler.step(epoch)
        seen.append((scheduler.epoch, kfac.hyperparameter("damping")))
    assert seen == [(6, 0.25), (2, 1.0), (3, 0.5), (4, 0.5), (5, 0.5), (6, 0.25)]


def test_epoch_scheduler_leaves_alone_what_has_no_schedule_and_the_lists_it_was_given():
    def damping(steps):
        return 0.1

    kfac = preconditioner(damping=damping, inv_update_steps=4, kl_clip=None)
    before = values(kfac, *NAMES)
    KFACParamScheduler(kfac, damping_alpha=0.5).step()
    assert values(kfac, *NAMES) == before
    schedule = [2, 1, 3]
    KFACParamScheduler(kfac, update_freq_alpha=2, update_freq_schedule=schedule).step(2)
    assert schedule == [2, 1, 3]
    assert values(kfac, "damping", "inv_update_steps") == [0.1, 16]


def test_epoch_scheduler_resumes_from_its_state():
    first = preconditioner(damping=1.0, inv_update_steps=3)
    options = {"damping_alpha": 0.5, "damping_schedule": [1, 4]}
    options |= {"update_freq_alpha": 2, "update_freq_schedule": [2]}
    scheduler = KFACParamScheduler(first, **options)
    scheduler.step(3)
    second = preconditioner(damping=7.0, inv_update_steps=9)
    resumed = KFACParamScheduler(second, **options)
    resumed.load_state_dict(scheduler.state_dict())
    for _ in range(2):
        assert values(second, *NAMES) == values(first, *NAMES)
        scheduler.step()
        resumed.step()
    assert second.hyperparameter("damping") == 0.25
    with pytest.raises(ValueError, match=r"state_dict must have start values of \['damping'\], got"):
        KFACParamScheduler(second, 0.5, [1]).load_state_dict(scheduler.state_dict())
    with pytest.raises(ValueError, match=r"state_dict must have \['epoch', 'start'\], got keys \[\]"):
        resumed.load_state_dict({})
    with pytest.raises(ValueError, match="damping must be >= 0, got -1"):
        resumed.load_state_dict(
            {"epoch": 0, "start": {**scheduler.state_dict()["start"], "damping": -1}}
        )
    assert resumed.state_dict() == scheduler.state_dict()


def test_epoch_scheduler_made_before_the_checkpoint_is_loaded_resumes_with_start_epoch():
    kfac = preconditioner(damping=1.0)
    scheduler = KFACParamScheduler(kfac, 0.5, [1, 3])
    scheduler.step()
    checkpoint = kfac.state_dict()
    resumed_kfac = preconditioner(damping=1.0)
    resumed = KFACParamScheduler(resumed_kfac, 0.5, [1, 3], start_epoch=1)
    resumed_kfac.load_state_dict(checkpoint)
    for _ in range(2):
        assert resumed_kfac.hyperparameter("damping") == kfac.hyperparameter("damping")
        scheduler.step()
        resumed.step()
    assert kfac.hyperparameter("damping") == resumed_kfac.hyperparameter("damping") == 0.25


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"damping_alpha": 0}, "damping_alpha must be > 0, got 0"),
        ({"update_freq_alpha": -1}, "update_freq_alpha must be > 0, got -1"),
        ({"damping_schedule": [3, -1]}, "every epoch of damping_schedule must be >= 0, got -1"),
        ({"update_freq_schedule": [-2]}, "every epoch of update_freq_schedule must be >= 0, got -2"),
        ({"start_epoch": -1}, "start_epoch must be >= 0, got -1"),
        (
            {"update_freq_alpha": 0.5, "update_freq_schedule": [1, 2, 3]},
            "factor_update_steps at the end of update_freq_schedule must be >= 1, got 0",
        ),
    ],
)
def test_epoch_scheduler_refuses_bad_values(options, message):
    kfac = preconditioner(factor_update_steps=4, inv_update_steps=8)
    with pytest.raises(ValueError, match=f"^{message}$"):
        KFACParamScheduler(kfac, **options)
    assert values(kfac, "factor_update_steps", "inv_update_steps") == [4, 8]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda kfac: KFACParamScheduler(3), "kfac must be a KFAC, got int"),
        (lambda kfac: LambdaParamScheduler(None), "preconditioner must be a KFAC, got NoneType"),
        (lambda kfac: KFACParamScheduler(kfac, 0.5, 20), "damping_schedule must be a list of epochs"),
        (lambda kfac: KFACParamScheduler(kfac, 0.5, "20"), "damping_schedule must be a list of epochs"),
        (
            lambda kfac: LambdaParamScheduler(kfac, damping_lambda=lambda steps: "a").step(),
            "what damping_lambda returns must be a number",
        ),
    ],
)
def test_schedulers_refuse_what_is_of_another_type(make, message):
    kfac = preconditioner()
    with pytest.raises(TypeError, match=f"^{message}"):
        make(kfac)
    assert values(kfac, "damping") == [0.001]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("damping", {"damping_schedule": [1]}),
        ("factor_update_steps", {"update_freq_schedule": [1]}),
        ("inv_update_steps", {"update_freq_schedule": [1]}),
    ],
)
def test_epoch_scheduler_refuses_what_is_a_function_already(name, options):
    kfac = preconditioner(**{name: lambda steps: 1})
    with pytest.raises(ValueError, match=name):
        KFACParamScheduler(kfac, **options)


@pytest.mark.parametrize("name", NAMES)
def test_lambda_scheduler_multiplies_the_current_value_each_time(name):
    start = {"factor_update_steps": 4, "inv_update_steps": 10}.get(name, 0.25)
    model = nn.Linear(2, 2)
    kfac = KFAC(model, **{name: start})
    others = [n for n in NAMES if n != name]
    before = values(kfac, *others)
    asked = []

    def factor(steps):
        asked.append(steps)
        return 1.5 if steps == 1 else 0.5

    scheduler = LambdaParamScheduler(kfac, **{f"{name}_lambda": factor})
    seen = []
    for _ in range(3):
        kfac.zero_grad()
        model(torch.ones(3, 2)).sum().backward()
        kfac.step()
        scheduler.step()
        seen.append(kfac.hyperparameter(name))
    assert asked == [1, 2, 3]
    if name.endswith("_steps"):
        assert seen == {"factor_update_steps": [6, 3, 1], "inv_update_steps": [15, 7, 3]}[name]
        assert all(type(value) is int for value in seen)
    else:
        assert seen == [0.375, 0.1875, 0.09375]
    assert values(kfac, *others) == before


def test_lambda_scheduler_takes_another_step_count():
    kfac = preconditioner(damping=1.0)
    scheduler = LambdaParamScheduler(kfac, damping_lambda=lambda steps: 1 / steps)
    scheduler.step(4)
    scheduler.step(step=2)
    assert kfac.hyperparameter("damping") == 0.125


@pytest.mark.parametrize("name", NAMES)
def test_lambda_scheduler_refuses_what_is_a_function_already(name):
    value = 1 if name.endswith("_steps") else 0.5
    kfac = preconditioner(**{name: lambda steps: value})
    with pytest.raises(ValueError, match=name):
        LambdaParamScheduler(kfac, **{f"{name}_lambda": lambda steps: 1.0})


@pytest.mark.parametrize("name", ["kl_clip", "lr"])
def test_lambda_scheduler_refuses_what_is_none(name):
    """The learning rate is none where it is an optimizer's."""
    model = nn.Linear(2, 2)
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), **{name: None})
    with pytest.raises(ValueError, match=f"^{name} must be a number to be multiplied, got None$"):
        LambdaParamScheduler(kfac, **{f"{name}_lambda": lambda steps: 1.0})


def test_lambda_scheduler_multiplies_the_learning_rate_of_a_preconditioner():
    kfac = preconditioner()
    scheduler = LambdaParamScheduler(kfac, lr_lambda=lambda steps: 0.5)
    scheduler.step()
    assert kfac.lr == 0.05


def test_lambda_scheduler_refuses_what_is_no_function():
    with pytest.raises(
        TypeError, match=r"damping_lambda must be a function of the step count, got 0\.5"
    ):
        LambdaParamScheduler(preconditioner(), damping_lambda=0.5)


def test_lambda_scheduler_does_not_make_a_value_invalid():
    kfac = preconditioner(inv_update_steps=3)
    scheduler = LambdaParamScheduler(kfac, inv_update_steps_lambda=lambda steps: 0.1)
    with pytest.raises(ValueError, match=r"inv_update_steps must be >= 1, got 0"):
        scheduler.step()
    assert kfac.hyperparameter("inv_update_steps") == 3


def test_lambda_scheduler_sets_nothing_if_one_value_would_be_bad():
    kfac = KFAC(nn.Linear(2, 2), damping=0.1)
    functions = {"damping_lambda": lambda steps: 0.5, "factor_decay_lambda": lambda steps: 2.0}
    with pytest.raises(ValueError, match="factor_decay must be"):
        LambdaParamScheduler(kfac, **functions).step()
    assert kfac.damping == 0.1
