"""The place of the batch in every array of a traced function, and the equations that mix its rows.

This is an abstract interpretation. An array holds rows of the batch along one axis (`Rows`), or none (`Shared`), or it
is not known which element belongs to which row (`UNKNOWN`). Nothing that follows an unknown array is reported, so every
finding is where the rows part ways first.
"""

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core

from detjax.invariant import equations
from detjax.invariant.equations import Kind, aval
from detjax.invariant.index_rules import IndexRules, is_vector
from detjax.invariant.places import UNKNOWN as UNKNOWN
from detjax.invariant.places import (
    Counts,
    Draft,
    Grid,
    Index,
    Letter,
    Order,
    Picked,
    Single,
    Vector,
    grid_axis,
    single,
    whole,
)
from detjax.invariant.places import Place as Place
from detjax.invariant.places import Rows as Rows
from detjax.invariant.places import Shared as Shared
from detjax.invariant.sizes import Sizes


class Mixing(enum.Enum):
    """How an equation mixes rows."""

    SUM = "adds numbers of different rows"
    SLOT = "gives a row numbers that depend on its place in the batch"
    SIZE = "computes with the number of rows"
    DEVICES = "meets the rows of other devices"
    MOVE = "moves, orders or counts rows of different examples"
    OTHER = "has no rule here"


@dataclasses.dataclass(frozen=True)
class Finding:
    """An equation that mixes rows.

    Attributes:
        mixing: in which way.
        primitive: the equation's primitive.
        what: what it does, in words.
        line: the user's line.
        shapes: the shapes of its operands.
        dtypes: their dtypes.
    """

    mixing: Mixing
    primitive: str
    what: str
    line: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    def __str__(self) -> str:
        shapes = ", ".join(map(str, self.shapes))
        return f"{self.primitive} of {shapes} {self.what}, at {self.line}"


def follow(
    jaxpr: core.Jaxpr,
    batch: int,
    places: Sequence[Place | None],
    sharded: frozenset[str] | None = frozenset(),
    sizes: Sizes | None = None,
    *,
    rows_may_return: bool = True,
) -> tuple[list[Place], list[Finding]]:
    """Returns where the batch is in the results of a jaxpr, and the equations that mix its rows.

    Args:
        jaxpr: a function of a whole batch.
        batch: how many rows the batch has, at least 2.
        places: for each argument its place, or None for an array without rows.
        sharded: the axes of a mesh around the function along which devices have other rows; None if that is not known.
        sizes: which numbers of the function come from the number of rows, if that is known.
        rows_may_return: whether rows may leave their places if they return to them.
    """
    follower = Follower(batch, sharded, sizes, rows_may_return=rows_may_return)
    made = [follower.result(place) for place in follower.jaxpr(jaxpr, places)]
    return made, list(dict.fromkeys(follower.findings))


_REDUCTIONS: Final = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin".split()
)
_ALONG: Final[Mapping[str, str]] = {
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "top_k"), "axis"),
    "sort": "dimension",
    "rev": "dimensions",
}
_LARGEST_CONSTANT: Final = 1 << 20
"""Elements of a constant that is looked at: those that a function fills for a batch are small."""
_MOST_ROUNDS: Final = 5
"""In which the places of a loop's carries are found: a carry goes from shared to rows to unknown."""


