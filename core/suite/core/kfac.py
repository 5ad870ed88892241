"""K-FAC: precondition a layer's gradient matrix with the inverse of A ⊗ G.

For a layer s = W a the Fisher block of W is approximated by A ⊗ G, A the second moment of the inputs a
and G that of the output gradients; the direction is G⁻¹ ∇W A⁻¹, damped.

References:
    Martens & Grosse 2015 (arXiv:1503.05671): the approximation, factored damping.
    Grosse & Martens 2016 (arXiv:1602.01407): convolutions.
    Pauloski et al. 2020 (arXiv:2007.00784): eigenbasis against inverse, running averages, KL clipping.
    George et al. 2018 (arXiv:1806.03884): eigenvalues corrected in the eigenbasis (see `ekfac`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from suite.core import linalg, moments
from suite.core._namespace import (
    Array,
    Scalar,
    array_namespace,
    as_scalar,
    device_of,
    lift,
    padded_axes,
)
from suite.core.checks import check_choice, check_flag, check_integer
from suite.core.damping import split_damping, tikhonov
from suite.core.noise import unit_noise

ComputeMethod = Literal["eigen", "inverse", "newton_schulz", "ekfac"]


class Eigen(NamedTuple):
    """One factor in its eigenbasis."""

    vectors: Array | None  # (..., n, n), one a column; None for a diagonal factor
    values: Array  # (..., n), >= 0


class Factor(NamedTuple):
    """One stack of factors of equal size. A diagonal factor is (..., n) for (..., n, n)."""

    average: Array  # (..., n, n), running sum of a second moment
    weight: Array  # (...,), how much evidence the sum holds: divide by it
    inverse: Eigen | Array  # Eigen, or the damped inverse like `average`
    ready: Array  # (...,) bool: a refresh has succeeded
    failures: Array  # (...,) int32: refreshes that failed and kept the inverse before them


class KFACState(NamedTuple):
    """One stack of layers with equal factor sizes."""

    A: Factor  # of side d_in: the inputs' second moment
    G: Factor  # of side d_out: the output gradients' second moment

    @property
    def ready(self) -> Array:
        """(...,) bool: both sides have an inverse; until then the direction is the gradient."""
        return self.A.ready & self.G.ready

    @property
    def failures(self) -> Array:
        """(...,) int32: failed refreshes of either side."""
        return self.A.failures + self.G.failures


@dataclass(frozen=True)
class KFAC:
    """The rule: `init`, `update` with normalized factors, `refresh` now and then, `precondition`.

    The four verbs serve stacks of layers; `init_factor`, `update_factor` and `refresh_factor` serve
    factors by themselves, for callers whose layers share one.

    Args:
        compute_method: 'eigen' keeps eigenbases and damps the Kronecker product itself, exactly, with
            the damping of the moment; 'inverse' keeps inverses damped by the factored rule, at about a
            quarter of the cost of a refresh and half that of a direction; 'newton_schulz' is 'inverse'
            by matrix products alone, for accelerators, started from the inverse before; 'ekfac' is
            'eigen' with second moments measured in the eigenbasis (`ekfac`).
        iterations: of Newton-Schulz.
    """

    compute_method: ComputeMethod = "eigen"
    iterations: int = 30

    def __post_init__(self) -> None:
        check_choice("compute_method", self.compute_method, get_args(ComputeMethod))
        check_integer("iterations", self.iterations, at_least=1)

    @property
    def keeps_eigenbases(self) -> bool:
        return self.compute_method in ("eigen", "ekfac")

    def check_periods(self, factor_update_steps: int, inv_update_steps: int) -> None:
        """ValueError if 'ekfac' would be 'eigen': a refresh replaces the second moments before it."""
        if self.compute_method == "ekfac" and factor_update_steps % inv_update_steps == 0:
            raise ValueError(
                "factor_update_steps must not be a multiple of inv_update_steps with compute_method="
                "'ekfac', whose second moments are measured between refreshes, got "
                f"{factor_update_steps} and {inv_update_steps}"
            )

    def check_warm_start(self, warm_start: bool) -> None:
        """Raise unless it is True or False, and False where there are no eigenbases to start from."""
        check_flag("warm_start", warm_start)
        if warm_start and not self.keeps_eigenbases:
            method = self.compute_method
            raise ValueError(
                f"warm_start must be False without eigenbases, got compute_method={method!r}"
            )

    # ---- stacks of layers ----------------------------------------------------------------------

    def init(
        self,
        like: Array,
        batch: tuple[int, ...],
        sizes: tuple[int, int],
        diagonal: tuple[bool, bool] = (False, False),
        inverse_like: Array | None = None,
    ) -> KFACState:
        """No evidence yet: factors are zero and the direction is the gradient.

        Args:
            like: any array with the factors' dtype and device.
            batch: leading axes, a stack of layers.
            sizes: (d_in, d_out).
            diagonal: whether (A, G) keep their diagonal only.
            inverse_like: any array with the dtype of inverses and eigenbases; default `like`.
        """
        A = self.init_factor(like, batch, sizes[0], diagonal[0], inverse_like)
        return KFACState(A, self.init_factor(like, batch, sizes[1], diagonal[1], inverse_like))

    def update(
        self, state: KFACState, A: Array, G: Array, seen: Array, factor_decay: Scalar
    ) -> KFACState:
        """Average new factors in.

        Args:
            A, G: like the state's averages, normalized (`statistics.normalize`).
            seen: (...,) bool; a layer that saw no rows keeps its state.
            factor_decay: β of the running average, in [0, 1).
        """
        return KFACState(
            self.update_factor(state.A, A, seen, factor_decay),
            self.update_factor(state.G, G, seen, factor_decay),
        )

    def refresh(self, state: KFACState, damping: Scalar) -> KFACState:
        """Recompute inverses or eigenbases from the averages.

        A factor that is not finite, or whose factorization fails, keeps its old inverse and its
        `failures` count goes up; one without evidence is left alone.

        Args:
            damping: λ >= 0. It enters inverses here and eigenbases in `precondition`.
        """
        damping_A, damping_G = self.split_damping(
            mean_eigenvalue(state.A.average, state.A.weight),
            mean_eigenvalue(state.G.average, state.G.weight),
            damping,
            (state.A.average.shape[-1], state.G.average.shape[-1]),
        )
        return KFACState(
            self.refresh_factor(state.A, damping_A), self.refresh_factor(state.G, damping_G)
        )

    def precondition(self, state: KFACState, gradient: Array, damping: Scalar) -> Array:
        """G⁻¹ ∇ A⁻¹; layers that are not `ready` return their gradient.

            eigen:    Q_G [ (Q_Gᵀ ∇ Q_A) / (d_G d_Aᵀ + λ) ] Q_Aᵀ
            inverse:  (G + √λ/π I)⁻¹ ∇ (A + π √λ I)⁻¹, damped when it was refreshed

        Args:
            gradient: (..., d_out, d_in).
            damping: λ >= 0, used by 'eigen' and 'ekfac'.
        """
        return self.apply(state.A.inverse, state.G.inverse, state.ready, gradient, damping)

    # ---- stacks of factors ---------------------------------------------------------------------

    def init_factor(
        self,
        like: Array,
        batch: tuple[int, ...],
        side: int,
        diagonal: bool = False,
        inverse_like: Array | None = None,
        *,
        identity_start: bool = False,
    ) -> Factor:
        """A stack of factors without evidence, or with the identity as if it had been seen for ever.

        Args:
            side: n.
            identity_start: start the running average from I without bias correction, as Pauloski et
                al. 2020 (arXiv:2007.00784) do.
        """
        xp = array_namespace(like)
        inverse_like = like if inverse_like is None else inverse_like
        device = device_of(like)
        shape = (*batch, side) if diagonal else (*batch, side, side)

        def identity(dtype: Any) -> Array:
            if diagonal:
                return xp.ones(shape, dtype=dtype, device=device)
            blocks = xp.zeros((*batch, 1, 1), dtype=dtype, device=device)
            return blocks + padded_axes(xp.eye(side, dtype=dtype, device=device), len(shape))

        def zeros(shape: tuple[int, ...], dtype: Any) -> Array:
            return xp.zeros(shape, dtype=dtype, device=device)

        weight = xp.ones(batch, dtype=lift(like).dtype, device=device)
        inverse: Eigen | Array = identity(inverse_like.dtype)
        if self.keeps_eigenbases:
            ones = xp.ones((*batch, side), dtype=inverse_like.dtype, device=device)
            inverse = Eigen(None if diagonal else inverse, ones)
        return Factor(
            average=identity(like.dtype) if identity_start else zeros(shape, like.dtype),
            weight=weight if identity_start else xp.zeros_like(weight),
            inverse=inverse,
            ready=zeros(batch, xp.bool),
            failures=zeros(batch, xp.int32),
        )

    def update_factor(self, factor: Factor, new: Array, seen: Array, factor_decay: Scalar) -> Factor:
        """Average new second moments in, where `seen`; where not, they must be finite."""
        xp = array_namespace(factor.weight)
        one = xp.zeros_like(factor.weight) + 1
        kept = xp.where(seen, as_scalar(factor_decay, one) * one, one)
        return factor._replace(
            average=moments.mix(factor.average, new, kept), weight=moments.mix(factor.weight, one, kept)
        )

    def split_damping(
        self, mean_A: Array, mean_G: Array, damping: Scalar, sizes: tuple[int, int]
    ) -> tuple[Array, Array]:
        """What to add to the diagonals of A and G before inversion; zero for eigenbases.

        Where one side is a number the damping goes to the other, (A + λ/g I) g = A g + λ I, exactly;
        else it is shared out by `damping.split_damping`.

        Args:
            mean_A, mean_G: (...,), mean eigenvalues.
            damping: λ >= 0.
            sizes: (d_in, d_out).
        """
        xp = array_namespace(mean_A)
        if self.keeps_eigenbases:
            return xp.zeros_like(mean_A), xp.zeros_like(mean_G)
        shared = split_damping(mean_A, mean_G, damping)
        if 1 not in sizes:
            return shared
        number = mean_G if sizes[1] == 1 else mean_A
        usable = number > 0
        whole = as_scalar(damping, number) / xp.where(usable, number, xp.zeros_like(number) + 1)
        none = xp.zeros_like(number)
        exact = (whole, none) if sizes[1] == 1 else (none, whole)
        return xp.where(usable, exact[0], shared[0]), xp.where(usable, exact[1], shared[1])

    def refresh_factor(
        self, factor: Factor, damping: Scalar, *, warm: bool = False, boost: float = 0.0
    ) -> Factor:
        """Recompute inverses or eigenbases; see `refresh`.

        Args:
            damping: a number or (...,), added to the diagonals before inversion.
            warm: eigenbases start from the ones before, which must be `ready`, and improve by one
                orthogonal iteration (`linalg.warm_eigh`): cheaper, exact in the limit.
            boost: more damping, in units of each factor's mean eigenvalue: for another try at a
                factor that failed.
        """
        xp = array_namespace(factor.average)
        inverse = self.invert(
            factor.average, factor.weight, damping, start=factor.inverse, warm=warm, boost=boost
        )
        seen, fine = factor.weight > 0, usable(inverse, factor.weight.ndim)
        replace = seen & fine
        failed = seen ^ replace
        return factor._replace(
            inverse=where(replace, inverse, factor.inverse),
            ready=factor.ready | replace,
            failures=factor.failures + xp.astype(failed, xp.int32),
        )

    def invert(
        self,
        average: Array,
        weight: Array,
        damping: Scalar,
        *,
        start: Eigen | Array | None = None,
        warm: bool = False,
        boost: float = 0.0,
    ) -> Eigen | Array:
        """Inverses or eigenbases as they are computed: see `usable`.

        Args:
            average, weight, damping, boost: see `refresh_factor`.
            start: the inverses before, for 'newton_schulz' and for `warm`.
        """
        batch = weight.ndim
        average = lift(moments.unbiased(average, weight))
        extra = boost * _mean(average, batch) if boost else 0.0
        if self.keeps_eigenbases:
            return _eigen(average, start, batch, extra, warm)
        return self._inverse(average, start, batch, damping + extra)

    def apply(
        self,
        A: Eigen | Array,
        G: Eigen | Array,
        ready: Array | None,
        gradient: Array,
        damping: Scalar,
        products: Array | None = None,
    ) -> Array:
        """`precondition` from inverses or eigenbases as such.

        Args:
            A, G: of `Factor.inverse`.
            ready: (...,) bool; None: all are to be applied.
            products: (..., d_out, d_in), eigenvalues of the Kronecker product in place of d_G d_Aᵀ.
        """
        xp = array_namespace(gradient)
        if self.keeps_eigenbases:
            assert isinstance(A, Eigen)
            assert isinstance(G, Eigen)
            x = xp.astype(gradient, lift(A.values).dtype)
            x = _rotate(G.vectors, x, A.vectors, back=False)
            if products is None:
                products = eigenvalue_products(A, G)
            x = _rotate(G.vectors, x * tikhonov(lift(products), damping), A.vectors, back=True)
        else:
            A, G = lift(A), lift(G)  # the second product would amplify what the first was rounded by
            x = xp.astype(gradient, A.dtype)
            batch = gradient.ndim - 2
            x = G[..., :, None] * x if G.ndim == batch + 1 else xp.matmul(G, x)
            x = x * A[..., None, :] if A.ndim == batch + 1 else xp.matmul(x, A)
        x = xp.astype(x, gradient.dtype)
        return x if ready is None else linalg.usually(ready[..., None, None], x, lambda: gradient)

    def apply_to_rows(
        self,
        A: Eigen | Array,
        G: Eigen | Array,
        inputs: Array,
        outputs: Array,
        *,
        bias: bool = False,
        damping: Scalar = 0.0,
        products: Array | None = None,
    ) -> tuple[Array, Array | None]:
        """`apply` to the gradient Σ g aᵀ, from its rows.

            inverse:  Σ (G⁻¹ g) (A⁻¹ a)ᵀ
            eigen:    Q_G [ Σ (Q_Gᵀ g) (Q_Aᵀ a)ᵀ / (d_G d_Aᵀ + λ) ] Q_Aᵀ

        Args:
            A, G: of dense factors, without diagonal ones.
            inputs: (..., n, d_in - bias), rows a.
            outputs: (..., n, d_out), rows g.
            bias: append the coordinate 1 to every a.
            damping, products: as in `apply`.

        Returns:
            The weight's part (..., d_out, d_in - bias), and the bias's (..., d_out) or None: two arrays,
            as parts of one are no contiguous memory.
        """
        xp = array_namespace(inputs)
        width = inputs.shape[-1]
        if self.keeps_eigenbases:
            right, left = lift(A.vectors), lift(G.vectors)
        else:
            right, left = linalg.for_products(A, G)
        a, g = xp.astype(inputs, right.dtype), xp.astype(outputs, left.dtype)
        a, g = xp.matmul(a, right[..., :width, :]), xp.matmul(g, left)
        if bias:
            a += right[..., width:, :]
        own = None
        if self.keeps_eigenbases:
            x = linalg.transposed_times(g, a)
            if products is None:
                products = eigenvalue_products(A, G)
            x = xp.matmul(left, x * tikhonov(lift(products), damping))
            if bias:
                own = linalg.times_transposed(x, right[..., width:, :])[..., 0]
            weight = linalg.times_transposed(x, right[..., :width, :])
        else:
            if bias:
                own = linalg.transposed_times(g, a[..., width:])[..., 0]
            weight = linalg.transposed_times(g, a[..., :width])
        own = None if own is None else xp.astype(own, inputs.dtype)
        return xp.astype(weight, inputs.dtype), own

    def _inverse(self, average: Array, old: Any, batch: int, damping: Scalar) -> Array:
        if average.ndim == batch + 1:
            xp = array_namespace(average)
            damping = as_scalar(damping, average)
            damped = average + (damping if isinstance(damping, float) else damping[..., None])
            # A zero entry without damping has no inverse: NaN makes this refresh a failure.
            return xp.where(damped > 0, 1 / xp.where(damped > 0, damped, damped * 0 + 1), float("nan"))
        if self.compute_method == "newton_schulz":
            return linalg.newton_schulz_inverse(average, damping, lift(old), self.iterations)
        return linalg.damped_inverse(average, damping)


def is_cheaper_by_rows(rows: int, d_in: int, d_out: int) -> bool:
    """Whether `apply_to_rows` takes clearly fewer multiplications than `apply`."""
    return rows * (d_in**2 + d_out**2 + d_in * d_out) < 0.8 * d_in * d_out * (d_in + d_out)


class Probes(NamedTuple):
    """Products of random vectors with what is on both sides of a direction, in k ways to weigh it."""

    right: Array  # (..., k, 2, d_in), r A⁻¹
    left: Array  # (..., k, 8, d_out), l G⁻¹


def probes_for(A: Eigen | Array, G: Eigen | Array, damping: Scalar = 0.0) -> Probes:
    """Vectors for `rows_fit`, always the same.

    A difference of rank one, the least visible, escapes one vector on the right with a chance of about
    the tolerance, and two with the square of it. Those on the left cost nothing, and make many numbers
    of these two: their size is not small by chance. They are rows, as products of few columns are
    several times slower on a CPU; two rows take no longer than one.

    Eigenbases are damped as a whole, 1 / (d_G d_Aᵀ + λ), which no vector on one side can be multiplied
    with. In its place are (G + t I)⁻¹ and (A + λ/t I)⁻¹ of two t, a third and two thirds of the way
    from where one side has all of the damping to where the other has it.

    Args:
        A, G: inverses (..., d_in, d_in) and (..., d_out, d_out), or eigenbases of dense factors.
        damping: λ >= 0, of eigenbases.
    """
    if isinstance(A, Eigen):
        assert isinstance(G, Eigen)
        return _probes_of_eigenbases(A, G, damping)
    A, G = lift(A), lift(G)

    def through(unit: Array, inverse: Array) -> Array:
        product = linalg.times_transposed(_repeated(unit, inverse), inverse)
        return product[..., None, :, :]

    units = _probe_vectors(A, G)
    return Probes(through(units[0], A), through(units[1], G))


def _probes_of_eigenbases(A: Eigen, G: Eigen, damping: Scalar) -> Probes:
    xp = array_namespace(A.values)
    values, vectors = [lift(x.values) for x in (A, G)], [lift(x.vectors) for x in (A, G)]
    largest = [xp.max(x, axis=-1) for x in values]
    a, g = (xp.where(x > 0, x, 1.0) for x in largest)
    share = as_scalar(damping, a) / a / g  # of the largest eigenvalue of the product
    share = xp.minimum(xp.maximum(share, float(xp.finfo(a.dtype).eps)), 1.0)
    sides = []
    for unit, size, own, basis, way in zip(
        _probe_vectors(*vectors), (a, g), values, vectors, ((2 / 3, 1 / 3), (1 / 3, 2 / 3)), strict=True
    ):
        units, found = _repeated(unit, basis), []
        for w in way:
            damped = own + (size * share**w)[..., None]
            found.append(linalg.times_transposed(units / damped[..., None, :], basis))
        sides.append(xp.stack(found, axis=-3))
    return Probes(*sides)


def _probe_vectors(A: Array, G: Array) -> list[Array]:
    """(2, d_in) and (8, d_out), of variance 1."""
    xp = array_namespace(A)
    streams = xp.arange(10, dtype=xp.int32, device=device_of(A))
    given = ((streams[:2], A), (streams[2:], G))
    return [unit_noise(own, 0, (like.shape[-1],), like.dtype) for own, like in given]


def _repeated(unit: Array, like: Array) -> Array:
    """For each of a stack of matrices."""
    return array_namespace(unit).broadcast_to(unit, (*like.shape[:-2], *unit.shape))


def rows_fit(
    gradient: tuple[Array, Array | None], inputs: Array, outputs: Array, probes: Probes
) -> Array:
    """(...): whether G⁻¹ ∇ A⁻¹ is Σ (G⁻¹ g) (A⁻¹ a)ᵀ up to rounding: l · r of both are alike.

    Asked of the direction and not of the gradient: what is small in ∇ may be all of G⁻¹ ∇ A⁻¹. Matrices
    that differ by a share ε of their norm differ by about that on random vectors. Source: Freivalds 1979
    (Fast probabilistic algorithms), section 2.

    Args:
        gradient: ∇, the weight's part (..., d_out, d_in) without the column of a bias, and that column
            (..., d_out) or None: then every a has the coordinate 1 besides.
        inputs, outputs: rows a (..., n, d_in without bias) and g (..., n, d_out).
        probes: `probes_for` the inverses or eigenbases.
    """
    xp = array_namespace(probes.right)
    dtype = probes.right.dtype
    weight, a, g = (xp.astype(x, dtype) for x in (gradient[0], inputs, outputs))
    bias, width, ways = gradient[1], a.shape[-1], probes.right.shape[-3]
    right, left = (xp.reshape(x, (*x.shape[:-3], -1, x.shape[-1])) for x in probes)  # as one product
    right, rest = right[..., :width], right[..., width:]
    of_gradient, of_rows = (linalg.times_transposed(right, x) for x in (weight, a))
    if bias is not None:
        of_gradient = of_gradient + rest * xp.astype(bias, dtype)[..., None, :]
        of_rows = of_rows + rest
    of_gradient, of_rows, left_rows = (
        xp.reshape(x, (*x.shape[:-2], ways, x.shape[-2] // ways, x.shape[-1]))  # of no rows, too
        for x in (of_gradient, of_rows, linalg.times_transposed(left, g))
    )
    expected = linalg.times_transposed(probes.left, of_gradient)
    difference = linalg.times_transposed(left_rows, of_rows) - expected
    tolerance = float(xp.finfo(dtype).eps) ** 0.5
    return xp.all(_root_of_squares(difference) <= tolerance * _root_of_squares(expected), axis=-1)


def _root_of_squares(x: Array) -> Array:
    return array_namespace(x).linalg.vector_norm(x, axis=(-2, -1))


def mean_eigenvalue(average: Array, weight: Array) -> Array:
    """tr F / n of the unbiased averages: (...,), 0 without evidence.

    Args:
        average, weight: as in `Factor`.
    """
    return moments.unbiased(_mean(lift(average), weight.ndim), weight)


def eigenvalue_products(A: Eigen, G: Eigen) -> Array:
    """d_G d_Aᵀ, the eigenvalues of A ⊗ G: (..., d_out, d_in)."""
    return lift(G.values)[..., :, None] * lift(A.values)[..., None, :]


def _mean(average: Array, batch: int) -> Array:
    if average.ndim == batch + 1:
        return array_namespace(average).mean(average, axis=-1)
    return linalg.trace(average) / average.shape[-1]


def _rotate(left: Array | None, x: Array, right: Array | None, *, back: bool) -> Array:
    """Into the eigenbases (leftᵀ x right) or `back` (left x rightᵀ); None stands for I."""
    xp = array_namespace(x)
    if left is not None:
        left = lift(left)
        x = xp.matmul(left, x) if back else linalg.transposed_times(left, x)
    if right is not None:
        right = lift(right)
        x = linalg.times_transposed(x, right) if back else xp.matmul(x, right)
    return x


def _eigen(average: Array, old: Any, batch: int, extra: Scalar, warm: bool) -> Eigen:
    xp = array_namespace(average)
    if average.ndim == batch + 1:
        return Eigen(None, xp.maximum(average, xp.zeros_like(average)))
    if not isinstance(extra, float):
        average = linalg.add_diagonal(average, extra)
    if warm:
        values, vectors = linalg.warm_eigh(average, xp.astype(old.vectors, average.dtype))
    else:
        values, vectors = linalg.eigh(average)
    return Eigen(vectors, values)


def usable(inverse: Eigen | Array, batch: int) -> Array:
    """(...,) bool: which of `KFAC.invert`'s results are inverses: all of their diagonal is finite.

    One that is no inverse is NaN throughout, or infinite on its diagonal where it overflowed.
    """
    if isinstance(inverse, Eigen):
        marks = inverse.values if inverse.vectors is None else inverse.values[..., :1]
    elif inverse.ndim == batch + 1:
        marks = inverse
    else:
        marks = linalg.trace(inverse)
    xp = array_namespace(marks)
    finite = xp.isfinite(marks)
    return finite if marks.ndim == batch else xp.all(finite, axis=-1)


def all_usable(inverses: Sequence[Eigen | Array]) -> Array:
    """`usable` of stacks (k, ...) of several sizes, one behind the other: (Σ k,)."""
    xp = array_namespace(*(x.values if isinstance(x, Eigen) else x for x in inverses))
    if any(isinstance(x, Eigen) or x.ndim == 2 for x in inverses):
        return xp.concat([usable(x, 1) for x in inverses], axis=0)
    return xp.isfinite(linalg.traces(inverses))


def where(condition: Array, new: Any, old: Any) -> Any:
    """Of inverses or eigenbases over one batch: `new` where `condition` (...), else `old`."""
    if isinstance(new, Eigen):
        vectors = None if new.vectors is None else where(condition, new.vectors, old.vectors)
        return Eigen(vectors, where(condition, new.values, old.values))
    xp = array_namespace(condition)
    condition = xp.reshape(condition, (*condition.shape, *(1,) * (new.ndim - condition.ndim)))
    return linalg.usually(condition, xp.astype(new, old.dtype), lambda: old)
