"""Traces the axis of the batch through a function, and finds the equations that mix its rows.

This is an abstract interpretation. An array holds rows of the batch along one axis (`Rows`), or no rows (`Shared`), or
its elements belong to unknown rows (`UNKNOWN`). Equations that read unknown arrays are not reported, so each finding is
the first equation that mixes rows.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from jax.extend import core

from detjax.invariant import equations
from detjax.invariant.equations import Kind, aval
from detjax.invariant.findings import Finding, Mixing
from detjax.invariant.index_rules import is_vector
from detjax.invariant.places import (
    UNKNOWN,
    Counts,
    Draft,
    Grid,
    Index,
    Letter,
    Place,
    Rows,
    Shared,
    Single,
    Vector,
    first_rows,
    is_moved,
    single,
    whole,
)
from detjax.invariant.row_rules import RowRules
from detjax.invariant.sizes import Sizes
from detjax.invariant.uniform import (
    ALONG,
    REDUCTIONS,
    constant_place,
    integers,
    keeps_order,
    parameter_axes,
    shifted,
    uniform_axes,
)
from detjax.invariant.walker import walk


def follow(
    jaxpr: core.Jaxpr,
    batch: int,
    places: Sequence[Place | None],
    sharded: frozenset[str] | None = frozenset(),
    sizes: Sizes | None = None,
    *,
    rows_may_return: bool = True,
) -> tuple[list[Place], list[Finding]]:
    """Returns the places of the batch in the results of a jaxpr, and the equations that mix its rows.

    Args:
        jaxpr: a function of a whole batch.
        batch: the number of rows, at least 2.
        places: the place of each argument; None for an array without rows.
        sharded: the axes of a surrounding mesh along which devices have different rows; None if unknown.
        sizes: the numbers of the function that come from the number of rows, if known.
        rows_may_return: whether rows may leave their positions if they return to them.
    """
    tracer = BatchAxisTracer(batch, sharded, sizes, rows_may_return=rows_may_return)
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    places_of_results = tracer.jaxpr(jaxpr, places)
    results = [tracer.result(place) for place in places_of_results]
    tracer.findings.extend(tracer.unfinished.values())
    for atom, place in zip(jaxpr.outvars, places_of_results, strict=True):
        if isinstance(place, (Single, Vector)) and not tracer.findings:
            what = "gives every row what belongs to one row, or to its position in the batch"
            tracer.mixes(makers[atom], Mixing.MOVE, what)  # pyright: ignore[reportArgumentType]
    return results, list(dict.fromkeys(tracer.findings))


def operation_places(eqn: core.JaxprEqn, places: Sequence[Place], batch: int) -> list[Place]:
    """Returns the places of the results of an operation of detjax, which keeps the rows of its operands separate.

    Axes of rows are recognized by size, so the batch size must not divide any other axis.
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
"""Primitives of linear algebra, and the number of trailing axes they work along."""
_CALLED: Final = frozenset(
    "pure_callback io_callback pallas_call ffi_call custom_linear_solve linear_solve threefry2x32 random_gamma".split()
)
"""Primitives that are called for each row alone, at the shapes of one row: they promise to keep rows separate."""


def _points_to_rows(eqn: core.JaxprEqn, places: Sequence[Place]) -> bool:
    """Returns whether operands of an equation select rows by index, which the index rules handle."""
    name, rows = eqn.primitive.name, places[0]
    if name == "dynamic_update_slice" or name.startswith("scatter"):
        if any(isinstance(place, (Single, Index, Vector)) for place in places):
            return True
        numbers = eqn.params.get("dimension_numbers")
        written = next((place for place in (rows, places[-1]) if isinstance(place, Rows)), None)
        return numbers is not None and written is not None and written.axis in numbers.scatter_dims_to_operand_dims
    if not isinstance(rows, Rows):
        return False
    if name == "gather":
        return rows.axis in eqn.params["dimension_numbers"].start_index_map
    return name == "dynamic_slice" and aval(eqn.outvars[0]).shape[rows.axis] != aval(eqn.invars[0]).shape[rows.axis]


