"""The states of K-FAC's transformations, and what users read off them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from suite.core import kfac as core_kfac
from suite.jax.capture import AllBases
from suite.jax.explicit_axes import explicit_specs
from suite.jax.factors import Factors
from suite.jax.factors_state import FactorsState, Shares
from suite.jax.plan import Plan
from suite.jax.spread import Spread


class ScaleByKFACState(NamedTuple):
    """State of `scale_by_kfac`."""

    steps: jax.Array  # (): steps, without skipped ones: what was due then is due next
    factors: FactorsState
    skipped_steps: jax.Array  # (): steps that changed nothing because something was not finite
    missed_updates: jax.Array  # (): updates that never came: the next was due before statistics did
    pending: jax.Array  # (): bool, whether an update was due and has had no statistics yet


class KFACOptState(NamedTuple):
    """State of `kfac`."""

    preconditioner: ScaleByKFACState
    momentum: Any  # like the parameters, but for leaves of the fallback: optax.MaskedNode
    fallback: Any  # the fallback's own state

    @property
    def skipped_steps(self) -> jax.Array:
        return self.preconditioner.skipped_steps

    @property
    def missed_updates(self) -> jax.Array:
        return self.preconditioner.missed_updates


def eigenbases(state: Any, plan: Plan) -> AllBases:
    """The eigenbases in which `value_and_grad` measures second moments for compute_method='ekfac'.

    Args:
        state: any optax state that holds one of `scale_by_kfac`, for all parameters of the plan.
        plan: the plan that one was made with.

    Raises:
        ValueError, TypeError: a state with none or several, or of another compute_method; no plan.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must come from value_and_grad(...).plan(...), got {type(plan).__name__}")
    found = [s for s in jax.tree.leaves(state, is_leaf=_is_state) if _is_state(s)]
    if len(found) != 1:
        raise ValueError(f"state must hold one state of scale_by_kfac, got {len(found)}")
    (own,) = found
    inverses = own.factors.inverses
    if not all(isinstance(inverse, core_kfac.Eigen) for inverse in inverses):
        raise ValueError("this state keeps inverses, not eigenbases: use compute_method='ekfac'")
    factors = Factors(
        plan,
        plan.layers,
        core_kfac.KFAC("ekfac"),
        factor_dtype=None,
        inv_dtype=None,
        warm_start=False,
        loss_reduction="mean",
        spread=Spread(),
    )
    if len(factors.stacks) != len(inverses):
        raise ValueError("the state must be of all layers of the plan, and some of them are masked")
    return factors.bases(own.factors)


def state_specs(state: Any, axes: Any) -> Any:
    """`PartitionSpec`s of an optax state, for `shard_map` or `jit`, where devices keep shares of it.

    Args:
        state: that holds one of `scale_by_kfac` with `gradient_worker_fraction` below 1.
        axes: the axis, or axes of the mesh, over which they do.

    Returns:
        A pytree like `state`: PartitionSpec(axes) for averages and inverses, PartitionSpec() else.
    """

    def specs(x: Any) -> Any:
        spec = PartitionSpec(axes) if isinstance(x, Shares) else PartitionSpec()
        return jax.tree.map(lambda _: spec, x)

    return jax.tree.map(specs, state, is_leaf=lambda x: isinstance(x, Shares))


def explicit_state_specs(state: Any, spread: Spread) -> Any:
    """`explicit_specs` of a state whose shares are to be divided, wherever they are now."""

    def specs(x: Any) -> Any:
        divided = isinstance(x, Shares) and spread.axis_name is None and spread.keeps
        return state_specs(x, spread.axes) if divided else explicit_specs(x)

    return jax.tree.map(specs, state, is_leaf=lambda x: isinstance(x, Shares))


def _is_state(x: Any) -> bool:
    return isinstance(x, ScaleByKFACState)
