"""Runs a program for one example for all of them at once, on devices where every element goes through the same code.

The examples are the first axis of every array that depends on them. Three things could still change an example's bits
with the batch, and none is left to the compiler:

- *Sums, maxima and minima.* Their order is explicit: halves of an axis are combined until one number is left. Products
  of activations become grouped matrix products under contract. Attention, and softmax as `jax.nn.softmax` writes it,
  become operations under contract.
- *Fused products.* Whether `x * y + z` is rounded once or twice depends on the compiler's fusions, and these on shapes.
  A result that may end in a product is sealed by adding -0.0, which changes no number: a product that has been added to
  something cannot be fused with a further addition. The compiler does not know that the number is -0.0.
- *Anything else* whose code may depend on shapes, such as convolutions, runs in a loop over the examples.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend import core

from detjax import ops
from detjax.invariant import attention_patterns, equations, loops, patterns, products
from detjax.invariant.attention_patterns import Attention
from detjax.invariant.control_flow import ControlFlow
from detjax.invariant.dependence import Dependence
from detjax.invariant.equations import Kind, Program, Values, aval
from detjax.invariant.patterns import Softmax
from detjax.operands.rounding import rounded
from detjax.portable.tiles import fold_rows

_MIN_EXAMPLES: Final = 2
"""Minimum number of examples in an array: compilers remove an axis of size 1 and simplify further."""

_NOT_SEALED: Final = frozenset(("add", "sub", "add_any", "convert_element_type", "sqrt"))
"""Primitives that round once and do not end in a product."""

_SEALED_DTYPES: Final = ("float16", "float32", "float64")
"""Dtypes whose products hardware can fuse with an addition; bfloat16 products are rounded from float32."""


def run(program: Program, rows: Sequence[Array], shared: Sequence[Array], sums: int = 0) -> list[Array]:
    """Returns the results of `loops.run`, except for the last bits, computed for all examples at once.

    The compiler must not be able to fuse the computation of shared values with the program; see `interpreter`.
    """
    count = rows[0].shape[0]
    if count < _MIN_EXAMPLES:
        rows = [jnp.concatenate([x] * _MIN_EXAMPLES) for x in rows]
    batch = _Batch(max(count, _MIN_EXAMPLES))
    mapped = [True] * len(rows) + [False] * len(shared)
    results = batch.run(program, [*rows, *shared], mapped, [True] * len(program.results))
    results = [x[:count] for x in results]
    last = len(results) - sums
    return [*results[:last], *map(_added_examples, results[last:])]


class _Batch(ControlFlow):
    """The run of a program and of the programs in its equations."""

    def __init__(self, count: int) -> None:
        super().__init__(count, Dependence(lambda eqn, mapped: False))
        zeros = [
            jnp.asarray(-0.0, dtype) for dtype in _SEALED_DTYPES if dtype != "float64" or jax.config.jax_enable_x64
        ]
        self._negative_zeros = {str(x.dtype): x for x in lax.optimization_barrier(zeros)}

    def run(self, program: Program, values: Sequence[Any], mapped: Sequence[bool], wanted: Sequence[bool]) -> list[Any]:
        """Returns the results of a program; see `ControlFlow.run`."""
        env, flags = Values(zip(program.inputs, values, strict=True)), dict(zip(program.inputs, mapped, strict=True))
        env.update(program.constants)
        flags.update((var, False) for var, _ in program.constants)

        def depends(atom: Any) -> bool:
            return not isinstance(atom, core.Literal) and flags[atom]

        uses = patterns.Uses.from_program(program)
        softmaxes = patterns.softmaxes(uses)
        attentions = [one for one in attention_patterns.attentions(uses, softmaxes) if one.is_served(self.count)]
        operations = {pattern.equations[-1]: pattern for pattern in (*softmaxes, *attentions)}
        # An attention contains its softmax.
        inside = {index for pattern in operations.values() for index in pattern.equations[:-1]}
        for index, eqn in enumerate(program.eqns):
            if index in inside:
                continue
            if (pattern := operations.get(index)) is not None:
                result, flags[pattern.result] = self._operation(pattern, env, flags)
                env[pattern.result] = self._sealed(eqn, [result])[0]
                continue
            operand_flags = [depends(v) for v in eqn.invars]
            result_flags = self.dependence.results(eqn, operand_flags)
            if any(result_flags):
                with equations.at_line(eqn):
                    results = self._equation(eqn, env.read(eqn.invars), operand_flags, result_flags)
            else:
                results = self._sealed(eqn, equations.bind(eqn, env.read(eqn.invars)))
            env.update(zip(eqn.outvars, results, strict=True))
            flags.update(zip(eqn.outvars, result_flags, strict=True))
        results = zip(env.read(program.results), map(depends, program.results), wanted, strict=True)
        return [self.spread(x) if want and not flag else x for x, flag, want in results]

    def _operation(self, pattern: Softmax | Attention, env: Values, flags: dict[Any, bool]) -> tuple[Array, bool]:
        """Returns an operation's result, computed in one launch, and whether it depends on the example."""
        if isinstance(pattern, Softmax):
            return ops.softmax(env[pattern.x]), flags[pattern.x]
        operands = pattern.operands
        if not any(flags[var] for var in operands.values()):
            return pattern({name: env[var][None] for name, var in operands.items()})[0], False
        values = {name: env[var] if flags[var] else self.spread(env[var]) for name, var in operands.items()}
        if (mask := pattern.mask) is not None and not flags[mask.seen]:
            values["mask"] = env[mask.seen][None]  # one for all is enough
        return pattern(values), True

    def _equation(
        self, eqn: core.JaxprEqn, values: list[Any], mapped: list[bool], result_flags: list[bool]
    ) -> list[Any]:
        name, kind = eqn.primitive.name, equations.kind(eqn)
        if equations.is_call(eqn):
            return self.run(Program.from_jaxpr(equations.body(eqn)), values, mapped, result_flags)
        if kind is Kind.CALL and (results := self.loop_or_branch(eqn, values, mapped)) is not None:
            return results
        if kind in (Kind.ROUNDED, Kind.APPROXIMATED):
            return self._sealed(eqn, self._at_once(eqn, values, mapped))
        if name in equations.EXTREMES and equations.is_inexact(eqn.invars[0]):
            return self._extreme(eqn, values, mapped)
        if kind in (Kind.EXACT, Kind.OPERATION) or (name == "scatter" and eqn.params["unique_indices"]):
            return self._at_once(eqn, values, mapped)
        if name == "reduce_sum":
            # Numbers narrower than float32 are added in float32 and rounded once.
            wide = values[0].astype(loops.at_least_float32(values[0].dtype))
            return [rounded(_halved(wide, [axis + 1 for axis in eqn.params["axes"]], lax.add, 0.0), values[0].dtype)]
        if name == "cumsum":
            axis = eqn.params["axis"] + 1
            return [lax.associative_scan(lax.add, values[0], reverse=eqn.params["reverse"], axis=axis)]
        if name == "dot_general" and products.is_under_contract(eqn) and products.takes(eqn):
            x, y = (x if m else self.spread(x) for x, m in zip(values, mapped, strict=True))
            dtype = aval(eqn.outvars[0]).dtype
            return self._sealed(eqn, [products.activations(x, y, eqn.params["dimension_numbers"], dtype)])
        return _one_by_one(eqn, values, mapped)

    @staticmethod
    def _extreme(eqn: core.JaxprEqn, values: list[Any], mapped: list[bool]) -> list[Any]:
        """Returns maxima or minima in an explicit order, which decides the sign of zeros."""
        name = eqn.primitive.name
        chosen, limit = (lax.max, "min") if name.endswith("max") else (lax.min, "max")
        is_real = jnp.issubdtype(values[0].dtype, jnp.floating)
        if name in ("reduce_max", "reduce_min") and is_real:
            filling = _infinity(values[0].dtype, limit)
            return [_halved(values[0], [axis + 1 for axis in eqn.params["axes"]], chosen, filling)]
        if name in ("cummax", "cummin"):
            axis = eqn.params["axis"] + 1
            return [lax.associative_scan(chosen, values[0], reverse=eqn.params["reverse"], axis=axis)]
        return _one_by_one(eqn, values, mapped)

    def _at_once(self, eqn: core.JaxprEqn, values: list[Any], mapped: list[bool]) -> list[Any]:
        """Returns the results of an equation by JAX's batching rule, where no element depends on its position."""
        one = functools.partial(equations.bind, eqn)
        axes = [0 if m else None for m in mapped]
        return jax.vmap(lambda *values: one(values), in_axes=axes, axis_size=self.count)(*values)

    def _sealed(self, eqn: core.JaxprEqn, results: list[Any]) -> list[Any]:
        """Returns results that cannot be fused into a sum."""
        if equations.kind(eqn) not in (Kind.ROUNDED, Kind.APPROXIMATED, Kind.SUM) or eqn.primitive.name in _NOT_SEALED:
            return results
        zeros = [self._negative_zeros.get(str(x.dtype)) for x in results]
        return [
            x if zero is None else lax.add(x, lax.broadcast(zero, x.shape))
            for x, zero in zip(results, zeros, strict=True)
        ]