class BatchAxisTracer(RowRules):
    """Computes the places of a function's arrays, equation by equation."""

    def jaxpr(
        self,
        jaxpr: core.Jaxpr,
        places: Sequence[Place | None],
        values: Sequence[Any] | None = None,
        recipes: Sequence[Any] | None = None,
    ) -> list[Place]:
        """Returns the places of a jaxpr's results, given the value numbers and recipes of its arguments, if known."""
        env: dict[core.Var, Place] = {}
        constants = map(constant_place, jaxpr.consts)
        for var, place in zip(jaxpr.all_invars, [*constants, *places], strict=True):
            env[var] = whole(var) if place is None else place
        for var in self.sizes.constants(jaxpr):
            env[var] = Shared(sized=True)
        self.set_values(jaxpr.constvars, None)
        self.set_values(jaxpr.invars, values)
        self.set_recipes(jaxpr.constvars, None)
        self.set_recipes(jaxpr.invars, recipes)
        self._note_integers(env)

        def literal(atom: core.Literal) -> Shared:
            return dataclasses.replace(whole(atom), number=self._number(atom))

        def rule(eqn: core.JaxprEqn, operand_places: list[Place]) -> list[Place]:
            for index, (v, place) in enumerate(zip(eqn.invars, operand_places, strict=True)):
                if isinstance(v, core.Literal) and isinstance(place, Shared) and self.sizes.is_literal(eqn, index):
                    operand_places[index] = dataclasses.replace(place, sized=True)
            is_call = equations.is_call(eqn)
            if not is_call:
                self.number_results(eqn)
            results = self.equation(eqn, operand_places)
            if is_call:
                self.number_results(eqn)
            self._note_integers(dict(zip(eqn.outvars, results, strict=True)))
            self.note_recipes(eqn, operand_places, results)
            return results

        return walk(jaxpr, [env[v] for v in jaxpr.all_invars], rule, literal)

    def _note_integers(self, places: Mapping[core.Var, Place]) -> None:
        for var, place in places.items():
            self._numbers.pop(var, None)
            self._grids.pop(var, None)
            if isinstance(place, Shared) and place.number is not None:
                self._numbers[var] = place.number
            if isinstance(place, Shared) and place.grid is not None:
                self._grids[var] = place.grid

    def result(self, place: Place) -> Place:
        """Returns the place of a result, and reports rows that do not return to their positions."""
        if isinstance(place, Draft):
            self.findings.append(place.finding)
        elif isinstance(place, (Index, Rows)) and place.order:
            findings = (self.sorted_at[x.sort] if isinstance(x, Letter) else self.picked_at.get(x) for x in place.order)
            self.findings.extend(filter(None, findings))
        elif isinstance(place, Counts) and place.keys is not None:
            self.findings.append(self.counted_at[place.keys])
        elif not isinstance(place, (Index, Counts, Vector, Single)):
            return place
        return UNKNOWN

    def equation(self, eqn: core.JaxprEqn, places: list[Place]) -> list[Place]:
        """Returns the places of an equation's results, given the places of its operands."""
        name = eqn.primitive.name
        if equations.kind(eqn) is Kind.CALL:
            self.calls.append(eqn)
            results = self._call(eqn, places)
            self.calls.pop()
            return results
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
            if not self.findings and not keeps_order(eqn, places):
                self.mixes(eqn, Mixing.OTHER, "works on rows that an operation has reordered")
            return [UNKNOWN] * len(eqn.outvars)
        others = [place for place in places if not isinstance(place, Shared)]
        if not others:
            return self._shared_results(eqn, [place for place in places if isinstance(place, Shared)])
        if (results := self._special(eqn, places, others)) is not None:
            return results
        if name in equations.ELEMENTWISE:
            rule = self._elements
        elif name in REDUCTIONS:
            rule = self._reduction
        elif name in ALONG:
            rule = self._along
        else:
            rule = getattr(self, f"_{name.replace('-', '_')}", None)
        if rule is None:
            return self._opaque(eqn, places)
        place = rule(eqn, places)
        return place if isinstance(place, list) else [place] * len(eqn.outvars)

    def _operation(self, eqn: core.JaxprEqn, places: list[Place]) -> list[Place]:
        """Returns the places of an operation's results. Operations of detjax keep rows separate, but may reorder them.

        No row can be cut out of an operation, so it is refused where rows may not leave their positions.
        """
        if not self.rows_may_return:
            what = f"calls {equations.operation(eqn)} of detjax.ops for the whole batch"
            return [self.mixes(eqn, Mixing.OTHER, what)] * len(eqn.outvars)
        if any(isinstance(place, (Index, Counts, Vector, Single)) or is_moved(place) for place in places):
            return [self.mixes(eqn, Mixing.MOVE, "calls an operation for rows that were moved")] * len(eqn.outvars)
        return operation_places(eqn, places, self.batch)

    def _special(self, eqn: core.JaxprEqn, places: list[Place], others: Sequence[Place]) -> list[Place] | None:
        """Returns the places of results made from single rows, indices, counts, or numbers that come from the batch."""
        name, count = eqn.primitive.name, len(eqn.outvars)
        if any(isinstance(place, Shared) and place.sized for place in places) and not _points_to_rows(eqn, places):
            what = Mixing.SIZE.value
            if name == "add" and not equations.is_inexact(eqn.outvars[0]):
                return [Draft(self.finding(eqn, Mixing.SIZE, what))]
            if not (name in ("max", "min", "clamp") and isinstance(others[0], Index)):
                return [self.mixes(eqn, Mixing.SIZE, what)] * count
        is_write = name in ("concatenate", "stack", "dynamic_update_slice") or name.startswith("scatter")
        if isinstance(others[0], Single) and all(place == others[0] for place in others):
            if not is_write:
                return [*others[:1]] * count
        elif any(isinstance(place, Single) for place in others) and not is_write:
            return [self.mixes(eqn, Mixing.SLOT, "combines a row with another one")] * count
        if any(isinstance(place, (Index, Counts, Vector)) for place in others):
            results = self.with_indices(eqn, places)
            return [self.mixes(eqn, Mixing.MOVE, Mixing.MOVE.value)] * count if results is None else results
        return None

    def _call(self, eqn: core.JaxprEqn, places: list[Place]) -> list[Place]:
        name = eqn.primitive.name
        if equations.is_call(eqn):
            called = str(eqn.params.get("name"))
            is_division = self.rows_may_return and called in ("floor_divide", "remainder")
            if is_division and isinstance(places[0], (Index, Shared)):
                results = self.divided(called, places)
                if results is not None and (isinstance(places[0], Index) or places[0].grid is not None):
                    self.set_values([v for v in equations.body(eqn).outvars if isinstance(v, core.Var)], None)
                    return results
            values, recipes = ([known(v) for v in eqn.invars] for known in (self.value, self.recipe))
            return self.jaxpr(equations.body(eqn), places, values, recipes)
        rules = {"scan": self._scan, "while": self._while, "cond": self._cond, "shard_map": self._shard_map}
        return rules[name](eqn, places)

    def _opaque(self, eqn: core.JaxprEqn, places: list[Place]) -> list[Place]:
        """Returns the places of results of primitives that work along trailing axes, or are called for each row."""
        name, rows = eqn.primitive.name, first_rows(places)
        ndim = {"fft": len(eqn.params.get("fft_lengths", ()))}.get(name, _OF_MATRICES.get(name))
        if ndim is not None:
            arrays = [(place, aval(v)) for place, v in zip(places, eqn.invars, strict=True) if isinstance(place, Rows)]
            if all(place == rows and place.axis < x.ndim - ndim for place, x in arrays):
                self._meeting(eqn, rows, places)
                return [rows] * len(eqn.outvars)
        elif name in _CALLED or len({getattr(aval(v), "shape", ()) for v in (*eqn.invars, *eqn.outvars)}) == 1:
            guessed = operation_places(eqn, places, self.batch)
            if not rows.order and UNKNOWN not in guessed:
                return guessed
        return [self.mixes(eqn, Mixing.OTHER, Mixing.OTHER.value)] * len(eqn.outvars)

    # Control flow ---------------------------------------------------------------------------------------------------

    def _rounds(self, carries: list[Place], step: Callable[[list[Place]], list[Place]], eqn: Any) -> list[Place]:
        """Returns the places of carries once the loop's body no longer changes them.

        Iterations may hand a place from carry to carry, so there can be many rounds. They end because a place only ever
        becomes less certain: fewer uniform axes, then rows, then unknown.
        """
        carries = [place.plain if isinstance(place, Shared) else place for place in carries]
        while True:
            after = [self._joined((x, y), eqn) for x, y in zip(carries, step(carries), strict=True)]
            after = [place.plain if isinstance(place, Shared) else place for place in after]
            if after == carries:
                return carries
            carries = after

    def scan(self, eqn: core.JaxprEqn, places: list[Place]) -> tuple[list[Place], list[Place]]:
        """Returns the places of a scan's results, and of the arguments of its body."""
        consts, carries, xs = equations.scan_arguments(eqn, places)
        over_rows = [isinstance(place, Rows) and place.axis == 0 for place in xs]
        is_apart = not carries and not any(isinstance(place, Rows) for place in consts)
        if any(over_rows) and is_apart and all(place == Rows(0) for place in xs if isinstance(place, Rows)):
            # Each step sees one row, without an axis of rows, and carries nothing to the next.
            if any(isinstance(place, Shared) and 0 not in place.uniform for place in xs):
                unknown = self.mixes(eqn, Mixing.SLOT, Mixing.SLOT.value)
                return [unknown] * len(eqn.outvars), [unknown] * len(places)
            steps = [Shared() if over else shifted(place, -1) for place, over in zip(xs, over_rows, strict=True)]
            ys = self.jaxpr(eqn.params["jaxpr"], [*consts, *steps])
            return [place if place is UNKNOWN else Rows(0) for place in ys], [UNKNOWN] * len(places)
        if any(over_rows):
            unknown = self.mixes(eqn, Mixing.MOVE, "scans over the batch")
            return [unknown] * len(eqn.outvars), [unknown] * len(places)
        xs = [shifted(place, -1) for place in xs]
        ys: list[Place] = []

        around = self.unfinished

        def step(carries: list[Place]) -> list[Place]:
            self.unfinished = {}  # of this round alone
            results = self.jaxpr(eqn.params["jaxpr"], [*consts, *carries, *xs])
            ys[:] = results[len(carries) :]
            return results[: len(carries)]

        carries = self._rounds(carries, step, eqn)
        counters = self._counters(eqn, len(consts), carries, xs)
        self.unfinished = around | {
            (row, recipe): finding
            for (row, recipe), finding in self.unfinished.items()
            if not any(self.is_index(row, one) and not self.reads(recipe, one) for one in counters)
        }
        stacked = [
            self._stacked(place, var, counters)
            for place, var in zip(ys, eqn.params["jaxpr"].outvars[len(carries) :], strict=True)
        ]
        inside = [*consts, *carries, *xs]
        if self.sizes.is_parameter(eqn):
            carries = [self._after_trips(eqn, len(consts), k, place) for k, place in enumerate(carries)]
        return [*carries, *stacked], inside

    def _counters(self, eqn: core.JaxprEqn, consts: int, carries: Sequence[Place], xs: Sequence[Place]) -> list[Any]:
        """Returns the value numbers of integers in a scan's body that run from 0 over the batch."""
        body, counters = eqn.params["jaxpr"], []
        if eqn.params["length"] != self.batch:
            return []
        for k in range(len(carries)):
            counter = self.value(body.invars[consts + k])
            name, operands = self._made_by.get(self.value(body.outvars[k]), ("", ()))
            counts = name == "add" and operands[0] == counter and isinstance(operands[1], tuple) and operands[1][2] == 1
            if counts and self._number(eqn.invars[consts + k]) == 0:
                counters.append(counter)
        first = consts + len(carries)
        for k, atom in enumerate(eqn.invars[first:]):
            if not isinstance(atom, core.Literal) and self._grids.get(atom) == Grid(1, self.batch):
                counters.append(self.value(body.invars[first + k]))
        return counters

    def _stacked(self, place: Place, var: Any, counters: Sequence[Any]) -> Place:
        """Returns the place of a scan's stacked results: the batch, if each step computes the row of its number."""
        if isinstance(place, Single) and isinstance(place.row, tuple) and self.rows_may_return:
            for one in counters:
                if self.is_index(place.row[0], one) and not self.reads(self.recipe(var), one):
                    return Rows(0)
        return shifted(place, 1)

    def _after_trips(self, eqn: core.JaxprEqn, consts: int, k: int, place: Place) -> Place:
        """Returns the place of a scan's carry, if the scan's length comes from the number of rows.

        The carry may be an array into which each step writes one row, without reading the others.
        """
        body = eqn.params["jaxpr"]
        before, after = body.invars[consts + k], body.outvars[k]
        if before is after or place is UNKNOWN:
            return place
        if isinstance(place, Shared):
            return Shared(place.uniform, sized=True)
        if isinstance(place, Rows):
            readers = [one for one in body.eqns if any(v is before or v is after for v in one.invars)]
            writes = [one for one in readers if any(v is after for v in one.outvars)]
            cuts = [one for one in readers if one.primitive.name == "dynamic_slice" and one.invars[0] is before]
            is_row = [one.params["slice_sizes"][place.axis] == 1 for one in cuts]
            is_write = [one.primitive.name in ("scatter", "dynamic_update_slice") for one in writes]
            if len(writes) == 1 and all(is_write) and all(is_row) and len(readers) == len(writes) + len(cuts):
                return place
        return self.mixes(eqn, Mixing.SIZE, Mixing.SIZE.value)

    def _scan(self, eqn: core.JaxprEqn, places: list[Place]) -> list[Place]:
        return self.scan(eqn, places)[0]

    def _while(self, eqn: core.JaxprEqn, places: list[Place]) -> list[Place]:
        tested, consts, carries = equations.while_arguments(eqn, places)
        step = lambda carries: self.jaxpr(eqn.params["body_jaxpr"], [*consts, *carries])  # noqa: E731
        carries = self._rounds(carries, step, eqn)
        test = self.jaxpr(eqn.params["cond_jaxpr"], [*tested, *carries])[0]
        if isinstance(test, Shared) and test.sized:
            return [self.mixes(eqn, Mixing.SIZE, Mixing.SIZE.value)] * len(eqn.outvars)
        # `jax.vmap` makes loops that leave a finished row unchanged: each row has its own condition then.
        ends_by_row = (
            self.rows_may_return
            and isinstance(test, Rows)
            and all(place == test for place in carries if isinstance(place, Rows))
        )
        if not ends_by_row and not isinstance(test, (Shared, Single)):
            return [self.mixes(eqn, Mixing.OTHER, "loops until every row is done")] * len(eqn.outvars)
        return [self._decided(test, place, eqn) for place in carries] if isinstance(test, Single) else carries

    def _cond(self, eqn: core.JaxprEqn, places: list[Place]) -> list[Place]:
        if not isinstance(places[0], (Shared, Single)):
            return [self.mixes(eqn, Mixing.OTHER, "branches on a value of rows")] * len(eqn.outvars)
        branches = [self.jaxpr(branch, places[1:]) for branch in eqn.params["branches"]]
        results = [self._joined(results, eqn) for results in zip(*branches, strict=True)]
        return [self._decided(places[0], place, eqn) for place in results] if isinstance(places[0], Single) else results

    def _decided(self, row: Single, place: Place, eqn: core.JaxprEqn) -> Place:
        """Returns the place of a result of control flow that one row decides."""
        if isinstance(place, Shared) or place == row:
            return row
        return place if place is UNKNOWN else self.mixes(eqn, Mixing.SLOT, "combines a row with another one")

    def _shard_map(self, eqn: core.JaxprEqn, places: list[Place]) -> list[Place]:
        sizes = eqn.params["mesh"].shape
        for place, spec in zip(places, eqn.params["in_specs"], strict=True):
            names = spec[place.axis] if isinstance(place, Rows) and place.axis < len(spec) else None
            names = names if isinstance(names, tuple) else (names,)
            if any(name is not None and sizes[name] > 1 for name in names):
                return [self.mixes(eqn, Mixing.OTHER, "shards the batch")] * len(eqn.outvars)
        before, self.inner_axes = self.inner_axes, self.inner_axes | eqn.params["newly_manual_axes"]
        results = self.jaxpr(eqn.params["jaxpr"], places)
        self.inner_axes = before
        return results

    def _joined(self, places: Sequence[Place], eqn: core.JaxprEqn) -> Place:
        """Returns the place of an array that may be any of several."""
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
                what = "combines a row with another one"
                first = rows.pop() if len(rows) == 1 else self.mixes(eqn, Mixing.SLOT, what)
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
        """Returns the places of results without rows: their uniform axes, and what is known of their integers."""
        name = eqn.primitive.name
        sized = any(place.sized for place in places) or self.sizes.is_parameter(eqn)
        axes: Sequence[int] = ()
        if name == "dot_general":
            axes = eqn.params["dimension_numbers"][0][0]
        elif name in REDUCTIONS or name in ALONG:
            axes = parameter_axes(eqn, "axes" if "axes" in eqn.params else ALONG.get(name, "axis"))
        sized = sized or not self.sizes.axes(eqn).isdisjoint(axes)
        if (
            name == "concatenate"
            and self.rows_may_return
            and is_vector(eqn)
            and any(place.grid is not None and place.grid.size % self.batch == 0 for place in places)
        ):
            return [Vector(tuple(places))]
        results: list[Place] = []
        for var in eqn.outvars:
            place = Shared(uniform_axes(eqn, places, var) | single(var), sized=sized)
            if not equations.is_inexact(var):
                grid, number = integers(eqn, places)
                place = dataclasses.replace(place, grid=grid, number=number)
            results.append(place)
        return results
