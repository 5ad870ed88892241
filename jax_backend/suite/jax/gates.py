"""Products of one leaf that a sum joins: a gate p a + (1 - p) b is one use of p, with the input a - b.

The gradient of the sum is that of either product. By themselves they would count as if the two parts of
a row's gradient by p had nothing to do with each other, which is far more where a and b are alike.
"""

from __future__ import annotations

from suite.jax import jaxprs, operations
from suite.jax.layers import Part
from suite.jax.probes import Multiplier
from suite.jax.uses import Site


def one_use(node: jaxprs.Node, sites: tuple[Site, Site]) -> Site | None:
    """The sum of two products, entry by entry, as a use; None: they are not of the same entries."""
    one, other = sites
    assert isinstance(node.operation, operations.Add)
    if (one.leaf, one.view, one.use.product) != (other.leaf, other.view, other.use.product):
        return None
    if one.repeated != other.repeated:
        return None
    multipliers, *others = (_multipliers(site) for site in sites)
    if others != [multipliers]:
        return None
    parts: list[Part] = []
    for site, sign in zip(sites, node.operation.signs, strict=True):
        use = site.use
        there = use.path[:-1] == node.path[:-1] and site.loops == node.loops
        if not there or use.factor is not None:
            return None
        if use.parts:
            own = use.parts
        elif use.x_operand is not None:
            own = (Part(use.path, use.x_operand, 1, use.sloped),)
        else:
            return None
        total = sign * (-1) ** (len(use.multipliers) - len(multipliers))  # of 1 - p
        parts += [part._replace(sign=part.sign * total) for part in own]
    use = one.use._replace(path=node.path, out=0, x_operand=None, multipliers=multipliers)
    use = use._replace(sloped=None, parts=tuple(parts))
    use = use._replace(once=one.use.once and other.use.once)
    return one._replace(use=use, value=node.outputs[0])


def _multipliers(site: Site) -> tuple[Multiplier, ...]:
    """The numbers that the leaf is multiplied with before, but for the signs."""
    return tuple(one for one in site.use.multipliers if one.operand is not None)