def _one_by_one(eqn: core.JaxprEqn, values: list[Any], mapped: list[bool]) -> list[Any]:
    """Returns the results of an equation, computed for the examples in sequence."""
    rows = [k for k, m in enumerate(mapped) if m]
    shared = [k for k, m in enumerate(mapped) if not m]

    def one(*operands: Any) -> list[Any]:
        by_index = dict(zip((*rows, *shared), operands, strict=True))
        return equations.bind(eqn, [by_index[k] for k in range(len(values))])

    return loops.run(one, [values[k] for k in rows], [jnp.asarray(values[k]) for k in shared])


def _infinity(dtype: Any, limit: str) -> float:
    """Returns the largest or smallest number of a dtype, infinite if the dtype has infinities."""
    finite = float(getattr(jnp.finfo(dtype), limit))
    infinite = math.copysign(math.inf, finite)
    return infinite if np.isinf(np.asarray(infinite, dtype)) else finite


def _halved(x: Array, axes: Sequence[int], combined: Callable[[Array, Array], Array], filling: float) -> Array:
    """Reduces axes in sequence by combining their halves until one number is left.

    Each axis is padded to a power of two with `filling`, the identity of the reduction.
    """
    total = x
    for axis in axes:
        size = 1 << (total.shape[axis] - 1).bit_length()
        padding = [(0, size - total.shape[axis] if k == axis else 0) for k in range(total.ndim)]
        total = jnp.pad(total, padding, constant_values=filling)
        while size > 1:
            size //= 2
            low, high = (lax.slice_in_dim(total, start, start + size, axis=axis) for start in (0, size))
            total = combined(low, high)
    return total.reshape([n for k, n in enumerate(x.shape) if k not in axes])


def _added_examples(x: Array) -> Array:
    """Returns the sum over the examples in ascending order, at least in float32."""
    wide = lax.optimization_barrier(x.astype(loops.at_least_float32(x.dtype)))

    def add(total: Array, rows: Array, _: None) -> Array:
        return functools.reduce(jnp.add, [rows[row] for row in range(rows.shape[0])], total)

    return fold_rows(add, jnp.zeros_like(wide[0]), wide, None)
