"""`batch_invariant`: makes each row of a function of a batch depend on that row alone, in every bit."""

import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax import Array, tree_util
from jax.core import Tracer
from jax.extend import core
from jax.interpreters import partial_eval

from detjax.invariant import arguments, cutting, derivatives, equations, interpreter, refusals, writes
from detjax.invariant.arguments import Leaves
from detjax.invariant.batch_axis import BatchAxisTracer, follow
from detjax.invariant.equations import Program
from detjax.invariant.findings import Finding, Mixing
from detjax.invariant.places import Place, Rows, Shared
from detjax.invariant.refusals import TracedForBatchWarning, UnsafeFunction, UnsafeFunctionWarning
from detjax.invariant.sizes import Sizes
from detjax.runtime import backends, bound_methods, compilation, contexts, varying

type OnUnsafe = Literal["refuse", "warn"]

type TracedFor = Literal["row", "batch"]


def batch_invariant(
    fn: Callable[..., Any],
    batch_axes: Any = 0,
    out_axes: Any = 0,
    *,
    on_unsafe: OnUnsafe = "refuse",
    traced_for: TracedFor | None = None,
) -> Callable[..., Any]:
    """Returns `fn` with rows that do not depend on the batch: row i of the result is `fn` of row i alone, in every bit.

    `fn` is traced for a batch of one. Products of a row's values with weights, and lookups in tables, are computed for
    all rows at once by `detjax.ops`; everything else is computed per row. So a row does not depend on the number of
    rows, on its position, or on the other rows. It works under `jax.jit` (on GPUs `detjax.jit`),
    `jax.grad` (in reverse mode, once), `jax.vmap`, `jax.lax.scan` and `jax.shard_map`.

    Gradients of rows depend on the row alone too. Gradients of weights are sums over the batch: in ascending order of
    rows, in float32, rounded once for each use of the weight (`detjax.ops.matmul` defines how products add).

    Args:
        fn: a function of arrays and static values (everything that is not an array). Or a Flax module: the result takes
            the arguments of an NNX module's call, or of a Linen module's `apply`. As a decorator of an NNX class it
            changes the class's call. A method of an NNX module also works. A call that writes into an NNX module is
            refused, except for counters of random streams on which no result depends. Each call uses the module's
            current weights, also under `detjax.jit`; values that a function closes over are fixed by the first call
            with arguments of one kind, as under `jax.jit`.
        batch_axes: for each positional argument, the axis of its rows: an integer, None for values that all rows share
            (such as weights), or a pytree of these, as `in_axes` of `jax.vmap`. One integer holds for all arguments. A
            module's own variables come before these arguments, and are shared. Keyword arguments are shared.
        out_axes: the axis of the rows in each result, in the same form.
        on_unsafe: what to do if `fn` mixes rows, so that a row depends on the other rows, on its position among them,
            or on their number. "refuse" raises; "warn" warns and returns the results of `fn` for each row alone. Rows
            may leave their positions if every row returns, as tokens do that are sorted for experts.
        traced_for: "row" traces `fn` for a batch of one. "batch" traces it for the batch and cuts the program of one
            row out of that, with the same bits; rows may not leave their positions then. None tries "row", and uses
            "batch", with a `TracedForBatchWarning`, if tracing for one row raises.

    Raises:
        TypeError: an argument with rows is not an array, or fn is a class other than an NNX module's. Forward mode or a
            gradient of a gradient is requested; when called.
        UnsafeFunction: see `on_unsafe` and `traced_for`, or a result has no axis of rows; when called.
        ValueError: batches have different sizes or no rows, or an option is unknown.

    Example:
        >>> w = jnp.ones((64, 8))
        >>> fn = detjax.batch_invariant(lambda x: jnp.tanh(x @ w))
        >>> x = jax.random.normal(jax.random.key(0), (5, 64))
        >>> bool((fn(x)[3] == fn(x[3:4])[0]).all())
        True
    """
    if on_unsafe not in get_args(OnUnsafe.__value__):
        accepted = ", ".join(get_args(OnUnsafe.__value__))
        raise ValueError(f"batch_invariant: on_unsafe is {on_unsafe!r}; accepted: {accepted}")
    if traced_for not in (None, *get_args(TracedFor.__value__)):
        accepted = ", ".join(get_args(TracedFor.__value__))
        raise ValueError(f"batch_invariant: traced_for is {traced_for!r}; accepted: None, {accepted}")
    options = _Options(out_axes, on_unsafe, traced_for)
    make = functools.partial(_invariant, batch_axes=batch_axes, options=options)
    if isinstance(fn, nn.Module):
        return make(fn.apply, shared=1)
    if isinstance(fn, nnx.Module):
        return types.MethodType(bound_methods.reads_object(make(type(fn).__call__, shared=1)), fn)
    if inspect.ismethod(fn) and isinstance(fn.__self__, nnx.Module):
        return types.MethodType(bound_methods.reads_object(make(fn.__func__, shared=1)), fn.__self__)
    if isinstance(fn, type) and issubclass(fn, nnx.Module):
        decorated: Any = fn
        decorated.__call__ = bound_methods.reads_object(make(decorated.__call__, shared=1))
        return decorated
    if isinstance(fn, type):
        raise TypeError(f"batch_invariant: fn is the class {fn.__name__}; accepted: functions, modules, NNX classes")
    return make(fn, shared=0)


