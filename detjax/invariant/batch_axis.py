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


@dataclasses.dataclass(frozen=True)
class Rows:
    """An array whose `axis` has `outer * B * inner` elements, of which element i belongs to row `i // inner % B`."""

    axis: int
    outer: int = 1
    inner: int = 1

    def on(self, axis: int) -> "Rows":
        """Returns the place of the same rows on another axis."""
        return Rows(axis, self.outer, self.inner)


@dataclasses.dataclass(frozen=True)
class Shared:
    """An array without rows, whose elements are equal along the axes `uniform`."""

    uniform: frozenset[int] = frozenset()


class _Unknown:
    """An array of which it is not known where its rows are."""


UNKNOWN: Final = _Unknown()

type Place = Rows | Shared | _Unknown


class Mixing(enum.Enum):
    """How an equation mixes rows."""

    SUM = "adds numbers of different rows"
    SLOT = "gives a row numbers that depend on its place in the batch"
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
        inexact: whether its results are floating-point numbers.
    """

    mixing: Mixing
    primitive: str
    what: str
    line: str
    shapes: tuple[tuple[int, ...], ...]
    inexact: bool

    @property
    def changes_numbers(self) -> bool:
        """Whether a row's floating-point numbers depend on the rows beside it, or on its place among them."""
        return self.mixing is Mixing.DEVICES or (self.inexact and self.mixing in (Mixing.SUM, Mixing.SLOT))

    def __str__(self) -> str:
        shapes = ", ".join(map(str, self.shapes))
        return f"{self.primitive} of {shapes} {self.what}, at {self.line}"


