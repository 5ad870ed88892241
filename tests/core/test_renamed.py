"""Arguments of other packages are refused with their names here."""

import inspect

import pytest

from suite.core.renamed import OF_KFAC, OF_KRON, says_new_names


@says_new_names({"old": "new", "kept": "other"})
def function(first, *, new=1, kept=2):
    """What it says."""
    return first, new, kept


def test_what_is_known_arrives():
    assert function(0, new=3, kept=4) == (0, 3, 4)
    assert function.__doc__ == "What it says."
    assert list(inspect.signature(function).parameters) == ["first", "new", "kept"]


def test_another_name_is_told_and_an_unknown_one_is_pythons_error():
    with pytest.raises(TypeError, match=r"^unknown arguments of function: old is new here$"):
        function(0, old=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'unheard_of'"):
        function(0, unheard_of=3)


def test_front_doors_have_the_names_that_are_told():
    torch, jax = pytest.importorskip("suite.torch"), pytest.importorskip("suite.jax")
    kron = (torch.Kron, torch.LRA, torch.DenseNewton, jax.kron, jax.scale_by_kron, jax.lra)
    for names, doors in ((OF_KRON, kron), (OF_KFAC, (torch.KFAC, jax.kfac))):
        known = {door: set(inspect.signature(door).parameters) for door in doors}
        assert set(names.values()) <= set.union(*known.values())
        for door, own in known.items():
            for theirs, ours in names.items():
                if theirs not in own:
                    told = f"{theirs} is {ours} here" if ours in own else "unexpected keyword argument"
                    with pytest.raises(TypeError, match=told):
                        door(None, **{theirs: 1})
    for door, given, told in (
        (torch.Kron, {"precond_lr": 0.1}, "precond_lr is preconditioner_lr here"),
        (torch.LRA, {"rank_of_approximation": 3, "lr": 0.1}, "rank_of_approximation is rank here"),
        (torch.KFAC, {"inv_update_freq": 3}, "inv_update_freq is inv_update_steps here"),
        (jax.kron, {"params_sharding": None}, "params_sharding is params_partition_specs here"),
        (jax.kfac, {"curvature_ema": 0.9}, "curvature_ema is factor_decay here"),
        (jax.kfac, {"l2_reg": 0.1}, "l2_reg is weight_decay here"),
        (jax.kfac, {"multi_device": True}, "multi_device is mesh here"),
        (jax.kron, {"lr": 0.1}, "lr is learning_rate here"),
        (torch.Kron, {"learning_rate": 0.1}, "learning_rate is lr here"),
    ):
        with pytest.raises(TypeError, match=told):
            door(None, **given)