class _Options(NamedTuple):
    """Arguments of `batch_invariant`."""

    out_axes: Any
    on_unsafe: OnUnsafe
    traced_for: TracedFor | None


def _invariant(fn: Callable[..., Any], *, batch_axes: Any, options: _Options, shared: int) -> Callable[..., Any]:
    """Returns the invariant function; all rows share the first `shared` arguments, before those in `batch_axes`."""
    programs: dict[Any, Callable[..., Any]] = {}

    @compilation.chain
    @functools.wraps(fn, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        if contexts.traced_for_rows.value:
            return fn(*args, **kwargs)
        signature, arrays = Leaves.from_call("batch_invariant", batch_axes, args, kwargs, shared)
        if signature not in programs:
            programs[signature] = _program(fn, signature, options)
        if not any(isinstance(x, Tracer) for x in arrays):
            return programs[signature](*arrays)
        try:
            return programs[signature](*derivatives.reverse_only(arrays))
        except (TypeError, ValueError) as error:
            if any(begins in str(error) for begins in derivatives.JAX_REFUSES):
                raise derivatives.ForwardMode from error
            raise

    return call


def _program(fn: Callable[..., Any], signature: Leaves, options: _Options) -> Callable[..., Any]:
    """Returns the invariant function of the arrays among the arguments."""
    array_axes = signature.array_axes
    counters: dict[int, str] = {}

    def function(*arrays: Any) -> Any:
        leaves = signature.with_arrays(arrays)
        args, kwargs = jax.tree.unflatten(signature.tree, leaves)
        results = fn(*args, **kwargs)
        counters.update(writes.check_unchanged((args, kwargs), leaves, signature.tree, signature.is_array))
        return results

    @compilation.jit
    @compilation.chain
    def invariant(*arrays: Array) -> Any:
        if backends.backend() == backends.STOCK:
            results = function(*arrays)
            if counters:
                rows = arguments.count_rows("batch_invariant", arrays, array_axes)
                writes.check_counters(_traced(function, arrays, array_axes, rows)[0], counters)
            return results
        compilation.require_pinned_program("batch_invariant")
        count = arguments.count_rows("batch_invariant", arrays, array_axes)
        whole = _Whole.read(function, arrays, array_axes, max(2, count), options)
        writes.check_counters(whole.jaxpr, counters)
        whole.check(options)
        jaxpr, one = _one_row(function, arrays, array_axes, options.traced_for)
        flags = [axis is not None for axis in array_axes]
        values = [x if axis is None else _as_examples(x, axis) for x, axis in zip(arrays, array_axes, strict=True)]
        program = Program.from_jaxpr(equations.without_types(jaxpr))
        with refusals.mixed(whole.findings):
            results, mapped = interpreter.run(program, values, flags, count)
        return _as_batch(results, mapped, one, whole, options.out_axes, count)

    return invariant


def _as_examples(x: Array, axis: int) -> Array:
    """Returns an array with the rows as its first axis, followed by the axes of a batch of one."""
    return jnp.expand_dims(jnp.moveaxis(x, axis, 0), axis % x.ndim + 1)


def _shapes(arrays: Sequence[Array], axes: Sequence[int | None], rows: int) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes of arrays for a batch of `rows` rows."""

    def shape(x: Array, axis: int | None) -> jax.ShapeDtypeStruct:
        sizes = list(x.shape)
        if axis is not None:
            sizes[axis] = rows
        return varying.shape(x, sizes, weak_type=jax.typeof(x).weak_type)

    return list(map(shape, arrays, axes))


def _traced(
    fn: Callable[..., Any], arrays: Sequence[Array], axes: Sequence[int | None], rows: int
) -> tuple[core.Jaxpr, Any]:
    """Returns the jaxpr of a function for a batch of `rows` rows, and the shapes of its results."""
    with contexts.traced_for_rows(True):
        jaxpr, shapes = jax.make_jaxpr(fn, return_shape=True)(*_shapes(arrays, axes, rows))
    return partial_eval.dce_jaxpr_consts(jaxpr, [True] * len(jaxpr.outvars), True)[0], shapes


class _Whole(NamedTuple):
    """A function traced for a batch.

    Attributes:
        batch: the number of rows, at least 2.
        jaxpr: the function.
        shapes: the shapes of its results, as the pytree that it returns.
        argument_places: the place of the rows in each argument; None for an argument without rows.
        result_places: the places in the results.
        findings: the equations that mix rows.
    """

    batch: int
    jaxpr: core.Jaxpr
    shapes: Any
    argument_places: list[Place | None]
    result_places: list[Place]
    findings: list[Finding]

    @classmethod
    def read(
        cls, fn: Callable[..., Any], arrays: Sequence[Array], axes: Sequence[int | None], count: int, options: _Options
    ) -> "_Whole":
        """Traces a function for a batch size that divides no other axis, so that axes of rows are recognized by size.

        A function that does not accept that batch is traced for the batch of the call. A second trace, for one row
        more, shows the numbers that come from the number of rows.
        """
        try:
            sizes = (size for x in arrays for size in x.shape)
            batch = count if options.traced_for == "batch" else arguments.distinct_batch(sizes)
            traced = _traced(fn, arrays, axes, batch)
        except UnsafeFunction:
            raise
        except Exception:  # a function that does not accept every batch may raise anything
            batch = count
            traced = _traced(fn, arrays, axes, batch)
        try:
            more: core.Jaxpr | None = _traced(fn, arrays, axes, batch + 1)[0]
        except Exception:
            more = None
        return cls.followed(traced, arrays, axes, batch, more)

    @classmethod
    def followed(
        cls,
        traced: tuple[core.Jaxpr, Any],
        arrays: Sequence[Array],
        axes: Sequence[int | None],
        batch: int,
        more: core.Jaxpr | None = None,
        *,
        rows_may_return: bool = True,
    ) -> "_Whole":
        """Returns a function traced for `batch` rows, with its places and findings; `more` has one row more."""
        jaxpr, shapes = traced
        argument_places: list[Place | None] = [
            None if axis is None else Rows(axis % x.ndim) for x, axis in zip(arrays, axes, strict=True)
        ]
        sharded = varying.sharded([x for x, axis in zip(arrays, axes, strict=True) if axis is not None])
        jaxpr = equations.without_prints(jaxpr)
        sizes = None if more is None else Sizes.between(jaxpr, equations.without_prints(more))
        result_places, findings = follow(jaxpr, batch, argument_places, sharded, sizes, rows_may_return=rows_may_return)
        return cls(batch, jaxpr, shapes, argument_places, result_places, findings)

    def check(self, options: _Options) -> None:
        """Raises or warns if a row depends on other rows, on its position, or on the number of rows."""
        findings = [*self.findings, *self._numbered_results(options.out_axes)]
        if not findings:
            return
        message = "\n".join(("batch_invariant: the function mixes rows of the batch.", *refusals.lines(findings)))
        if options.on_unsafe == "refuse":
            raise UnsafeFunction(f"{message}\non_unsafe='warn' computes the function for each row alone.")
        warnings.warn(UnsafeFunctionWarning(message), stacklevel=2)

    def _numbered_results(self, out_axes: Any) -> Iterator[Finding]:
        """Yields findings for results without rows that vary along their axis of rows, or with the batch size."""
        makers = {var: eqn for eqn in self.jaxpr.eqns for var in eqn.outvars}
        axes = arguments.spread("batch_invariant", "out_axes", out_axes, self.shapes)
        for atom, place, axis in zip(self.jaxpr.outvars, self.result_places, axes, strict=True):
            if not isinstance(place, Shared) or isinstance(atom, core.Literal):
                continue
            aval, mixing = equations.aval(atom), Mixing.SIZE if place.sized else Mixing.SLOT
            ndim = aval.ndim
            if place.sized or (axis is not None and -ndim <= axis < ndim and axis % ndim not in place.uniform):
                if atom in makers:
                    yield BatchAxisTracer(self.batch).finding(makers[atom], mixing, mixing.value)
                elif atom in self.jaxpr.constvars:
                    shape, dtype = tuple(aval.shape), str(aval.dtype)
                    yield Finding(mixing, "constant", mixing.value, "an unknown line", (shape,), (dtype,))


def _one_row(
    fn: Callable[..., Any], arrays: Sequence[Array], axes: Sequence[int | None], traced_for: TracedFor | None
) -> tuple[core.Jaxpr, Any]:
    """Returns the jaxpr of a function for a batch of one, and the shapes of its results."""
    reason: Exception | None = None
    if traced_for != "batch":
        try:
            return _traced(fn, arrays, axes, 1)
        except UnsafeFunction:
            raise
        except Exception as error:  # a function that does not accept one row may raise anything
            if traced_for == "row":
                raise
            reason = error
    count = max(2, arguments.count_rows("batch_invariant", arrays, axes))
    whole = _Whole.followed(_traced(fn, arrays, axes, count), arrays, axes, count, rows_may_return=False)
    why = "" if reason is None else f" cannot be traced for one row ({type(reason).__name__}: {reason}), and it"
    if whole.findings:
        reports = "\n".join(refusals.lines(whole.findings))
        raise UnsafeFunction(
            f"batch_invariant: the function{why} mixes rows in a batch of {whole.batch}, so that no row can be cut "
            f"out of it:\n{reports}"
        ) from reason
    if reason is not None:
        message = (
            f"batch_invariant: the function{why} is traced for {whole.batch} rows instead, and one row is cut out. A "
            "row depends on the number of rows where the function computes with it. Write the function so that it "
            "accepts one row, or choose traced_for='batch'."
        )
        warnings.warn(TracedForBatchWarning(message), stacklevel=2)
    leaves, tree = jax.tree.flatten(whole.shapes)
    cut = cutting.cut(whole.jaxpr, whole.batch, whole.argument_places)
    with contexts.traced_for_rows(True):
        jaxpr, shapes = jax.make_jaxpr(cut, return_shape=True)(*_shapes(arrays, axes, 1))
    assert len(shapes) == len(leaves)
    return partial_eval.dce_jaxpr_consts(jaxpr, [True] * len(jaxpr.outvars), True)[0], jax.tree.unflatten(tree, shapes)


def _as_batch(
    results: Sequence[Any], mapped: Sequence[bool], one: Any, whole: _Whole, out_axes: Any, count: int
) -> Any:
    """Returns the results as the pytree that the function returns, with rows along `out_axes`.

    Args:
        results: results `[B, ...]` of the program for one example.
        mapped: which results depend on the example.
        one: the shapes for a batch of one.
        whole: the function traced for a batch.
        out_axes: see `batch_invariant`.
        count: the number of rows.
    """
    paths = [tree_util.keystr(path) for path, _ in tree_util.tree_leaves_with_path(one)]
    out = []
    axes = arguments.spread("batch_invariant", "out_axes", out_axes, one)
    shapes, whole_shapes = jax.tree.leaves(one), jax.tree.leaves(whole.shapes)
    for x, is_mapped, path, alone, among, place, axis in zip(
        results, mapped, paths, shapes, whole_shapes, whole.result_places, axes, strict=True
    ):
        if axis is None and not is_mapped:
            out.append(jnp.asarray(x))
            continue
        expected = list(alone.shape)
        rows = Rows(0)
        if has_axis := axis is not None and -alone.ndim <= axis < alone.ndim:
            rows = Rows(axis % alone.ndim)
            if isinstance(place, Rows) and place.axis == rows.axis:
                rows = place  # may hold several elements per row
            expected[rows.axis] = rows.outer * whole.batch * rows.inner
        if not has_axis or alone.shape[rows.axis] != rows.outer * rows.inner or tuple(expected) != among.shape:
            raise UnsafeFunction(
                f"batch_invariant: result{path} has shape {alone.shape} for a batch of 1 and {among.shape} for one "
                f"of {whole.batch}, and out_axes is {axis}; accepted: results with an axis of rows that out_axes "
                "names. Compute a number of the whole batch, such as a mean loss, outside."
            )
        x = x if is_mapped else jnp.broadcast_to(jnp.asarray(x)[None], (count, *alone.shape))
        before, after = alone.shape[: rows.axis], alone.shape[rows.axis + 1 :]
        x = x.reshape(count, *before, rows.outer, rows.inner, *after)
        x = jnp.moveaxis(x, 0, rows.axis + 1)
        out.append(x.reshape(*before, rows.outer * count * rows.inner, *after))
    return jax.tree.unflatten(jax.tree.structure(one), out)