def follow(
    jaxpr: core.Jaxpr, batch: int, places: Sequence[Place | None], sharded: frozenset[str] | None = frozenset()
) -> tuple[list[Place], list[Finding]]:
    """Returns where the batch is in the results of a jaxpr, and the equations that mix its rows.

    Args:
        jaxpr: a function of a whole batch.
        batch: how many rows the batch has, at least 2.
        places: for each argument its place, or None for an array without rows.
        sharded: the axes of a mesh around the function along which devices have other rows; None if that is not known.
    """
    follower = Follower(batch, sharded)
    jaxpr = equations.without_prints(jaxpr)
    made = follower.jaxpr(jaxpr, places)
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
        return [_whole(v) for v in eqn.outvars]

    def place_of(result: Any) -> Place:
        shape = aval(result).shape
        for operand, place in rows:
            if place.axis < len(shape) and shape[place.axis] == aval(operand).shape[place.axis]:
                return place
        axes = [axis for axis, size in enumerate(shape) if size and size % batch == 0]
        return Rows(axes[0], 1, shape[axes[0]] // batch) if len(axes) == 1 else UNKNOWN

    return [place_of(v) for v in eqn.outvars]


class Follower:
    """The places of one function's arrays, equation by equation."""

    def __init__(self, batch: int, sharded: frozenset[str] | None = frozenset()) -> None:
        self.batch = batch
        self.sharded = sharded
        self.inner_axes: frozenset[str] = frozenset()  # of meshes that the function itself divides arrays over
        self.findings: list[Finding] = []
        self.calls: list[core.JaxprEqn] = []  # those around the equation that is looked at, the outermost first

    def jaxpr(self, jaxpr: core.Jaxpr, places: Sequence[Place | None]) -> list[Place]:
        """Returns the places of a jaxpr's results."""
        env: dict[core.Var, Place] = {}
        constants = map(constant_place, jaxpr.consts)
        for var, place in zip(jaxpr.all_invars, [*constants, *places], strict=True):
            env[var] = _whole(var) if place is None else place

        def read(atom: Any) -> Place:
            return _whole(atom) if isinstance(atom, core.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            env.update(zip(eqn.outvars, self.equation(eqn, [read(v) for v in eqn.invars]), strict=True))
        return [read(v) for v in jaxpr.outvars]

    def mixes(self, eqn: core.JaxprEqn, mixing: Mixing, what: str) -> _Unknown:
        """Reports an equation that mixes rows, and returns the place of its results."""
        inexact = any(equations.is_inexact(v) for v in eqn.outvars)
        finding = Finding(mixing, eqn.primitive.name, what, self.line(eqn), equations.shapes(eqn), inexact)
        self.findings.append(finding)
        return UNKNOWN

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
        if (operation := equations.operation(eqn)) is not None and any(isinstance(place, Rows) for place in places):
            what = f"calls {operation} of detjax.ops for the whole batch"
            return [self.mixes(eqn, Mixing.OTHER, what)] * len(eqn.outvars)
        if any(place is UNKNOWN for place in places):
            return [UNKNOWN] * len(eqn.outvars)
        if not any(isinstance(place, Rows) for place in places):
            return _shared_results(eqn, [place for place in places if isinstance(place, Shared)])
        if name in equations.ELEMENTWISE:
            rule = self._elements
        elif name in _REDUCTIONS:
            rule = self._reduction
        elif name in _ALONG:
            rule = self._along
        else:
            rule = getattr(self, f"_{name.replace('-', '_')}", None)
        return self._opaque(eqn, places) if rule is None else [rule(eqn, places)] * len(eqn.outvars)

    def _call(self, eqn: core.JaxprEqn, places: list[Place]) -> list[Place]:
        name = eqn.primitive.name
        if equations.is_call(eqn):
            return self.jaxpr(equations.body(eqn), places)
        rules = {"scan": self._scan, "while": self._while, "cond": self._cond, "shard_map": self._shard_map}
        return rules[name](eqn, places)

    def _opaque(self, eqn: core.JaxprEqn, places: list[Place]) -> list[Place]:
        if any(not isinstance(place, Shared) for place in places):
            return [self.mixes(eqn, Mixing.OTHER, Mixing.OTHER.value)] * len(eqn.outvars)
        return [Shared()] * len(eqn.outvars)

    # Control flow ---------------------------------------------------------------------------------------------------

    def _rounds(self, carries: list[Place], step: Callable[[list[Place]], list[Place]], eqn: Any) -> list[Place]:
        """The places of carries that a loop's body leaves as they are."""
        for _ in range(_MOST_ROUNDS):
            after = [self._joined((x, y), eqn) for x, y in zip(carries, step(carries), strict=True)]
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
        if not isinstance(self.jaxpr(eqn.params["cond_jaxpr"], [*tested, *carries])[0], Shared):
            return [self.mixes(eqn, Mixing.OTHER, "goes on as long as any row wants")] * len(eqn.outvars)
        return carries

    def _cond(self, eqn: core.JaxprEqn, places: list[Place]) -> list[Place]:
        if not isinstance(places[0], Shared):
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
            if isinstance(first, Shared) and isinstance(other, Shared):
                first = Shared(first.uniform & other.uniform)
            elif first is UNKNOWN or other is UNKNOWN:
                first = UNKNOWN
            elif isinstance(first, Shared) or isinstance(other, Shared):
                rows, shared = (other, first) if isinstance(first, Shared) else (first, other)
                assert isinstance(rows, Rows) and isinstance(shared, Shared)
                is_uniform = rows.axis in shared.uniform
                first = rows if is_uniform else self.mixes(eqn, Mixing.SLOT, Mixing.SLOT.value)
            elif first != other:
                first = self.mixes(eqn, Mixing.MOVE, "has rows now on one axis, now on another")
        return first

    # Single elements, and what works along axes -----------------------------------------------------------------------

    def _elements(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        rows = next(place for place in places if isinstance(place, Rows))
        for place, var in zip(places, eqn.invars, strict=True):
            if isinstance(place, Rows) and place != rows:
                return self.mixes(eqn, Mixing.SLOT, "meets itself with the batch on another axis")
            if isinstance(place, Shared) and not _is_uniform(place, var, rows.axis):
                return self.mixes(eqn, Mixing.SLOT, Mixing.SLOT.value)
        return rows

    def _reduction(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        (rows,) = places
        assert isinstance(rows, Rows)
        axes = _axes(eqn, "axes" if "axes" in eqn.params else "axis")
        if rows.axis in axes:
            mixing = Mixing.SUM if equations.kind(eqn) is Kind.SUM else Mixing.MOVE
            return self.mixes(eqn, mixing, "reduces over the batch")
        return rows.on(rows.axis - sum(axis < rows.axis for axis in axes))

    def _along(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        rows = next(place for place in places if isinstance(place, Rows))
        if rows.axis in _axes(eqn, _ALONG[eqn.primitive.name]):
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
        if aval(eqn.outvars[0]).shape[rows.axis] != aval(eqn.invars[0]).shape[rows.axis]:
            return self.mixes(eqn, Mixing.MOVE, "takes some rows of the batch")
        return rows

    _dynamic_slice = _slice

    def _dynamic_update_slice(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        if any(isinstance(place, Rows) for place in places[2:]):
            return self.mixes(eqn, Mixing.MOVE, "writes where rows say")
        rows = next(place for place in places if isinstance(place, Rows))
        operand, update = eqn.invars[:2]
        if aval(operand).shape[rows.axis] != aval(update).shape[rows.axis]:
            return self.mixes(eqn, Mixing.MOVE, "writes to some rows of the batch")
        return self._meeting(eqn, rows, places[:2])

    def _concatenate(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        rows = next(place for place in places if isinstance(place, Rows))
        if rows.axis == eqn.params["dimension"]:
            return self.mixes(eqn, Mixing.MOVE, "joins batches")
        return self._meeting(eqn, rows, places)

    def _meeting(self, eqn: core.JaxprEqn, rows: Rows, places: Sequence[Place]) -> Place:
        """The place of rows among arrays of the same axes."""
        for place, var in zip(places, eqn.invars, strict=False):
            if place != rows and not (isinstance(place, Shared) and _is_uniform(place, var, rows.axis)):
                return self.mixes(eqn, Mixing.SLOT, Mixing.SLOT.value)
        return rows

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

    def _split(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        rows = places[0]
        assert isinstance(rows, Rows)
        return self.mixes(eqn, Mixing.MOVE, "splits the batch") if eqn.params["axis"] == rows.axis else rows

    def _unstack(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        rows, axis = places[0], eqn.params["axis"]
        assert isinstance(rows, Rows)
        if axis == rows.axis:
            return self.mixes(eqn, Mixing.MOVE, "takes the batch apart")
        return rows.on(rows.axis - (axis < rows.axis))

    def _gather(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        operand, indices = places
        numbers = eqn.params["dimension_numbers"]
        shape = aval(eqn.invars[0]).shape
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
        axes = self.scattered_rows(eqn, places)
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

    _reduce_window_max = _reduce_window_min = _reduce_window_sum = _reduce_window = _window


def _whole(atom: Any) -> Shared:
    """The place of an array without rows of which nothing else is known."""
    return Shared(_single(atom))


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


def _shared_results(eqn: core.JaxprEqn, places: list[Shared]) -> list[Place]:
    """The places of results that hold no rows: along which axes they are uniform."""
    return [Shared(_uniform(eqn, places, var) | _single(var)) for var in eqn.outvars]


def _single(atom: Any) -> frozenset[int]:
    """The axes of one element."""
    return frozenset(axis for axis, size in enumerate(getattr(aval(atom), "shape", ())) if size == 1)


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
