"""Defines a rule for each primitive: the places of its results, given the places of its operands."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core

from detjax.invariant import equations
from detjax.invariant.equations import Kind, aval
from detjax.invariant.findings import Finding, Mixing
from detjax.invariant.index_rules import IndexRules, is_vector
from detjax.invariant.places import (
    UNKNOWN,
    Counts,
    Picked,
    Place,
    Rows,
    Shared,
    Single,
    Vector,
    Written,
    first_rows,
    is_moved,
)
from detjax.invariant.sizes import Sizes
from detjax.invariant.uniform import ALONG, is_uniform, is_uniform_along, parameter_axes


class RowRules(IndexRules):
    """A rule for each primitive, and the findings so far."""

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
        self.inner_axes: frozenset[str] = frozenset()  # of meshes that the function itself shards arrays over
        self.findings: list[Finding] = []
        self.picked_at: dict[Picked | Written, Finding] = {}
        self.unfinished: dict[tuple[Any, Any], Finding] = {}  # writes of rows by a loop that is not known to reach all
        self.counted_at: dict[Any, Finding] = {}
        self.calls: list[core.JaxprEqn] = []  # calls around the current equation, outermost first

    def mixes(self, eqn: core.JaxprEqn, mixing: Mixing, what: str) -> Any:
        """Reports an equation that mixes rows, and returns the place of its results."""
        self.findings.append(self.finding(eqn, mixing, what))
        return UNKNOWN

    def finding(self, eqn: core.JaxprEqn, mixing: Mixing, what: str) -> Finding:
        """Returns the finding for an equation that mixes rows."""
        dtypes = tuple(str(getattr(aval(v), "dtype", "token")) for v in eqn.invars)
        return Finding(mixing, eqn.primitive.name, what, self.line(eqn), equations.shapes(eqn), dtypes)

    def described(self, eqn: core.JaxprEqn) -> Finding:
        """See `IndexRules`."""
        what = "orders or counts rows of the batch, which do not return to their positions"
        return self.finding(eqn, Mixing.MOVE, what)

    def line(self, eqn: core.JaxprEqn) -> str:
        """Returns the user's line of the current equation."""
        # Equations within JAX's own functions have no user line, but the call of such a function has one.
        return next(filter(None, map(equations.line, (eqn, *reversed(self.calls)))), "an unknown line")

    # Single elements, and what works along axes -----------------------------------------------------------------------

    def _elements(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        if self.sizes.is_parameter(eqn):
            return self.mixes(eqn, Mixing.SIZE, Mixing.SIZE.value)
        rows = first_rows(places)
        for place, var in zip(places, eqn.invars, strict=True):
            if isinstance(place, Rows) and place != rows:
                is_moved = place.order != rows.order
                what = "combines rows in different orders" if is_moved else "combines rows with the batch on two axes"
                return self.mixes(eqn, Mixing.MOVE if is_moved else Mixing.SLOT, what)
            if isinstance(place, Shared) and not is_uniform(place, var, rows.axis):
                return self.mixes(eqn, Mixing.SLOT, Mixing.SLOT.value)
        return rows

    def _reduction(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        rows = first_rows(places)
        axes = parameter_axes(eqn, "axes" if "axes" in eqn.params else "axis")
        if not (self.sizes.axes(eqn) - {rows.axis}).isdisjoint(axes):
            return self.mixes(eqn, Mixing.SIZE, Mixing.SIZE.value)
        if rows.axis in axes:
            counts = self.counted_one_hot(eqn) if self.rows_may_return else None
            if isinstance(counts, Counts):
                self.counted_at[counts.keys] = self.described(eqn)
                return counts
            mixing = Mixing.SUM if equations.kind(eqn) is Kind.SUM else Mixing.MOVE
            return self.mixes(eqn, mixing, "reduces over the batch")
        return rows.on(rows.axis - sum(axis < rows.axis for axis in axes))

    def _along(self, eqn: core.JaxprEqn, places: list[Place]) -> Any:
        rows = first_rows(places)
        if rows.axis in parameter_axes(eqn, ALONG[eqn.primitive.name]):
            may_return = eqn.primitive.name == "sort" and self.rows_may_return
            if may_return and (made := self.sorted_rows(eqn, places)) is not None:
                return made
            if eqn.primitive.name == "rev" and rows == Rows(rows.axis):
                return self._picked(eqn, rows, range(self.batch)[::-1])
            mixing = Mixing.SUM if equations.kind(eqn) is Kind.SUM else Mixing.MOVE
            return self.mixes(eqn, mixing, "orders or accumulates over the batch")
        return self._meeting(eqn, rows, places)

    # Moves ------------------------------------------------------------------------------------------------------------

    def _broadcast_in_dim(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        rows = first_rows(places)
        axis = int(eqn.params["broadcast_dimensions"][rows.axis])
        if aval(eqn.invars[0]).shape[rows.axis] != aval(eqn.outvars[0]).shape[axis]:
            return self.mixes(eqn, Mixing.MOVE, "spreads the batch")
        return rows.on(axis)

    def _transpose(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        rows = first_rows(places)
        return rows.on(eqn.params["permutation"].index(rows.axis))

    def _reshape(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        """Returns the place after a reshape, which keeps each element's flat index and row, `index // stride % B`."""
        rows = first_rows(places)
        old, new = aval(eqn.invars[0]).shape, aval(eqn.outvars[0]).shape
        if rows.order:
            stride = math.prod(old[rows.axis + 1 :])
            candidates = (k for k, n in enumerate(new) if n == old[rows.axis] and math.prod(new[k + 1 :]) == stride)
            axis = next(candidates, None)
            return self.mixes(eqn, Mixing.MOVE, "splits rows that were moved") if axis is None else rows.on(axis)
        stride, after = rows.inner * math.prod(old[rows.axis + 1 :]), 1
        for axis in reversed(range(len(new))):
            if after <= stride and stride * self.batch <= after * new[axis] and stride % after == 0:
                inner = stride // after
                if new[axis] % (inner * self.batch) == 0:
                    return Rows(axis, new[axis] // (inner * self.batch), inner)
            after *= new[axis]
        return self.mixes(eqn, Mixing.MOVE, "splits the batch axis in two")

    def _squeeze(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        rows = first_rows(places)
        return rows.on(rows.axis - sum(axis < rows.axis for axis in eqn.params["dimensions"]))

    def _expand_dims(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        rows = first_rows(places)
        axis = rows.axis
        for added in sorted(eqn.params["dimensions"]):
            axis += added <= axis
        return rows.on(axis)

    def _slice(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        rows = places[0]
        if not isinstance(rows, Rows):
            return self.mixes(eqn, Mixing.MOVE, "slices at an index from rows")
        if aval(eqn.outvars[0]).shape[rows.axis] == aval(eqn.invars[0]).shape[rows.axis]:
            return rows
        start, limit = (eqn.params[name][rows.axis] for name in ("start_indices", "limit_indices"))
        step = (eqn.params["strides"] or {rows.axis: 1})[rows.axis]
        return self._picked(eqn, rows, range(start, limit, step))

    def _picked(self, eqn: core.JaxprEqn, rows: Rows, numbers: Sequence[int]) -> Place:
        """Returns the place of some rows of a batch, which may be joined again later."""
        if not self.rows_may_return or rows != Rows(rows.axis):
            return self.mixes(eqn, Mixing.MOVE, "takes some rows of the batch")
        if len(numbers) == 1:
            return Single(numbers[0])
        picked = Picked(tuple(numbers))
        self.picked_at[picked] = self.finding(eqn, Mixing.MOVE, "takes rows of the batch out of their positions")
        return rows.moved((picked,))

    def _dynamic_slice(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        rows = places[0]
        if not isinstance(rows, Rows) or any(not isinstance(place, Shared) for place in places[1:]):
            return self.mixes(eqn, Mixing.MOVE, "slices at an index from rows")
        if aval(eqn.outvars[0]).shape[rows.axis] == aval(eqn.invars[0]).shape[rows.axis]:
            return rows
        if self.rows_may_return and rows == Rows(rows.axis) and eqn.params["slice_sizes"][rows.axis] == 1:
            start = eqn.invars[1 + rows.axis]
            return Single(self._index(start))
        return self.mixes(eqn, Mixing.MOVE, "takes some rows of the batch")

    def _index(self, atom: Any) -> Any:
        """Returns the index of a row: a number, or a tuple of its value number."""
        number = self._number(atom)
        return (self.value(atom),) if number is None else number

    def _dynamic_update_slice(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        if any(isinstance(place, Rows) for place in places[2:]):
            return self.mixes(eqn, Mixing.MOVE, "writes at an index from rows")
        if isinstance(places[1], Single):
            return self._row_written(eqn, places)
        rows = first_rows(places)
        operand, update = eqn.invars[:2]
        if aval(operand).shape[rows.axis] != aval(update).shape[rows.axis]:
            return self.mixes(eqn, Mixing.MOVE, "writes to some rows of the batch")
        return self._meeting(eqn, rows, places[:2])

    def _row_written(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        """Returns the place of an array after one row is written at the index where it was read."""
        operand, update = places[:2]
        assert isinstance(update, Single)
        shapes = [aval(v).shape for v in eqn.invars[:2]]
        written = [k for k, (size, one) in enumerate(zip(*shapes, strict=True)) if (size, one) == (self.batch, 1)]
        for axis in written:
            if update.row == self._index(eqn.invars[2 + axis]) and self._is_free(eqn, operand, axis):
                return self._with_row(eqn, operand, axis, update.row, eqn.invars[1])
        return self.mixes(eqn, Mixing.MOVE, "writes a row where another one belongs")

    def _is_free(self, eqn: core.JaxprEqn, operand: Place, axis: int) -> bool:
        """Returns whether rows may be written to an array, which has the batch's rows or the same for each of them."""
        has_some = isinstance(operand, Rows) and len(operand.order) == 1 and isinstance(operand.order[0], Written)
        has_rows = operand == Rows(axis) or (has_some and isinstance(operand, Rows) and operand.axis == axis)
        return self.rows_may_return and (has_rows or is_uniform_along(operand, eqn.invars[0], axis))

    def _with_row(self, eqn: core.JaxprEqn, operand: Place, axis: int, row: Any, update: Any) -> Place:
        """Returns the place of an array after one row is written: the whole batch once all rows are, by one recipe."""
        recipe, what = self.recipe(update), "writes some rows of the batch"
        if isinstance(row, tuple):  # the loop around it must reach every row
            self.unfinished[row[0], recipe] = self.finding(eqn, Mixing.SLOT, what)
            return Rows(axis)
        before = operand.order[0] if isinstance(operand, Rows) and operand.order else Written(frozenset(), recipe)
        assert isinstance(before, Written)
        rows = before.rows | {row}
        if before.recipe != recipe:
            return self.mixes(eqn, Mixing.SLOT, "writes rows of the batch that were not computed in the same way")
        if len(rows) == self.batch:
            return Rows(axis)
        written = Written(rows, recipe)
        self.picked_at[written] = self.finding(eqn, Mixing.SLOT, what)
        return Rows(axis, order=(written,))

    def _row_scattered(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        """Returns the place of an array after a scatter writes one row at the index where it was read."""
        operand, indices, update = places
        assert isinstance(update, Single)
        numbers = eqn.params["dimension_numbers"]
        (axis, *more), index = numbers.scatter_dims_to_operand_dims, self.unspread(self.value(eqn.invars[1]))
        number = indices.number if isinstance(indices, Shared) else None
        is_one = not more and axis in numbers.inserted_window_dims and math.prod(aval(eqn.invars[1]).shape) == 1
        is_own = update.row == ((index,) if number is None else number)
        is_whole = aval(eqn.invars[0]).shape[axis] == self.batch
        if is_one and is_own and is_whole and self._is_free(eqn, operand, axis):
            return self._with_row(eqn, operand, axis, update.row, eqn.invars[2])
        return self.mixes(eqn, Mixing.MOVE, "writes a row where another one belongs")

    def _concatenate(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        dimension = int(eqn.params["dimension"])
        if any(isinstance(place, Single) or (isinstance(place, Rows) and place.axis == dimension) for place in places):
            return self._joined_rows(eqn, places, dimension)
        rows = first_rows(places)
        if (
            self.rows_may_return
            and is_vector(eqn)
            and any(isinstance(place, Shared) and place.grid is not None for place in places)
        ):
            return Vector(tuple(places))
        return self._meeting(eqn, rows, places)

    def _joined_rows(self, eqn: core.JaxprEqn, places: list[Place], axis: int) -> Place:
        """Returns the place of rows that are joined: the whole batch, if they are in its order."""
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
            if len(set(map(self.recipe, eqn.invars))) != 1:
                return self.mixes(eqn, Mixing.SLOT, "joins rows of the batch that were not computed in the same way")
            return Rows(axis, 1, lengths.pop())
        if all(row == numbers[0] for row in numbers):
            return Single(numbers[0])
        return self.mixes(eqn, Mixing.MOVE, "joins rows in another order than the batch's")

    def _stack(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        axis = eqn.params["axis"]
        if any(isinstance(place, Single) for place in places):
            return self._joined_rows(eqn, places, axis)
        rows = first_rows(places)
        place = self._meeting(eqn, rows, places)
        return place if not isinstance(place, Rows) else place.on(place.axis + (axis <= place.axis))

    def _meeting(self, eqn: core.JaxprEqn, rows: Rows, places: Sequence[Place]) -> Place:
        """Returns the place of rows that are combined with arrays of the same axes."""
        for place, var in zip(places, eqn.invars, strict=False):
            if place != rows and not is_uniform_along(place, var, rows.axis):
                return self.mixes(eqn, Mixing.SLOT, Mixing.SLOT.value)
        return rows

    def _approx_top_k(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        rows = first_rows(places)
        is_own = eqn.params["reduction_dimension"] % aval(eqn.invars[0]).ndim != rows.axis
        return rows if is_own else self.mixes(eqn, Mixing.MOVE, "orders over the batch")

    def _pad(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        rows = places[0]
        if not isinstance(rows, Rows):
            return self.mixes(eqn, Mixing.MOVE, "pads with a value of rows")
        if eqn.params["padding_config"][rows.axis] != (0, 0, 0):
            return self.mixes(eqn, Mixing.MOVE, "pads the batch")
        return rows

    def _tile(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        rows = first_rows(places)
        return rows if eqn.params["reps"][rows.axis] == 1 else self.mixes(eqn, Mixing.MOVE, "repeats the batch")

    def _split(self, eqn: core.JaxprEqn, places: list[Place]) -> Any:
        rows = first_rows(places)
        if eqn.params["axis"] != rows.axis:
            return rows
        ends = np.cumsum(eqn.params["sizes"])
        return [
            self._picked(eqn, rows, range(end - size, end)) for end, size in zip(ends, eqn.params["sizes"], strict=True)
        ]

    def _unstack(self, eqn: core.JaxprEqn, places: list[Place]) -> Any:
        rows, axis = first_rows(places), eqn.params["axis"]
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
                return self.mixes(eqn, Mixing.MOVE, "looks up values that depend on the position in the batch")
            return indices.on(batch_axes[indices.axis])
        assert isinstance(operand, Rows)
        axis = operand.axis
        if axis in numbers.operand_batching_dims:
            paired = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(axis)]
            if isinstance(indices, Shared) and not is_uniform(indices, eqn.invars[1], paired):
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
        return self.mixes(eqn, Mixing.MOVE, "reads rows at computed indices")

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
            # Mixtures of experts collect their tokens like this.
            return self.mixes(eqn, Mixing.MOVE, "writes numbers of different rows into one array")
        return first_rows(places).on(axes[0])

    def scattered_rows(self, eqn: core.JaxprEqn, places: Sequence[Place]) -> tuple[int, int | None, int] | None:
        """Returns the axes of rows in a scatter's operand, indices and updates; None if it mixes rows."""
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
        # Whole columns of the batch, written at indices that all rows share:
        if isinstance(indices, Shared):
            windows = zip(kept, numbers.update_window_dims, strict=True)
            pairs += [(k, None, axis) for k, axis in windows if shapes[0][k] == shapes[2][axis]]
        for axes in pairs:
            operands = list(zip(places, eqn.invars, axes, strict=True))
            is_separate = all(
                k is None or (isinstance(place, Rows) and place.axis == k) or is_uniform_along(place, v, k)
                for place, v, k in operands
            )
            if is_separate and all(place.on(axes[0]) == rows[0].on(axes[0]) for place in rows):
                return axes
        return None

    _scatter_add = _scatter_mul = _scatter_min = _scatter_max = _scatter

    def _random_keys(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        """Returns the place of random numbers, each drawn from the key at its position."""
        return self._meeting(eqn, first_rows(places), places)

    _random_bits = _random_split = _random_fold_in = _random_seed = _random_keys

    # Sums -------------------------------------------------------------------------------------------------------------

    def _dot_general(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        contracted, paired = eqn.params["dimension_numbers"]
        free = [
            [k for k in range(aval(v).ndim) if k not in (*c, *b)]
            for v, c, b in zip(eqn.invars, contracted, paired, strict=True)
        ]
        results: list[Rows] = []
        for side, place in enumerate(places):
            if not isinstance(place, Rows):
                continue
            if place.axis in contracted[side]:
                return self.mixes(eqn, Mixing.SUM, "adds over the batch")
            if place.axis in paired[side]:
                index = list(paired[side]).index(place.axis)
                other = places[1 - side]
                axis = paired[1 - side][index]
                if isinstance(other, Shared) and not is_uniform(other, eqn.invars[1 - side], axis):
                    return self.mixes(eqn, Mixing.SLOT, Mixing.SLOT.value)
                results.append(place.on(index))
            else:
                results.append(place.on(len(paired[0]) + side * len(free[0]) + free[side].index(place.axis)))
        if any(place != results[0] for place in results):
            return self.mixes(eqn, Mixing.MOVE, "combines every row with every other")
        if not self.sizes.axes(eqn).isdisjoint(contracted[0]):
            return self.mixes(eqn, Mixing.SIZE, Mixing.SIZE.value)
        return results[0]

    def _conv_general_dilated(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        numbers, rows = eqn.params["dimension_numbers"], places[0]
        grouped = [Rows(numbers.lhs_spec[1]), Rows(numbers.rhs_spec[0])]
        is_grouped = [isinstance(p, Rows) and Rows(p.axis, p.outer) for p in places] == grouped
        # `jax.vmap` over a kernel per row:
        if is_grouped and not any(map(is_moved, places)) and eqn.params["feature_group_count"] % self.batch == 0:
            axis = numbers.out_spec[1]
            return Rows(axis, 1, aval(eqn.outvars[0]).shape[axis] // self.batch)
        if isinstance(rows, Rows) and rows.axis == numbers.lhs_spec[0]:
            if not isinstance(places[1], Rows) and eqn.params["batch_group_count"] == 1:
                return rows.on(numbers.out_spec[0])
        return self.mixes(eqn, Mixing.OTHER, "has the batch on an axis that is not the convolution's batch")

    # Devices ----------------------------------------------------------------------------------------------------------

    def _collective(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        """Returns the place of rows that devices exchange, if all devices have the same rows."""
        name, params = eqn.primitive.name, eqn.params
        rows = first_rows(places)
        axes = params.get("axes", params.get("axis_name"))
        names = set(axes if isinstance(axes, tuple) else (axes,)) - self.inner_axes
        if names and (self.sharded is None or names & self.sharded):
            what = f"combines rows of different devices along {', '.join(map(repr, sorted(map(str, names))))}"
            return self.mixes(eqn, Mixing.DEVICES, what)
        if name in ("all_gather", "all_gather_invariant"):
            axis = params["all_gather_dimension"]
            if params["tiled"] and axis == rows.axis:
                return self.mixes(eqn, Mixing.MOVE, "joins batches")
            return rows if params["tiled"] else rows.on(rows.axis + (axis <= rows.axis))
        if name in ("reduce_scatter", "psum_scatter"):
            axis = params["scatter_dimension"]
            if axis == rows.axis:
                return self.mixes(eqn, Mixing.MOVE, "scatters the batch over devices")
            return rows if params["tiled"] else rows.on(rows.axis - (axis < rows.axis))
        if name == "all_to_all" and rows.axis in (params["split_axis"], params["concat_axis"]):
            return self.mixes(eqn, Mixing.MOVE, "splits the batch over devices")
        return self._meeting(eqn, rows, places)

    _psum = _psum_invariant = _pmax = _pmin = _all_gather = _all_gather_invariant = _collective
    _ppermute = _all_to_all = _reduce_scatter = _psum_scatter = _collective

    def _window(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        rows = places[0]
        if not isinstance(rows, Rows):
            return self.mixes(eqn, Mixing.OTHER, Mixing.OTHER.value)
        moves = eqn.params["window_strides"][rows.axis] != 1 or tuple(eqn.params["padding"][rows.axis]) != (0, 0)
        spreads = eqn.params.get("base_dilation", {rows.axis: 1})[rows.axis] != 1
        if moves or spreads or eqn.params["window_dimensions"][rows.axis] != 1:
            mixing = Mixing.SUM if equations.kind(eqn) is Kind.SUM else Mixing.MOVE
            return self.mixes(eqn, mixing, "has windows over the batch")
        return rows

    def _select_and_scatter_add(self, eqn: core.JaxprEqn, places: list[Place]) -> Place:
        return self._window(eqn, [self._meeting(eqn, first_rows(places), places)])

    _reduce_window_max = _reduce_window_min = _reduce_window_sum = _reduce_window = _window