def operation_places(eqn: core.JaxprEqn, places: Sequence[Place], batch: int) -> list[Place]:
    """Returns the places of the results of an operation of detjax, which keeps the rows of its operands apart.

    Rows are found by the sizes of axes, so the batch's size is to divide no other axis.
    """
    if any(place is UNKNOWN for place in places) and not any(isinstance(place, Rows) for place in places):
        return [UNKNOWN] * len(eqn.outvars)
    rows = [(v, place) for v, place in zip(eqn.invars, places, strict=True) if isinstance(place, Rows)]
    if not rows:
        return [whole(v) for v in eqn.outvars]

    def place_of(result: Any) -> Place:
        shape = aval(result).shape
        for operand, place in rows:
            if place.axis < len(shape) and shape[place.axis] == aval(operand).shape[place.axis]:
                return place
        axes = [axis for axis, size in enumerate(shape) if size and size % batch == 0]
        return Rows(axes[0], 1, shape[axes[0]] // batch) if len(axes) == 1 else UNKNOWN

    return [place_of(v) for v in eqn.outvars]


_JOINING: Final = ("concatenate", "stack")
_OF_MATRICES: Final[Mapping[str, int]] = {
    **dict.fromkeys(
        (
            "cholesky eigh eig svd qr geqrf geqp3 householder_product lu triangular_solve schur hessenberg tridiagonal "
            "ormqr symmetric_product cholesky_update"
        ).split(),
        2,
    ),
    **dict.fromkeys(("tridiagonal_solve", "lu_pivots_to_permutation"), 1),
}
"""Primitives of linear algebra, and how many of the last axes they work along."""
_CALLED: Final = frozenset(
    "pure_callback io_callback pallas_call ffi_call custom_linear_solve linear_solve threefry2x32 random_gamma".split()
)
"""What is called for each row alone, at the shapes of one row: that it keeps rows apart is its own promise."""


def _points_to_rows(eqn: core.JaxprEqn, places: Sequence[Place]) -> bool:
    """Whether numbers that an equation has say in it which row is meant: rules of indices look at them."""
    name, rows = eqn.primitive.name, places[0]
    if name == "dynamic_update_slice" or name.startswith("scatter"):
        return any(isinstance(place, (Single, Index, Vector)) for place in places) or _is_at_rows(eqn, places)
    if not isinstance(rows, Rows):
        return False
    if name == "gather":
        return rows.axis in eqn.params["dimension_numbers"].start_index_map
    return name == "dynamic_slice" and aval(eqn.outvars[0]).shape[rows.axis] != aval(eqn.invars[0]).shape[rows.axis]


def _is_at_rows(eqn: core.JaxprEqn, places: Sequence[Place]) -> bool:
    numbers = eqn.params.get("dimension_numbers")
    rows = next((place for place in (places[0], places[-1]) if isinstance(place, Rows)), None)
    return numbers is not None and rows is not None and rows.axis in numbers.scatter_dims_to_operand_dims


def _is_moved(place: Place) -> bool:
    return isinstance(place, Rows) and bool(place.order)


class Follower(IndexRules):
    """The places of one function's arrays, equation by equation."""

    def __init__(
        self,
        batch: int,
        sharded: frozenset[str] | None = frozenset(),
        sizes: Sizes | None = None,
        *,
        rows_may_return: bool = False,
    ) -> None:
        super().__init__()
        self.batch = batch
        self.sizes = Sizes() if sizes is None else sizes
        self.rows_may_return = rows_may_return
        self.sharded = sharded
        self.inner_axes: frozenset[str] = frozenset()  # of meshes that the function itself divides arrays over
        self.findings: list[Finding] = []
        self.picked_at: dict[Picked, Finding] = {}
        self.counted_at: dict[Any, Finding] = {}
        self.calls: list[core.JaxprEqn] = []  # those around the equation that is looked at, the outermost first

    def jaxpr(
        self, jaxpr: core.Jaxpr, places: Sequence[Place | None], values: Sequence[Any] | None = None
    ) -> list[Place]:
        """Returns the places of a jaxpr's results; `values` are those of its arguments, if they are known."""
        env: dict[core.Var, Place] = {}
        constants = map(constant_place, jaxpr.consts)
        for var, place in zip(jaxpr.all_invars, [*constants, *places], strict=True):
            env[var] = whole(var) if place is None else place
        for var in self.sizes.constants(jaxpr):
            env[var] = Shared(sized=True)
        self.set_values(jaxpr.constvars, None)
        self.set_values(jaxpr.invars, values)
        self._note_integers(env)

        def read(eqn: core.JaxprEqn | None, at: int, atom: Any) -> Place:
            if not isinstance(atom, core.Literal):
                return env[atom]
            sized = eqn is not None and self.sizes.is_literal(eqn, at)
            return dataclasses.replace(whole(atom), number=self._number(atom), sized=sized)

        for eqn in jaxpr.eqns:
            given = [read(eqn, at, v) for at, v in enumerate(eqn.invars)]
            is_call = equations.is_call(eqn)
            if not is_call:
                self.number_results(eqn)
            made = dict(zip(eqn.outvars, self.equation(eqn, given), strict=True))
            if is_call:
                self.number_results(eqn)
            env.update(made)
            self._note_integers(made)
        return [read(None, 0, v) for v in jaxpr.outvars]

    def _note_integers(self, places: Mapping[core.Var, Place]) -> None:
        for var, place in places.items():
            self._numbers.pop(var, None)
            self._grids.pop(var, None)
            if isinstance(place, Shared) and place.number is not None:
                self._numbers[var] = place.number
            if isinstance(place, Shared) and place.grid is not None:
                self._grids[var] = place.grid

    def result(self, place: Place) -> Place:
        """Returns the place of a result, and reports rows that do not return to their places."""
        if isinstance(place, Draft):
            self.findings.append(place.finding)
        elif isinstance(place, (Index, Rows)) and place.order:
            self._not_returned(place.order)
        elif isinstance(place, Counts) and place.keys is not None:
            self.findings.append(self.counted_at[place.keys])
        elif not isinstance(place, (Index, Counts, Vector, Single)) or place == Single(0):
            return place
        return UNKNOWN

    def _not_returned(self, order: Order) -> None:
        for letter in order:
            finding = self.sorted_at[letter.sort] if isinstance(letter, Letter) else self.picked_at.get(letter)
            if finding is not None:
                self.findings.append(finding)

    def mixes(self, eqn: core.JaxprEqn, mixing: Mixing, what: str) -> Any:
        """Reports an equation that mixes rows, and returns the place of its results."""
        self.findings.append(self.finding(eqn, mixing, what))
        return UNKNOWN

    def finding(self, eqn: core.JaxprEqn, mixing: Mixing, what: str) -> Finding:
        """Returns what there is to say of an equation that mixes rows."""
        dtypes = tuple(str(getattr(aval(v), "dtype", "token")) for v in eqn.invars)
        return Finding(mixing, eqn.primitive.name, what, self.line(eqn), equations.shapes(eqn), dtypes)

    def described(self, eqn: core.JaxprEqn) -> Finding:
        """See `IndexRules`."""
        return self.finding(eqn, Mixing.MOVE, "orders or counts rows of the batch, which do not return to their places")

    def line(self, eqn: core.JaxprEqn) -> str:
        """Returns the user's line of the equation that is looked at."""
        # Functions of JAX hold equations without lines of the user's: the call of such a function has one.
        return next(filter(None, map(equations.line, (eqn, *reversed(self.calls)))), "an unknown line")

    def equation(self, eqn: core.JaxprEqn, places: list[Place]) -> list[Place]:
        """Returns the places of an equation's results, given those of its operands."""
        name = eqn.primitive.name
        if equations.kind(eqn) is Kind.CALL:
            self.calls.append(eqn)
            made = self._call(eqn, places)
            self.calls.pop()
            return made
        if name == "optimization_barrier":
            return places
        if (place := self.positive_index(eqn, places)) is not None and place is not UNKNOWN:
            return [place]
        if drafts := [place for place in places if isinstance(place, Draft)]:
            self.findings.append(drafts[0].finding)
            return [UNKNOWN] * len(eqn.outvars)
        if equations.operation(eqn) is not None and any(isinstance(place, Rows) for place in places):
            return self._operation(eqn, places)
        if any(place is UNKNOWN for place in places):
            if not self.findings and not _keeps_order(eqn, places):
                self.mixes(eqn, Mixing.OTHER, "works on rows in the order of an operation")
            return [UNKNOWN] * len(eqn.outvars)
        others = [place for place in places if not isinstance(place, Shared)]
        if not others:
            return self._shared_results(eqn, [place for place in places if isinstance(place, Shared)])
        if (made := self._special(eqn, places, others)) is not None:
            return made
        if name in equations.ELEMENTWISE:
            rule = self._elements
        elif name in _REDUCTIONS:
            rule = self._reduction
        elif name in _ALONG:
            rule = self._along
        else:
            rule = getattr(self, f"_{name.replace('-', '_')}", None)
        if rule is None:
            return self._opaque(eqn, places)
        place = rule(eqn, places)
        return place if isinstance(place, list) else [place] * len(eqn.outvars)

    def _operation(self, eqn: core.JaxprEqn, places: list[Place]) -> list[Place]:
        """The places of the results of an operation of detjax, which keeps rows apart, or orders them as it needs."""
        if any(isinstance(place, (Index, Counts, Vector, Single)) or _is_moved(place) for place in places):
            return [self.mixes(eqn, Mixing.MOVE, "calls an operation for rows that were moved")] * len(eqn.outvars)
        return operation_places(eqn, places, self.batch)

    def _special(self, eqn: core.JaxprEqn, places: list[Place], others: Sequence[Place]) -> list[Place] | None:
        """The places of results of single rows, of indices and counts, and of numbers that come from the batch."""
        name, count = eqn.primitive.name, len(eqn.outvars)
        if any(isinstance(place, Shared) and place.sized for place in places) and not _points_to_rows(eqn, places):
            what = Mixing.SIZE.value
            if name == "add" and not equations.is_inexact(eqn.outvars[0]):
                return [Draft(self.finding(eqn, Mixing.SIZE, what))]
            if not (name in ("max", "min", "clamp") and isinstance(others[0], Index)):
                return [self.mixes(eqn, Mixing.SIZE, what)] * count
        if isinstance(others[0], Single) and all(place == others[0] for place in others):
            is_write = name in (*_JOINING, "dynamic_update_slice") or name.startswith("scatter")
            if not is_write:
                return [*others[:1]] * count
        elif any(isinstance(place, Single) for place in others) and not (
            name in (*_JOINING, "dynamic_update_slice") or name.startswith("scatter")
        ):
            return [self.mixes(eqn, Mixing.SLOT, "lets a row meet another one")] * count
        if any(isinstance(place, (Index, Counts, Vector)) for place in others):
            made = self.with_indices(eqn, places)
            return [self.mixes(eqn, Mixing.MOVE, Mixing.MOVE.value)] * count if made is None else made
        return None

    def _call(self, eqn: core.JaxprEqn, places: list[Place]) -> list[Place]:
        name = eqn.primitive.name
        if equations.is_call(eqn):
            called = eqn.params.get("name")
            if (
                self.rows_may_return
                and called in ("floor_divide", "remainder")
                and isinstance(places[0], (Index, Shared))
            ):
                made = self.divided(called, places)
                if made is not None and (isinstance(places[0], Index) or places[0].grid is not None):
                    self.set_values([v for v in equations.body(eqn).outvars if isinstance(v, core.Var)], None)
                    return made
            return self.jaxpr(equations.body(eqn), places, list(map(self.value, eqn.invars)))
        rules = {"scan": self._scan, "while": self._while, "cond": self._cond, "shard_map": self._shard_map}
        return rules[name](eqn, places)

    def _opaque(self, eqn: core.JaxprEqn, places: list[Place]) -> list[Place]:
        """The places of results of what keeps to the leading axes of its operands, or is called for each row."""
        name, rows = eqn.primitive.name, next(place for place in places if isinstance(place, Rows))
        ndim = {"fft": len(eqn.params.get("fft_lengths", ()))}.get(name, _OF_MATRICES.get(name))
        if ndim is not None:
            met = [(place, aval(v)) for place, v in zip(places, eqn.invars, strict=True) if isinstance(place, Rows)]
            if all(place == rows and place.axis < x.ndim - ndim for place, x in met):
                self._meeting(eqn, rows, places)
                return [rows] * len(eqn.outvars)
        elif name in _CALLED or len({getattr(aval(v), "shape", ()) for v in (*eqn.invars, *eqn.outvars)}) == 1:
            guessed = operation_places(eqn, places, self.batch)
            if not rows.order and UNKNOWN not in guessed:
                return guessed
        return [self.mixes(eqn, Mixing.OTHER, Mixing.OTHER.value)] * len(eqn.outvars)

    # Control flow ---------------------------------------------------------------------------------------------------

    def _rounds(self, carries: list[Place], step: Callable[[list[Place]], list[Place]], eqn: Any) -> list[Place]:
        """The places of carries that a loop's body leaves as they are."""
        carries = [place.plain if isinstance(place, Shared) else place for place in carries]
        for _ in range(_MOST_ROUNDS):
            after = [self._joined((x, y), eqn) for x, y in zip(carries, step(carries), strict=True)]
            after = [place.plain if isinstance(place, Shared) else place for place in after]
            if after == carries:
                break
            carries = after
        return carries

    def scan(self, eqn: core.JaxprEqn, places: list[Place]) -> tuple[list[Place], list[Place]]:
        """Returns the places of a scan's results, and of the arguments of its body."""
        consts, carries, xs = equations.scan_arguments(eqn, places)
        over_rows = [isinstance(place, Rows) and place.axis == 0 for place in xs]
        is_apart = not carries and not any(isinstance(place, Rows) for place in consts)
        if any(over_rows) and is_apart and all(place == Rows(0) for place in xs if isinstance(place, Rows)):
            # A step sees one row, without an axis of rows, and leaves nothing to the next.
            if any(isinstance(place, Shared) and 0 not in place.uniform for place in xs):
                unknown = self.mixes(eqn, Mixing.SLOT, Mixing.SLOT.value)
                return [unknown] * len(eqn.outvars), [unknown] * len(places)
            steps = [Shared() if over else _shifted(place, -1) for place, over in zip(xs, over_rows, strict=True)]
            ys = self.jaxpr(eqn.params["jaxpr"], [*consts, *steps])
            return [place if place is UNKNOWN else Rows(0) for place in ys], [UNKNOWN] * len(places)
        if any(over_rows):
            unknown = self.mixes(eqn, Mixing.MOVE, "scans over the batch")
            return [unknown] * len(eqn.outvars), [unknown] * len(places)
        xs = [_shifted(place, -1) for place in xs]
        ys: list[Place] = []

        def step(carries: list[Place]) -> list[Place]:
            results = self.jaxpr(eqn.params["jaxpr"], [*consts, *carries, *xs])
            ys[:] = results[len(carries) :]
            return results[: len(carries)]

        carries = self._rounds(carries, step, eqn)
        return [*carries, *(_shifted(place, 1) for place in ys)], [*consts, *carries, *xs]

    def _scan(self, eqn: core.JaxprEqn, places: list[Place]) -> list[Place]:
        return self.scan(eqn, places)[0]

    def _while(self, eqn: core.JaxprEqn, places: list[Place]) -> list[Place]:
        tested, consts, carries = equations.while_arguments(eqn, places)
        step = lambda carries: self.jaxpr(eqn.params["body_jaxpr"], [*consts, *carries])  # noqa: E731
        carries = self._rounds(carries, step, eqn)
        if not isinstance(self.jaxpr(eqn.params["cond_jaxpr"], [*tested, *carries])[0], (Shared, Single)):
            return [self.mixes(eqn, Mixing.OTHER, "goes on as long as any row wants")] * len(eqn.outvars)
        return carries

    def _cond(self, eqn: core.JaxprEqn, places: list[Place]) -> list[Place]:
        if not isinstance(places[0], (Shared, Single)):
            return [self.mixes(eqn, Mixing.OTHER, "takes a branch that rows choose")] * len(eqn.outvars)
        branches = [self.jaxpr(branch, places[1:]) for branch in eqn.params["branches"]]
        return [self._joined(results, eqn) for results in zip(*branches, strict=True)]

    def _shard_map(self, eqn: core.JaxprEqn, places: list[Place]) -> list[Place]:
        sizes = eqn.params["mesh"].shape
        for place, spec in zip(places, eqn.params["in_specs"], strict=True):
            names = spec[place.axis] if isinstance(place, Rows) and place.axis < len(spec) else None
            names = names if isinstance(names, tuple) else (names,)
            if any(name is not None and sizes[name] > 1 for name in names):
                return [self.mixes(eqn, Mixing.OTHER, "cuts the batch among devices")] * len(eqn.outvars)
        before, self.inner_axes = self.inner_axes, self.inner_axes | eqn.params["newly_manual_axes"]
        made = self.jaxpr(eqn.params["jaxpr"], places)
        self.inner_axes = before
        return made

    def _joined(self, places: Sequence[Place], eqn: core.JaxprEqn) -> Place:
        """The place of an array that may be any of several."""
        first, *others = places
        for other in others:
            if first == other:
                continue
            if isinstance(first, Shared) and isinstance(other, Shared):
                first = Shared(first.uniform & other.uniform, sized=first.sized or other.sized)
            elif isinstance(first, Draft) or isinstance(other, Draft):
                draft = first if isinstance(first, Draft) else other
                assert isinstance(draft, Draft)
                self.findings.append(draft.finding)
                first = UNKNOWN
            elif isinstance(first, (Single, Shared)) and isinstance(other, (Single, Shared)):
                rows = {place for place in (first, other) if isinstance(place, Single)}
                first = rows.pop() if len(rows) == 1 else self.mixes(eqn, Mixing.SLOT, "lets a row meet another one")
            elif isinstance(first, (Single, Index, Counts, Vector)) or isinstance(
                other, (Single, Index, Counts, Vector)
            ):
                first = self.mixes(eqn, Mixing.MOVE, Mixing.MOVE.value)
            elif first is UNKNOWN or other is UNKNOWN:
                first = UNKNOWN
            elif isinstance(first, Shared) or isinstance(other, Shared):
                rows, shared = (other, first) if isinstance(first, Shared) else (first, other)
                assert isinstance(rows, Rows) and isinstance(shared, Shared)
                is_uniform = rows.axis in shared.uniform and not shared.sized
                first = rows if is_uniform else self.mixes(eqn, Mixing.SLOT, Mixing.SLOT.value)
            elif first != other:
                first = self.mixes(eqn, Mixing.MOVE, "has rows now on one axis, now on another")
        return first

    def _shared_results(self, eqn: core.JaxprEqn, places: list[Shared]) -> list[Place]:
        """The places of results that hold no rows: along which axes they are uniform, and what their integers are."""
        name = eqn.primitive.name
        sized = any(place.sized for place in places) or self.sizes.is_parameter(eqn)
        if name in _REDUCTIONS or name in _ALONG or name == "dot_general":
            axes = (
                set(_axes(eqn, "axes" if "axes" in eqn.params else _ALONG.get(name, "axis")))
                if name != "dot_general"
                else set(eqn.params["dimension_numbers"][0][0])
            )
            sized = sized or bool(axes & self.sizes.axes(eqn))
        if (
            name == "concatenate"
            and self.rows_may_return
            and is_vector(eqn)
            and any(self._counts_rows(place) for place in places)
        ):
            return [Vector(tuple(places))]
        results: list[Place] = []
        for var in eqn.outvars:
            place = Shared(_uniform(eqn, places, var) | single(var), sized=sized)
            if not equations.is_inexact(var):
                grid, number = _integers(eqn, places)
                place = dataclasses.replace(place, grid=grid, number=number)
            results.append(place)
        return results

    def _counts_rows(self, place: Shared) -> bool:
        return place.grid is not None and place.grid.size % self.batch == 0

    # Single elements, and what works along axes -----------------------------------------------------------------------

    def _elements(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        if self.sizes.is_parameter(eqn):
            return self.mixes(eqn, Mixing.SIZE, Mixing.SIZE.value)
        rows = next(place for place in places if isinstance(place, Rows))
        for place, var in zip(places, eqn.invars, strict=True):
            if isinstance(place, Rows) and place != rows:
                is_moved = place.order != rows.order
                what = (
                    "lets rows meet in different orders" if is_moved else "meets itself with the batch on another axis"
                )
                return self.mixes(eqn, Mixing.MOVE if is_moved else Mixing.SLOT, what)
            if isinstance(place, Shared) and not _is_uniform(place, var, rows.axis):
                return self.mixes(eqn, Mixing.SLOT, Mixing.SLOT.value)
        return rows

    def _reduction(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        (rows,) = places
        assert isinstance(rows, Rows)
        axes = _axes(eqn, "axes" if "axes" in eqn.params else "axis")
        if rows.axis in axes:
            counts = self.counted_one_hot(eqn) if self.rows_may_return else None
            if isinstance(counts, Counts):
                self.counted_at[counts.keys] = self.described(eqn)
                return counts
            mixing = Mixing.SUM if equations.kind(eqn) is Kind.SUM else Mixing.MOVE
            return self.mixes(eqn, mixing, "reduces over the batch")
        return rows.on(rows.axis - sum(axis < rows.axis for axis in axes))

    def _along(self, eqn: core.JaxprEqn, places: list[Place]) -> Any:
        rows = next(place for place in places if isinstance(place, Rows))
        if rows.axis in _axes(eqn, _ALONG[eqn.primitive.name]):
            if (
                eqn.primitive.name == "sort"
                and self.rows_may_return
                and (made := self.sorted_rows(eqn, places)) is not None
            ):
                return made
            if eqn.primitive.name == "rev" and rows == Rows(rows.axis):
                return self._picked(eqn, rows, range(self.batch)[::-1])
            mixing = Mixing.SUM if equations.kind(eqn) is Kind.SUM else Mixing.MOVE
            return self.mixes(eqn, mixing, "orders or accumulates over the batch")
        return self._meeting(eqn, rows, places)

    # Moves ------------------------------------------------------------------------------------------------------------

    def _broadcast_in_dim(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        rows = places[0]
        assert isinstance(rows, Rows)
        axis = int(eqn.params["broadcast_dimensions"][rows.axis])
        if aval(eqn.invars[0]).shape[rows.axis] != aval(eqn.outvars[0]).shape[axis]:
            return self.mixes(eqn, Mixing.MOVE, "spreads the batch")
        return rows.on(axis)

    def _transpose(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        rows = places[0]
        assert isinstance(rows, Rows)
        return rows.on(eqn.params["permutation"].index(rows.axis))

    def _reshape(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        """A reshape leaves an element's flat index alone, and that says its row: `index // stride % B`."""
        rows = places[0]
        assert isinstance(rows, Rows)
        old, new = aval(eqn.invars[0]).shape, aval(eqn.outvars[0]).shape
        if rows.order:
            behind = math.prod(old[rows.axis + 1 :])
            kept = (k for k, n in enumerate(new) if n == old[rows.axis] and math.prod(new[k + 1 :]) == behind)
            axis = next(kept, None)
            return self.mixes(eqn, Mixing.MOVE, "cuts rows that were moved") if axis is None else rows.on(axis)
        stride, after = rows.inner * math.prod(old[rows.axis + 1 :]), 1
        for axis in reversed(range(len(new))):
            if after <= stride and stride * self.batch <= after * new[axis] and stride % after == 0:
                inner = stride // after
                if new[axis] % (inner * self.batch) == 0:
                    return Rows(axis, new[axis] // (inner * self.batch), inner)
            after *= new[axis]
        return self.mixes(eqn, Mixing.MOVE, "cuts the batch axis in two")

    def _squeeze(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        rows = places[0]
        assert isinstance(rows, Rows)
        return rows.on(rows.axis - sum(axis < rows.axis for axis in eqn.params["dimensions"]))

    def _expand_dims(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        rows = places[0]
        assert isinstance(rows, Rows)
        axis = rows.axis
        for added in sorted(eqn.params["dimensions"]):
            axis += added <= axis
        return rows.on(axis)

    def _slice(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        rows = places[0]
        if not isinstance(rows, Rows):
            return self.mixes(eqn, Mixing.MOVE, "begins where rows say")
        if aval(eqn.outvars[0]).shape[rows.axis] == aval(eqn.invars[0]).shape[rows.axis]:
            return rows
        start, limit = (eqn.params[name][rows.axis] for name in ("start_indices", "limit_indices"))
        step = (eqn.params["strides"] or {rows.axis: 1})[rows.axis]
        return self._picked(eqn, rows, range(start, limit, step))

    def _picked(self, eqn: core.JaxprEqn, rows: Rows, numbers: Sequence[int]) -> Place:
        """The place of some rows of a batch, which may be put together again."""
        if not self.rows_may_return or rows != Rows(rows.axis):
            return self.mixes(eqn, Mixing.MOVE, "takes some rows of the batch")
        if len(numbers) == 1:
            return Single(numbers[0])
        picked = Picked(tuple(numbers))
        self.picked_at[picked] = self.finding(eqn, Mixing.MOVE, "takes rows of the batch out of their places")
        return rows.moved((picked,))

    def _dynamic_slice(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        rows = places[0]
        if not isinstance(rows, Rows) or any(not isinstance(place, Shared) for place in places[1:]):
            return self.mixes(eqn, Mixing.MOVE, "begins where rows say")
        if aval(eqn.outvars[0]).shape[rows.axis] == aval(eqn.invars[0]).shape[rows.axis]:
            return rows
        if self.rows_may_return and rows == Rows(rows.axis) and eqn.params["slice_sizes"][rows.axis] == 1:
            start = eqn.invars[1 + rows.axis]
            number = self._number(start)
            return Single(self.value(start) if number is None else number)
        return self.mixes(eqn, Mixing.MOVE, "takes some rows of the batch")

    def _dynamic_update_slice(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        if any(isinstance(place, Rows) for place in places[2:]):
            return self.mixes(eqn, Mixing.MOVE, "writes where rows say")
        if isinstance(places[1], Single):
            return self._row_written(eqn, places)
        rows = next(place for place in places if isinstance(place, Rows))
        operand, update = eqn.invars[:2]
        if aval(operand).shape[rows.axis] != aval(update).shape[rows.axis]:
            return self.mixes(eqn, Mixing.MOVE, "writes to some rows of the batch")
        return self._meeting(eqn, rows, places[:2])

    def _row_written(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        """The place of rows of which one is written where it was read."""
        operand, update = places[:2]
        assert isinstance(update, Single)
        shapes = [aval(v).shape for v in eqn.invars[:2]]
        written = [k for k, (size, one) in enumerate(zip(*shapes, strict=True)) if (size, one) == (self.batch, 1)]
        for axis in written:
            start = eqn.invars[2 + axis]
            number = self._number(start)
            is_own = update.row == (self.value(start) if number is None else number)
            is_free = operand == Rows(axis) or (
                isinstance(operand, Shared) and _is_uniform(operand, eqn.invars[0], axis)
            )
            if is_own and is_free and self.rows_may_return:
                return Rows(axis)
        return self.mixes(eqn, Mixing.MOVE, "writes a row where another one belongs")

    def _row_scattered(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        """The place of rows of which a scatter writes one where it was read."""
        operand, indices, update = places
        assert isinstance(update, Single)
        numbers = eqn.params["dimension_numbers"]
        (axis, *more), at = numbers.scatter_dims_to_operand_dims, self.unspread(self.value(eqn.invars[1]))
        number = indices.number if isinstance(indices, Shared) else None
        is_one = not more and axis in numbers.inserted_window_dims and math.prod(aval(eqn.invars[1]).shape) == 1
        is_own = update.row == (at if number is None else number)
        is_free = operand == Rows(axis) or (isinstance(operand, Shared) and _is_uniform(operand, eqn.invars[0], axis))
        if is_one and is_own and is_free and aval(eqn.invars[0]).shape[axis] == self.batch and self.rows_may_return:
            return Rows(axis)
        return self.mixes(eqn, Mixing.MOVE, "writes a row where another one belongs")

    def _concatenate(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        dimension = int(eqn.params["dimension"])
        if any(isinstance(place, Single) or (isinstance(place, Rows) and place.axis == dimension) for place in places):
            return self._joined_rows(eqn, places, dimension)
        rows = next(place for place in places if isinstance(place, Rows))
        if (
            self.rows_may_return
            and is_vector(eqn)
            and any(isinstance(place, Shared) and place.grid is not None for place in places)
        ):
            return Vector(tuple(places))
        return self._meeting(eqn, rows, places)

    def _joined_rows(self, eqn: core.JaxprEqn, places: list[Place], axis: int) -> Place:
        """The place of rows that are put together: that of the batch if they come in its order."""
        numbers: list[Any] = []
        lengths = set()
        for place, var in zip(places, eqn.invars, strict=True):
            if isinstance(place, Single):
                numbers.append(place.row)
                lengths.add(1 if eqn.primitive.name == "stack" else aval(var).shape[axis])
            elif isinstance(place, Rows) and place.axis == axis and (place.outer, place.inner) == (1, 1):
                rows = place.order[0].rows if place.order and isinstance(place.order[0], Picked) else range(self.batch)
                if len(place.order) > 1 or (place.order and not isinstance(place.order[0], Picked)):
                    return self.mixes(eqn, Mixing.MOVE, "joins batches")
                numbers += rows
                lengths.add(1)
            else:
                return self.mixes(eqn, Mixing.MOVE, "joins batches")
        if not self.rows_may_return or len(lengths) != 1:
            return self.mixes(eqn, Mixing.MOVE, "joins batches")
        if numbers == list(range(self.batch)):
            return Rows(axis, 1, lengths.pop())
        if all(row == numbers[0] for row in numbers):
            return Single(numbers[0])
        return self.mixes(eqn, Mixing.MOVE, "puts rows together in another order than the batch's")

    def _stack(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        axis = eqn.params["axis"]
        if any(isinstance(place, Single) for place in places):
            return self._joined_rows(eqn, places, axis)
        rows = next(place for place in places if isinstance(place, Rows))
        place = self._meeting(eqn, rows, places)
        return place if not isinstance(place, Rows) else place.on(place.axis + (axis <= place.axis))

    def _meeting(self, eqn: core.JaxprEqn, rows: Rows, places: Sequence[Place]) -> Place:
        """The place of rows among arrays of the same axes."""
        for place, var in zip(places, eqn.invars, strict=False):
            if place != rows and not (isinstance(place, Shared) and _is_uniform(place, var, rows.axis)):
                return self.mixes(eqn, Mixing.SLOT, Mixing.SLOT.value)
        return rows

    def _approx_top_k(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        rows = places[0]
        assert isinstance(rows, Rows)
        is_own = eqn.params["reduction_dimension"] % aval(eqn.invars[0]).ndim != rows.axis
        return rows if is_own else self.mixes(eqn, Mixing.MOVE, "orders over the batch")

    def _pad(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        rows = places[0]
        if not isinstance(rows, Rows):
            return self.mixes(eqn, Mixing.MOVE, "fills with what rows say")
        if eqn.params["padding_config"][rows.axis] != (0, 0, 0):
            return self.mixes(eqn, Mixing.MOVE, "pads the batch")
        return rows

    def _tile(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        rows = places[0]
        assert isinstance(rows, Rows)
        return rows if eqn.params["reps"][rows.axis] == 1 else self.mixes(eqn, Mixing.MOVE, "repeats the batch")

    def _split(self, eqn: core.JaxprEqn, places: list[Place]) -> Any:
        rows = places[0]
        assert isinstance(rows, Rows)
        if eqn.params["axis"] != rows.axis:
            return rows
        ends = np.cumsum(eqn.params["sizes"])
        return [
            self._picked(eqn, rows, range(end - size, end)) for end, size in zip(ends, eqn.params["sizes"], strict=True)
        ]

    def _unstack(self, eqn: core.JaxprEqn, places: list[Place]) -> Any:
        rows, axis = places[0], eqn.params["axis"]
        assert isinstance(rows, Rows)
        if axis == rows.axis:
            return [self._picked(eqn, rows, range(k, k + 1)) for k in range(len(eqn.outvars))]
        return rows.on(rows.axis - (axis < rows.axis))

    def _gather(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        operand, indices = places
        numbers = eqn.params["dimension_numbers"]
        shape = aval(eqn.invars[0]).shape
        if self.rows_may_return and (place := self.looked_up(eqn, places)) is not None:
            return place
        batch_axes = [k for k in range(aval(eqn.outvars[0]).ndim) if k not in numbers.offset_dims]
        if isinstance(operand, Shared):
            assert isinstance(indices, Rows)
            if indices.axis in numbers.start_indices_batching_dims:
                return self.mixes(eqn, Mixing.MOVE, "looks up what depends on the place in the batch")
            return indices.on(batch_axes[indices.axis])
        assert isinstance(operand, Rows)
        axis = operand.axis
        if axis in numbers.operand_batching_dims:
            paired = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(axis)]
            if isinstance(indices, Shared) and not _is_uniform(indices, eqn.invars[1], paired):
                return self.mixes(eqn, Mixing.SLOT, Mixing.SLOT.value)
            if isinstance(indices, Shared) or indices == operand.on(paired):
                return operand.on(batch_axes[paired])
        elif (
            isinstance(indices, Shared)
            and axis not in (*numbers.start_index_map, *numbers.collapsed_slice_dims)
            and eqn.params["slice_sizes"][axis] == shape[axis]
        ):
            removed = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
            offset = [k for k in range(len(shape)) if k not in removed]
            return operand.on(numbers.offset_dims[offset.index(axis)])
        return self.mixes(eqn, Mixing.MOVE, "reads rows that it is told")

    def _scatter(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        if isinstance(places[2], Single):
            return self._row_scattered(eqn, places)
        axes = self.scattered_rows(eqn, places)
        if axes is None and self.rows_may_return:
            if (place := self.written(eqn, places)) is not None:
                return place
            if isinstance(counts := self.counted(eqn, places), Counts):
                self.counted_at[counts.keys] = self.described(eqn)
                return counts
        if axes is None:
            # Mixtures of experts collect their tokens so.
            return self.mixes(eqn, Mixing.MOVE, "writes numbers of different rows into one array")
        return next(place for place in places if isinstance(place, Rows)).on(axes[0])

    def scattered_rows(self, eqn: core.JaxprEqn, places: Sequence[Place]) -> tuple[int, int | None, int] | None:
        """Returns the axes on which a scatter's operand, indices and updates have their rows; None if it mixes them."""
        indices, numbers = places[1], eqn.params["dimension_numbers"]
        shapes = [aval(v).shape for v in eqn.invars]
        removed = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        kept = [k for k in range(len(shapes[0])) if k not in removed]
        scattered = [k for k in range(len(shapes[2])) if k not in numbers.update_window_dims]
        rows = [place for place in places if isinstance(place, Rows)]
        # Rows that are paired one to one in operand, indices and updates:
        pairs: list[tuple[int, int | None, int]] = [
            (axis, paired, scattered[paired])
            for axis, paired in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
        ]
        # Whole columns of the batch, written where all rows say alike:
        if isinstance(indices, Shared):
            windows = zip(kept, numbers.update_window_dims, strict=True)
            pairs += [(k, None, axis) for k, axis in windows if shapes[0][k] == shapes[2][axis]]
        for axes in pairs:
            met = list(zip(places, eqn.invars, axes, strict=True))
            is_apart = all(k is None or _has(place, k) or _is_uniform_along(place, v, k) for place, v, k in met)
            if is_apart and all(place.on(axes[0]) == rows[0].on(axes[0]) for place in rows):
                return axes
        return None

    _scatter_add = _scatter_mul = _scatter_min = _scatter_max = _scatter

    def _random_keys(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        """A key gives numbers of its own, which stand where the key did."""
        rows = next(place for place in places if isinstance(place, Rows))
        return self._meeting(eqn, rows, places)

    _random_bits = _random_split = _random_fold_in = _random_seed = _random_keys

    # Sums -------------------------------------------------------------------------------------------------------------

    def _dot_general(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        contracted, paired = eqn.params["dimension_numbers"]
        free = [
            [k for k in range(aval(v).ndim) if k not in (*c, *b)]
            for v, c, b in zip(eqn.invars, contracted, paired, strict=True)
        ]
        made: list[Rows] = []
        for side, place in enumerate(places):
            if not isinstance(place, Rows):
                continue
            if place.axis in contracted[side]:
                return self.mixes(eqn, Mixing.SUM, "adds over the batch")
            if place.axis in paired[side]:
                at = list(paired[side]).index(place.axis)
                other = places[1 - side]
                axis = paired[1 - side][at]
                if isinstance(other, Shared) and not _is_uniform(other, eqn.invars[1 - side], axis):
                    return self.mixes(eqn, Mixing.SLOT, Mixing.SLOT.value)
                made.append(place.on(at))
            else:
                made.append(place.on(len(paired[0]) + side * len(free[0]) + free[side].index(place.axis)))
        if any(place != made[0] for place in made):
            return self.mixes(eqn, Mixing.MOVE, "lets every row meet every other")
        return made[0]

    def _conv_general_dilated(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        numbers, rows = eqn.params["dimension_numbers"], places[0]
        grouped = [Rows(numbers.lhs_spec[1]), Rows(numbers.rhs_spec[0])]
        if [isinstance(p, Rows) and Rows(p.axis, p.outer) for p in places] == grouped and not any(
            map(_is_moved, places)
        ):
            if eqn.params["feature_group_count"] % self.batch == 0:  # `jax.vmap` of a kernel for each row
                axis = numbers.out_spec[1]
                return Rows(axis, 1, aval(eqn.outvars[0]).shape[axis] // self.batch)
        is_batch = isinstance(rows, Rows) and rows.axis == numbers.lhs_spec[0]
        if (
            not isinstance(rows, Rows)
            or not is_batch
            or isinstance(places[1], Rows)
            or eqn.params["batch_group_count"] > 1
        ):
            return self.mixes(eqn, Mixing.OTHER, "has the batch on an axis that is not the convolution's batch")
        assert isinstance(rows, Rows)
        return rows.on(numbers.out_spec[0])

    # Devices ----------------------------------------------------------------------------------------------------------

    def _collective(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        """The place of rows that devices exchange, if all devices have the same rows."""
        name, params = eqn.primitive.name, eqn.params
        rows = next(place for place in places if isinstance(place, Rows))
        given = params.get("axes", params.get("axis_name"))
        names = set(given if isinstance(given, tuple) else (given,)) - self.inner_axes
        if names and (self.sharded is None or names & self.sharded):
            what = f"meets the rows of other devices along {', '.join(map(repr, sorted(map(str, names))))}"
            return self.mixes(eqn, Mixing.DEVICES, what)
        if name in ("all_gather", "all_gather_invariant"):
            axis = params["all_gather_dimension"]
            if params["tiled"] and axis == rows.axis:
                return self.mixes(eqn, Mixing.MOVE, "joins batches")
            return rows if params["tiled"] else rows.on(rows.axis + (axis <= rows.axis))
        if name in ("reduce_scatter", "psum_scatter"):
            axis = params["scatter_dimension"]
            if axis == rows.axis:
                return self.mixes(eqn, Mixing.MOVE, "divides the batch")
            return rows if params["tiled"] else rows.on(rows.axis - (axis < rows.axis))
        if name == "all_to_all" and rows.axis in (params["split_axis"], params["concat_axis"]):
            return self.mixes(eqn, Mixing.MOVE, "divides the batch")
        return self._meeting(eqn, rows, places)

    _psum = _psum_invariant = _pmax = _pmin = _all_gather = _all_gather_invariant = _collective
    _ppermute = _all_to_all = _reduce_scatter = _psum_scatter = _collective

    def _window(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        rows = places[0]
        if not isinstance(rows, Rows):
            return self.mixes(eqn, Mixing.OTHER, Mixing.OTHER.value)
        moves = eqn.params["window_strides"][rows.axis] != 1 or tuple(eqn.params["padding"][rows.axis]) != (0, 0)
        if moves or eqn.params["window_dimensions"][rows.axis] != 1:
            mixing = Mixing.SUM if equations.kind(eqn) is Kind.SUM else Mixing.MOVE
            return self.mixes(eqn, mixing, "has windows over the batch")
        return rows

    def _select_and_scatter_add(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        rows = self._meeting(eqn, next(place for place in places if isinstance(place, Rows)), places)
        return self._window(eqn, [rows])

    _reduce_window_max = _reduce_window_min = _reduce_window_sum = _reduce_window = _window


def constant_place(value: Any) -> Shared | None:
    """Returns the place of a constant of a function: along which axes its elements are equal; None if it is large."""
    is_concrete = isinstance(value, (np.ndarray, jax.Array)) and not isinstance(value, Tracer)
    if not is_concrete or not 0 < value.size <= _LARGEST_CONSTANT or value.dtype.itemsize not in (1, 2, 4, 8):
        return None
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return None
    bits = np.ascontiguousarray(np.asarray(value)).view(f"u{value.dtype.itemsize}").reshape(value.shape)
    return Shared(frozenset(k for k in range(bits.ndim) if (bits == bits.take([0], axis=k)).all()))


def _is_uniform(place: Shared, var: Any, axis: int) -> bool:
    shape = aval(var).shape
    return not shape or axis in place.uniform or shape[axis] == 1


def _is_uniform_along(place: Place, var: Any, axis: int) -> bool:
    return isinstance(place, Shared) and _is_uniform(place, var, axis)


def _has(place: Place, axis: int) -> bool:
    """Whether rows lie along this axis."""
    return isinstance(place, Rows) and place.axis == axis


def _axes(eqn: core.JaxprEqn, parameter: str) -> tuple[int, ...]:
    axes = eqn.params.get(parameter, -1)
    ndim = aval(eqn.invars[0]).ndim
    return tuple(int(axis) % ndim for axis in (axes if isinstance(axes, (tuple, list)) else (axes,)))


def _shifted(place: Place, by: int) -> Place:
    """The place in an array that has one axis more or less in front."""
    if isinstance(place, Rows):
        return place.on(place.axis + by)
    if isinstance(place, Shared):
        return Shared(frozenset(axis + by for axis in place.uniform if axis + by >= 0))
    return place


def _integers(eqn: core.JaxprEqn, places: Sequence[Shared]) -> tuple[Grid | None, int | None]:
    """How integers without rows count, and the number that all of them are, where it is known."""
    name = eqn.primitive.name
    if name == "iota":
        shape, axis = eqn.params["shape"], eqn.params["dimension"]
        return Grid(math.prod(shape[axis + 1 :]), shape[axis]), None
    if not places:
        return None, None
    grid, number = places[0].grid, places[0].number
    if name not in ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "convert_element_type", "copy"):
        return None, None
    old, new = aval(eqn.invars[0]), aval(eqn.outvars[0])
    if name == "convert_element_type" and not jnp.issubdtype(old.dtype, jnp.integer):
        return None, None
    if grid is None or math.prod(old.shape) == math.prod(new.shape):
        return grid, number
    axis = grid_axis(grid, old.shape)
    if name != "broadcast_in_dim" or axis is None:
        return None, number
    axis = eqn.params["broadcast_dimensions"][axis]
    return Grid(math.prod(new.shape[axis + 1 :]), grid.size) if new.shape[axis] == grid.size else None, number


def _keeps_order(eqn: core.JaxprEqn, places: Sequence[Place]) -> bool:
    """Whether an equation leaves rows apart whose order an operation has changed, along their first axis."""
    name = eqn.primitive.name
    makes_inexact = any(map(equations.is_inexact, eqn.outvars))
    if name == "gather":  # each looks up an integer, such as the number of its request, which operations take
        return isinstance(places[0], Shared) and not makes_inexact
    if name in equations.ELEMENTWISE:
        met = [(place, v) for place, v in zip(places, eqn.invars, strict=True) if isinstance(place, Shared)]
        is_numbered = any(aval(v).shape and 0 not in place.uniform for place, v in met)
        return not is_numbered and (not makes_inexact or any(map(equations.is_inexact, eqn.invars)))
    return name in ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose")


def _uniform(eqn: core.JaxprEqn, places: list[Shared], var: Any) -> frozenset[int]:
    name, params = eqn.primitive.name, eqn.params
    if name == "iota":
        return frozenset(range(len(params["shape"]))) - {params["dimension"]}
    if not places:
        return frozenset()
    uniform = places[0].uniform
    ndim = getattr(aval(eqn.invars[0]), "ndim", 0)
    if name == "broadcast_in_dim":
        old, new = aval(eqn.invars[0]).shape, params["shape"]
        dims = params["broadcast_dimensions"]
        varied = {axis for k, axis in enumerate(dims) if k not in uniform and old[k] == new[axis] != 1}
        return frozenset(range(len(new))) - varied
    if name in equations.ELEMENTWISE:
        arrays = [place.uniform for place, v in zip(places, eqn.invars, strict=True) if aval(v).shape]
        return frozenset.intersection(*arrays) if arrays else frozenset()
    if name == "transpose":
        return frozenset(k for k, axis in enumerate(params["permutation"]) if axis in uniform)
    if name == "reshape":
        old, new = ([k for k, size in enumerate(aval(v).shape) if size != 1] for v in (eqn.invars[0], var))
        sizes = [[aval(v).shape[k] for k in axes] for v, axes in ((eqn.invars[0], old), (var, new))]
        return (
            frozenset(n for k, n in zip(old, new, strict=True) if k in uniform) if sizes[0] == sizes[1] else frozenset()
        )
    if name in ("squeeze", *_REDUCTIONS):
        axes = _axes(eqn, "dimensions" if name == "squeeze" else "axes" if "axes" in params else "axis")
        kept = [k for k in range(ndim) if k not in axes]
        return frozenset(n for n, k in enumerate(kept) if k in uniform)
    if name in ("slice", "dynamic_slice", "split"):
        return uniform
    if name == "pad":
        unpadded = {k for k, widths in enumerate(params["padding_config"]) if tuple(widths) == (0, 0, 0)}
        return uniform & unpadded
    if name == "tile":
        return uniform | {axis for axis, size in enumerate(aval(eqn.invars[0]).shape) if size == 1}
    if name in _ALONG:
        return uniform - set(_axes(eqn, _ALONG[name]))
    if name == "concatenate":
        return frozenset.intersection(*(place.uniform for place in places)) - {params["dimension"]}
    if name == "dynamic_update_slice":
        whole = {k for k in range(ndim) if aval(eqn.invars[0]).shape[k] == aval(eqn.invars[1]).shape[k]}
        return uniform & places[1].uniform & whole
    if name == "gather":
        numbers = params["dimension_numbers"]
        batch_axes = [k for k in range(aval(var).ndim) if k not in numbers.offset_dims]
        paired = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
        indices = places[1].uniform
        looked_up = {
            axis for n, axis in enumerate(batch_axes) if n in indices and (n not in paired or paired[n] in uniform)
        }
        removed = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
        kept = [k for k in range(ndim) if k not in removed]
        return frozenset(looked_up | {axis for k, axis in zip(kept, numbers.offset_dims, strict=True) if k in uniform})
    if name == "dot_general":
        contracted, paired = params["dimension_numbers"]
        pairs = [i in places[0].uniform and j in places[1].uniform for i, j in zip(*paired, strict=True)]
        for place, v, c, b in zip(places, eqn.invars, contracted, paired, strict=True):
            pairs += [k in place.uniform for k in range(aval(v).ndim) if k not in (*c, *b)]
        return frozenset(k for k, same in enumerate(pairs) if same)
    return frozenset()
