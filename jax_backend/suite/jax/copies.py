"""Leaves that a loss repeats for each example: learned states of cells, latents, tokens.

Whatever is done with the copies is each example's own, so they may be the use of the leaf.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from suite.jax import jaxprs
from suite.jax.examples import are_for_examples, axes_of
from suite.jax.uses import Origin, Site, Uses


class Copies:
    """Told of each re-indexing of a leaf's view."""

    def __init__(
        self, program: jaxprs.Program, uses: Uses, *, leaves: int, arguments: Sequence[int], batch: int
    ) -> None:
        """
        Args:
            leaves: how many of the program's inputs are parameters.
            arguments: inputs, or constants, that may have an axis for examples in front.
            batch: how many examples there are.
        """
        self.program, self.uses, self.batch = program, uses, batch
        rows = {v: {0} for v in arguments if program.avals[v].shape[0] == batch}
        self.examples = axes_of(program, rows)  # where values have axes for them
        self.axes = set[str]().union(*(program.varying.get(v, ()) for v in program.inputs[leaves:]))
        self.found: dict[int, tuple[jaxprs.Node, Origin]] = {}

    def moved(self, node: jaxprs.Node, origin: Origin) -> Origin:
        """What a re-indexing makes of a leaf, which it may repeat for each example."""
        step, out = node.operation.step, node.outputs[0]
        after, shape = origin.moved(step), self.program.avals[out].shape
        first = next((axis for axis, n in enumerate(shape) if n > 1), None)
        if step is None or step[0] != "broadcast" or first is None or shape[first] != self.batch:
            return after
        value = node.inputs[0]
        assert value is not None
        before = dict(zip(step[1][1], self.program.avals[value].shape, strict=True))
        known = origin.repeated is not None or origin.made or origin.shifted
        if known or before.get(first, 1) != 1 or node.custom is not None or out in self.program.merged:
            return after
        # A copy that devices have in common has the sum of what their examples' gradients are.
        if self.program.is_mapped(node) or not self.axes <= self.program.varying.get(out, set()):
            return after
        if not are_for_examples(self.program, out, first, self.examples):
            return after
        after = after._replace(repeated=out)
        self.found[out] = node, after
        return after

    def settle(self, as_rows: Callable[[jaxprs.Node, Origin], Site | None]) -> None:
        """Have a leaf's copies be its use, where what is done with them is none, or more than one.

        Args:
            as_rows: the use that a repetition of a leaf is.
        """
        uses = self.uses
        done = [*uses.sites, *(use.instead for own in uses.biases.values() for use in own)]
        times = Counter(site.repeated for site in done)
        for value, (node, origin) in self.found.items():
            others = uses.of_repeated.get(value, ())
            if not others and times[value] < 2:
                continue
            rows = None if origin.leaf in uses.others else as_rows(node, origin)
            if rows is not None:
                self._use(value, rows)
                continue
            for why in others:
                uses.rule_out(origin._replace(repeated=None), why)

    def _use(self, value: int, rows: Site) -> None:
        """Have the copies of a leaf be a use, and what is done with them none."""
        self.uses.sites = [*(site for site in self.uses.sites if site.repeated != value), rows]
        others = [use for use in self.uses.biases.pop(rows.leaf, []) if use.instead.repeated != value]
        if others:
            self.uses.biases[rows.leaf] = others
