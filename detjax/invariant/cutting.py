"""Cuts the program of one row out of the program of a whole batch.

A function that cannot be traced for one row, because it requires some batch size, is traced for the batch. The axis of
the rows is traced through that program (`detjax.invariant.batch_axis`). If no equation mixes rows, each equation works
on all rows alike and independently, so the same equations with the batch removed from their shapes compute one row:
the program that tracing for one row would have given.

Values without rows may have an axis of the batch's size too, such as positions that are repeated for every row. Numbers
derived from them are computed once, not once per row, so that their bits do not depend on the batch either.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend import core

from detjax.invariant import equations
from detjax.invariant.batch_axis import BatchAxisTracer
from detjax.invariant.equations import Kind, aval
from detjax.invariant.places import Place, Rows, Shared, first_rows, single
from detjax.invariant.refusals import UnsafeFunction, lines
from detjax.invariant.uniform import constant_place
from detjax.invariant.walker import walk
from detjax.runtime import varying

_SIZES: Final = {
    "broadcast_in_dim": "shape",
    "reshape": "new_sizes",
    "slice": "limit_indices",
    "dynamic_slice": "slice_sizes",
}
"""Primitives with a parameter that holds the size of the axis of rows, and this parameter."""

_PAIRED: Final = frozenset(
    "concatenate dynamic_update_slice sort random_bits random_fold_in random_split random_seed".split()
)
"""Primitives whose operands have their rows on the same axis."""

_ALIKE: Final = frozenset(
    (
        "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin cumsum cumprod "
        "cummax cummin cumlogsumexp top_k rev transpose squeeze expand_dims pad tile split unstack "
        "conv_general_dilated reduce_window_max reduce_window_min reduce_window_sum reduce_window"
    ).split()
)
"""Primitives whose parameters do not contain the number of rows."""


def cut(jaxpr: core.Jaxpr, batch: int, places: Sequence[Place | None]) -> Callable[..., list[Array]]:
    """Returns the function of one row that a function of a batch computes for each row.

    Arrays with rows keep the axis of rows, with the elements of one row.

    Args:
        jaxpr: a function of a whole batch in which `batch_axis.follow` finds no equation that mixes rows.
        batch: the number of rows, at least 2.
        places: the place of each argument; None for an array without rows.

    Raises:
        UnsafeFunction: an equation cannot be cut; when the function is traced.
    """
    argument_places = [Shared() if place is None else place for place in places]
    return lambda *values: _Cutter(batch).run(jaxpr, values, argument_places)[0]


class _Cutter:
    """Runs the equations of one row. Values without rows may have size 1 along axes on which they are uniform."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._calls: list[core.JaxprEqn] = []

    def run(self, jaxpr: core.Jaxpr, values: Sequence[Any], places: Sequence[Place]) -> tuple[list[Any], list[Place]]:
        """Returns one row's results of a jaxpr, and their places."""

        def rule(eqn: core.JaxprEqn, operands: list[tuple[Any, Place]]) -> Iterator[tuple[Any, Place]]:
            with equations.at_line(eqn):
                results, out_places = self._equation(eqn, [x for x, _ in operands], [place for _, place in operands])
            return zip(results, out_places, strict=True)

        constants = [constant_place(x) or Shared() for x in jaxpr.consts]
        known = zip(jaxpr.all_invars, [*jaxpr.consts, *values], [*constants, *places], strict=True)
        inputs = [(x, _known_single(place, v)) for v, x, place in known]
        outputs = walk(jaxpr, inputs, rule, lambda atom: (atom.val, _known_single(Shared(), atom)))
        return [self._whole(x, v, p) for v, (x, p) in zip(jaxpr.outvars, outputs, strict=True)], [p for _, p in outputs]

    def _tracer(self) -> BatchAxisTracer:
        tracer = BatchAxisTracer(self._batch)
        tracer.calls.extend(self._calls)
        return tracer

    def _places(self, eqn: core.JaxprEqn, places: Sequence[Place]) -> list[Place]:
        """Returns the places of an equation's results.

        Raises:
            UnsafeFunction: the equation mixes rows, which only equations of derivatives can do here.
        """
        tracer = self._tracer()
        results = tracer.equation(eqn, list(places))
        if tracer.findings:
            reports = "\n".join(lines(tracer.findings))
            raise UnsafeFunction(f"batch_invariant: the function mixes rows of the batch.\n{reports}")
        return results

    def _refuse(self, eqn: core.JaxprEqn, why: str) -> UnsafeFunction:
        return UnsafeFunction(
            f"batch_invariant: the function cannot be traced for one row, and its program for {self._batch} rows "
            f"cannot be cut into rows: {eqn.primitive.name} of {', '.join(map(str, equations.shapes(eqn)))} {why}, at "
            f"{self._tracer().line(eqn)}. Write the function so that it can be traced for a batch of one."
        )

    # Shapes ---------------------------------------------------------------------------------------------------------

    def _one(self, shape: Sequence[int], axis: int) -> tuple[int, ...]:
        return tuple(size // self._batch if k == axis else size for k, size in enumerate(shape))

    def _whole(self, x: Any, var: Any, place: Place) -> Any:
        """Returns a value without rows at its full shape; a value with rows unchanged."""
        return x if isinstance(place, Rows) else _shaped(x, getattr(aval(var), "shape", ()))

    def _fitted(self, x: Any, var: Any, place: Place, wanted: Place) -> Any:
        """Returns a value at the shape of one row, if it is combined with rows."""
        shape = getattr(aval(var), "shape", ())
        if isinstance(place, Rows) or not isinstance(wanted, Rows) or not shape or shape[wanted.axis] == 1:
            return self._whole(x, var, place)
        return _shaped(x, self._one(shape, wanted.axis))

    # Equations ------------------------------------------------------------------------------------------------------

    def _equation(self, eqn: core.JaxprEqn, values: list[Any], places: list[Place]) -> tuple[list[Any], list[Place]]:
        if equations.kind(eqn) is Kind.CALL:
            values = [self._whole(x, v, p) for x, v, p in zip(values, eqn.invars, places, strict=True)]
            self._calls.append(eqn)
            results = self._call(eqn, values, places)
            self._calls.pop()
            return results
        out_places = self._places(eqn, places)
        if any(isinstance(place, Rows) for place in places):
            return self._rows(eqn, values, places, out_places), out_places
        return self._without_rows(eqn, values, places, out_places), out_places

    def _rows(self, eqn: core.JaxprEqn, values: list[Any], places: list[Place], out_places: list[Place]) -> list[Any]:
        """Returns one row's results of an equation whose operands have rows."""
        name, params = eqn.primitive.name, dict(eqn.params)
        rows = first_rows(places)
        wanted: list[Place] = [place if isinstance(place, Rows) else Shared() for place in places]
        result = out_places[0]
        assert isinstance(result, Rows)
        if name == "sharding_constraint":
            return values  # it constrains the axis of the batch, which a row does not have
        if name == "optimization_barrier":
            pass
        elif name in equations.ELEMENTWISE:
            wanted = [rows] * len(values)
        elif name in _PAIRED:
            arrays = 2 if name == "dynamic_update_slice" else len(values)
            wanted = [rows] * arrays + wanted[arrays:]
        elif name in _SIZES:
            params[_SIZES[name]] = self._one(params[_SIZES[name]], result.axis)
        elif name == "gather":
            wanted = self._gather(eqn, params, places)
        elif name.replace("_", "-") in ("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max"):
            axes = self._tracer().scattered_rows(eqn, places)
            assert axes is not None
            wanted = [Shared() if axis is None else Rows(axis) for axis in axes]
        elif name == "dot_general":
            wanted = _paired_operands(eqn, places)
        elif name not in _ALIKE:
            raise self._refuse(eqn, "has no rule for one row")
        operands = [self._fitted(*args) for args in zip(values, eqn.invars, places, wanted, strict=True)]
        return equations.bound(eqn, operands, params)

    def _gather(self, eqn: core.JaxprEqn, params: dict[str, Any], places: list[Place]) -> list[Place]:
        """Returns the places that operands are fitted to; sets a gather's slice sizes in `params`."""
        numbers, operand = params["dimension_numbers"], places[0]
        wanted: list[Place] = list(places)
        if isinstance(operand, Rows):
            if operand.axis in numbers.operand_batching_dims:
                index = numbers.operand_batching_dims.index(operand.axis)
                wanted[1] = operand.on(numbers.start_indices_batching_dims[index])
            else:
                params["slice_sizes"] = self._one(params["slice_sizes"], operand.axis)
        return wanted

    def _without_rows(
        self, eqn: core.JaxprEqn, values: list[Any], places: list[Place], out_places: list[Place]
    ) -> list[Any]:
        """Returns the results of an equation without rows, computed once along axes on which they are uniform."""
        name, shapes = eqn.primitive.name, list(equations.shapes(eqn))
        uniform = [place.uniform if isinstance(place, Shared) else frozenset() for place in (*places, *out_places[:1])]
        inexact = any(map(equations.is_inexact, eqn.outvars))
        params = dict(eqn.params)
        if name == "broadcast_in_dim":
            params["shape"] = _ones(params["shape"], uniform[-1])
            shapes[0] = _ones(shapes[0], uniform[0])
        elif name == "sharding_constraint":
            pass
        elif name in equations.ELEMENTWISE and name != "optimization_barrier":
            shapes = [_ones(shape, uniform[-1]) for shape in shapes]
        elif name in ("reduce_sum", "reduce_prod", "cumsum", "cumprod", "cumlogsumexp"):
            axes = {int(k) for k in params["axes"]} if "axes" in params else {params["axis"]}
            shapes[0] = _ones(shapes[0], uniform[0] - axes)
        elif name == "dot_general":
            shapes = _dot_shapes(eqn, shapes, uniform)
        elif inexact and equations.kind(eqn) in (Kind.SUM, Kind.OPAQUE):
            repeated = [
                k
                for shape, axes in zip(shapes, uniform, strict=False)
                for k in axes
                if shape[k] > 1 and shape[k] % self._batch == 0
            ]
            if repeated:
                raise self._refuse(eqn, "computes with numbers that may be repeated for every row")
        return equations.bound(eqn, [_shaped(x, shape) for x, shape in zip(values, shapes, strict=True)], params)

    # Calls ----------------------------------------------------------------------------------------------------------

    def _call(self, eqn: core.JaxprEqn, values: list[Any], places: list[Place]) -> tuple[list[Any], list[Place]]:
        name = eqn.primitive.name
        if name in ("remat2", "checkpoint"):
            out_places = self._places(eqn, places)
            body = jax.checkpoint(
                lambda *operands: self.run(equations.body(eqn), operands, places)[0],
                policy=eqn.params["policy"],
                prevent_cse=eqn.params["prevent_cse"],
            )
            return body(*values), out_places
        if name == "custom_jvp_call":
            return self._with_jvp(eqn, places)(*values), self._places(eqn, places)
        if name == "custom_vjp_call":
            return self._with_vjp(eqn, places)(*values), self._places(eqn, places)
        if equations.is_call(eqn):
            return self.run(equations.body(eqn), values, places)
        if name == "shard_map":
            raise self._refuse(eqn, "shards the batch over devices, or contains a program of each device")
        out_places = self._places(eqn, places)
        rule = {"scan": self._scan, "while": self._while, "cond": self._cond}[name]
        return rule(eqn, values, places, out_places), out_places

    def _scan(self, eqn: core.JaxprEqn, values: list[Any], places: list[Place], out_places: list[Place]) -> list[Any]:
        params, body = eqn.params, eqn.params["jaxpr"]
        consts, carry, xs = equations.scan_arguments(eqn, values)
        const_places, _, x_places = equations.scan_arguments(eqn, places)
        length = params["length"]
        _, carry_vars, x_vars = equations.scan_arguments(eqn, eqn.invars)
        if any(isinstance(place, Rows) and place.axis == 0 for place in x_places):
            # Each step takes a row, and here there is one row.
            length = next(p.outer * p.inner for p in x_places if isinstance(p, Rows))
            fitted = zip(xs, x_vars, x_places, strict=True)
            xs = [self._fitted(x, v, place, Rows(0)) for x, v, place in fitted]
            inside: list[Place] = [*const_places, *[Shared()] * len(xs)]
        else:
            inside = self._tracer().scan(eqn, places)[1]
            carried = zip(carry, carry_vars, equations.scan_arguments(eqn, places)[1], out_places, strict=False)
            carry = [self._fitted(*args) for args in carried]
        wanted = inside[len(consts) : len(consts) + len(carry)]

        def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            results = self._results(body, [*consts, *carry, *xs], inside, wanted)
            return results[: len(carry)], results[len(carry) :]

        carry, ys = varying.scan(step, carry, xs, length, params["reverse"], params["unroll"])
        return [*carry, *ys]

    def _while(self, eqn: core.JaxprEqn, values: list[Any], places: list[Place], out_places: list[Place]) -> list[Any]:
        tests, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        tested, consts, carry = equations.while_arguments(eqn, values)
        tested_places, const_places, carry_places = equations.while_arguments(eqn, places)
        variables = equations.while_arguments(eqn, eqn.invars)[2]
        carry = [self._fitted(*args) for args in zip(carry, variables, carry_places, out_places, strict=True)]

        def condition(carry: list[Any]) -> Any:
            return self.run(tests, [*tested, *carry], [*tested_places, *out_places])[0][0]

        def step(carry: list[Any]) -> list[Any]:
            return self._results(body, [*consts, *carry], [*const_places, *out_places], out_places)

        return varying.while_loop(condition, step, carry)

    def _cond(self, eqn: core.JaxprEqn, values: list[Any], places: list[Place], out_places: list[Place]) -> list[Any]:
        def branch(jaxpr: core.Jaxpr) -> Callable[..., list[Any]]:
            return lambda *operands: self._results(jaxpr, operands, places[1:], out_places)

        branches = list(map(branch, eqn.params["branches"]))
        return varying.switch(jnp.asarray(values[0]).astype(jnp.int32), branches, *values[1:])

    def _results(
        self, jaxpr: core.Jaxpr, values: Sequence[Any], places: Sequence[Place], wanted: Sequence[Place]
    ) -> list[Any]:
        """Returns one row's results of a jaxpr, the first ones fitted to the places `wanted`."""
        results, out_places = self.run(jaxpr, values, places)
        count = len(wanted)
        first = zip(results[:count], jaxpr.outvars[:count], out_places[:count], wanted, strict=True)
        return [jnp.asarray(x) for x in (*(self._fitted(*args) for args in first), *results[count:])]

    def _with_jvp(self, eqn: core.JaxprEqn, places: list[Place]) -> Callable[..., list[Any]]:
        """Returns the function of a `custom_jvp_call`, with its derivative for one row."""
        consts = eqn.params["num_consts"]
        calls = list(self._calls)

        @jax.custom_jvp
        def call(*values: Any) -> list[Any]:
            return [jnp.asarray(x) for x in self.run(equations.body(eqn), values, places)[0]]

        @call.defjvp
        def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            inexact = [equations.is_inexact(v) for v in eqn.invars[consts:]]
            rule, closed, zeros = eqn.params["jvp_jaxpr_fun"].call_wrapped(*(not x for x in inexact))
            rule = core.Jaxpr(rule, closed) if closed else rule
            candidates = zip(tangents[consts:], places[consts:], inexact, strict=True)
            varied = [(jnp.asarray(t), place) for t, place, has_tangent in candidates if has_tangent]
            cutter = _Cutter(self._batch)
            cutter._calls.extend(calls)
            results, _ = cutter.run(
                rule, [*primals[consts:], *(t for t, _ in varied)], [*places[consts:], *(p for _, p in varied)]
            )
            out, slopes = results[: len(zeros)], iter(results[len(zeros) :])
            return [jnp.asarray(x) for x in out], [
                _zero_tangent(x) if zero else next(slopes) for x, zero in zip(out, zeros, strict=True)
            ]

        return call

    def _with_vjp(self, eqn: core.JaxprEqn, places: list[Place]) -> Callable[..., list[Any]]:
        """Returns the function of a `custom_vjp_call`; its own derivative, which takes a whole batch, is refused."""

        @jax.custom_vjp
        def call(*values: Any) -> list[Any]:
            return [jnp.asarray(x) for x in self.run(equations.body(eqn), values, places)[0]]

        refusal = self._refuse(eqn, "has its own gradient (custom_vjp), which takes the whole batch")

        def keep(*values: Any) -> Any:
            raise refusal

        call.defvjp(keep, lambda *_: ())
        return call


def _zero_tangent(x: Any) -> Any:
    """Returns the tangent of a constant result."""
    return jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros(jnp.shape(x), jax.dtypes.float0)


def _known_single(place: Place, atom: Any) -> Place:
    """Returns a place whose axes of size 1 are marked uniform."""
    return Shared(place.uniform | single(atom)) if isinstance(place, Shared) else place


def _ones(shape: Sequence[int], axes: frozenset[int] | set[int]) -> tuple[int, ...]:
    return tuple(1 if k in axes else size for k, size in enumerate(shape))


def _shaped(x: Any, shape: Sequence[int]) -> Any:
    """Returns a value with more or fewer elements along axes on which all are equal."""
    sizes = jnp.shape(x)
    if sizes == tuple(shape):
        return x
    for axis, (old, new) in enumerate(zip(sizes, shape, strict=True)):
        if new < old:
            x = lax.slice_in_dim(x, 0, new, axis=axis)
    return jnp.broadcast_to(x, shape)


def _paired_operands(eqn: core.JaxprEqn, places: list[Place]) -> list[Place]:
    """Returns the places that a dot's operands are fitted to."""
    pairs = eqn.params["dimension_numbers"][1]
    wanted = list(places)
    for side, place in enumerate(places):
        if isinstance(place, Rows) and place.axis in pairs[side]:
            wanted[1 - side] = place.on(pairs[1 - side][list(pairs[side]).index(place.axis)])
    return wanted


def _dot_shapes(
    eqn: core.JaxprEqn, shapes: Sequence[tuple[int, ...]], uniform: Sequence[frozenset[int]]
) -> list[tuple[int, ...]]:
    """Returns the shapes of a dot's operands without repetition along axes that are not contracted."""
    contracted, paired = eqn.params["dimension_numbers"]
    ones = [set(u) - set(c) - set(p) for u, c, p in zip(uniform, contracted, paired, strict=False)]
    for left, right in zip(*paired, strict=True):
        if left in uniform[0] and right in uniform[1]:
            ones[0].add(left)
            ones[1].add(right)
    return [_ones(shape, axes) for shape, axes in zip(shapes, ones, strict=True)]
