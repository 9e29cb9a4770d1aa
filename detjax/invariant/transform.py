"""`batch_invariant`: a function of a batch whose rows depend on themselves alone, in every bit."""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, get_args

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax import Array, tree_util
from jax.extend import core
from jax.interpreters import partial_eval

from detjax import backends, compilation
from detjax.invariant import arguments, interpreter
from detjax.invariant.arguments import Leaves
from detjax.invariant.batch_axis import Mixing, Rows, follow
from detjax.invariant.equations import Program

type OnUnsafe = Literal["refuse", "warn"]

_ADVICE: Final = {
    Mixing.SUM: (
        "A row would depend on the others. Compute it for each row (batch norm: use its running averages; a loss: "
        "return one number a row and average outside)"
    ),
    Mixing.SLOT: (
        "A row would depend on its place in the batch. Make the value from the row (random numbers: pass a key a row, "
        "with a batch axis)"
    ),
}


_tracing = jax.make_user_context(False)
"""Whether a function is being traced for rows already, so that a layer of it need not keep them apart itself."""


class UnsafeFunction(ValueError):
    """A function whose rows cannot be kept apart. Its message names the operations and their lines.

    Example:
        >>> try:
        ...     detjax.batch_invariant(lambda x: x - jnp.mean(x, axis=0, keepdims=True))(jnp.ones((2, 3)))
        ... except detjax.UnsafeFunction:
        ...     print("rows would meet")
        ...
        rows would meet
    """


class UnsafeFunctionWarning(UserWarning):
    """What `UnsafeFunction` says, as a warning."""


def batch_invariant(
    fn: Callable[..., Any],
    batch_axes: Any = 0,
    out_axes: Any = 0,
    *,
    on_unsafe: OnUnsafe = "refuse",
) -> Callable[..., Any]:
    """Returns `fn` with rows that do not depend on the batch: row i of the result is `fn` of row i alone, in every bit.

    `fn` is traced for a batch of one. Products of a row's values with weights, and lookups in tables, are computed for
    all rows at once by `detjax.ops`; everything else keeps to its row. So the result does not depend on how many rows
    there are, on where a row stands, or on what the others hold. It works under `jax.jit` (on GPUs `detjax.jit`),
    `jax.grad` (in reverse mode, once), `jax.vmap` and `jax.lax.scan`.

    Gradients of rows depend on the row alone too. Those of weights are sums over the batch: in ascending order of rows,
    in float32, rounded once for each use of the weight (`detjax.ops.matmul` says how products add).

    Args:
        fn: a function of arrays and of anything else; what is not an array is static. Or a Flax module: the result has
            the arguments of an NNX module's call, or of a Linen module's `apply`. As a decorator of an NNX class it
            changes the class's call. What a call writes into an NNX module is refused.
        batch_axes: for each positional argument, the axis of its rows: an integer, None for what all rows share (such
            as weights), or a pytree of them, as `in_axes` of `jax.vmap`. One integer holds for all arguments. A
            module's own variables come before these arguments, and are shared. Keyword arguments are shared.
        out_axes: the axis of the rows in the results, likewise.
        on_unsafe: what happens where `fn` adds numbers of different rows, or gives a row numbers that depend on its
            place: "refuse" raises, "warn" warns and returns what `fn` gives for each row alone.

    Raises:
        TypeError: an argument that has rows is not an array, or fn is a class other than of NNX modules.
        UnsafeFunction: see `on_unsafe`; when called. A result has no axis of rows; when called.
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
    make = functools.partial(_invariant, batch_axes=batch_axes, out_axes=out_axes, on_unsafe=on_unsafe)
    if isinstance(fn, nn.Module):
        return make(fn.apply, shared=1)
    if isinstance(fn, nnx.Module):
        return functools.partial(make(type(fn).__call__, shared=1), fn)
    if isinstance(fn, type) and issubclass(fn, nnx.Module):
        decorated: Any = fn
        decorated.__call__ = make(decorated.__call__, shared=1)
        return decorated
    if isinstance(fn, type):
        raise TypeError(f"batch_invariant: fn is the class {fn.__name__}; accepted: functions, modules, NNX classes")
    return make(fn, shared=0)


def _invariant(
    fn: Callable[..., Any], *, batch_axes: Any, out_axes: Any, on_unsafe: OnUnsafe, shared: int
) -> Callable[..., Any]:
    """See `batch_invariant`; so many arguments before those of `batch_axes` are shared by all rows."""
    programs: dict[Any, Callable[..., Any]] = {}

    @functools.wraps(fn, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        if _tracing.value:
            return fn(*args, **kwargs)
        given, arrays = Leaves.from_call("batch_invariant", batch_axes, args, kwargs, shared)
        if given not in programs:
            programs[given] = _program(fn, given, out_axes, on_unsafe)
        return programs[given](*arrays)

    return call


def _program(fn: Callable[..., Any], given: Leaves, out_axes: Any, on_unsafe: OnUnsafe) -> Callable[..., Any]:
    """The invariant function of the arrays among the arguments."""
    array_axes = given.array_axes

    def function(*arrays: Any) -> Any:
        leaves = given.with_arrays(arrays)
        args, kwargs = jax.tree.unflatten(given.tree, leaves)
        results = fn(*args, **kwargs)
        _check_unchanged((args, kwargs), leaves, given.tree)
        return results

    @compilation.jit
    def invariant(*arrays: Array) -> Any:
        if backends.backend() == backends.STOCK:
            return function(*arrays)
        compilation.require_pinned_program("batch_invariant")
        count = arguments.count_rows("batch_invariant", arrays, array_axes)
        checked = max(2, count)
        whole = _checked(function, arrays, array_axes, checked, on_unsafe)
        jaxpr, one = _traced(function, arrays, array_axes, 1)
        flags = [axis is not None for axis in array_axes]
        values = [x if axis is None else _as_examples(x, axis) for x, axis in zip(arrays, array_axes, strict=True)]
        results, made = interpreter.run(Program.from_jaxpr(jaxpr), values, flags, count)
        return _as_batch(results, made, one, whole, out_axes, count, checked)

    return invariant


def _check_unchanged(arguments: Any, leaves: Sequence[Any], tree: Any) -> None:
    """Raises if a call wrote into an NNX module among its arguments: what it wrote would be lost."""
    modules = [x for x in jax.tree.leaves(arguments, is_leaf=_is_module) if _is_module(x)]
    if not modules:
        return
    after, tree_after = jax.tree.flatten(arguments)
    if tree_after == tree and all(x is y for x, y in zip(after, leaves, strict=True)):
        return
    known = {id(x) for x in leaves}
    paths = [path for module in modules for path, x in tree_util.tree_leaves_with_path(module) if id(x) not in known]
    names = ", ".join(sorted({tree_util.keystr(path) for path in paths})) or "its structure"
    raise UnsafeFunction(
        f"batch_invariant: a call writes into {type(modules[0]).__name__}: {names}. What it writes would be one "
        "row's, and lost. Switch it off (module.eval()), or pass the state as an argument with rows and "
        "return it."
    )


def _is_module(x: Any) -> bool:
    return isinstance(x, nnx.Module)


def _as_examples(x: Array, axis: int) -> Array:
    """An array with the rows as its first axis, before those of a batch of one."""
    return jnp.expand_dims(jnp.moveaxis(x, axis, 0), axis % x.ndim + 1)


def _traced(
    fn: Callable[..., Any], arrays: Sequence[Array], axes: Sequence[int | None], rows: int
) -> tuple[core.Jaxpr, Any]:
    """The jaxpr of a function for a batch of so many rows, and the shapes of its results."""

    def shape(x: Array, axis: int | None) -> jax.ShapeDtypeStruct:
        sizes = list(x.shape)
        if axis is not None:
            sizes[axis] = rows
        return jax.ShapeDtypeStruct(tuple(sizes), x.dtype, weak_type=jax.typeof(x).weak_type)

    with _tracing(True):
        jaxpr, shapes = jax.make_jaxpr(fn, return_shape=True)(*map(shape, arrays, axes))
    return partial_eval.dce_jaxpr_consts(jaxpr, [True] * len(jaxpr.outvars), True)[0], shapes


def _checked(
    fn: Callable[..., Any], arrays: Sequence[Array], axes: Sequence[int | None], batch: int, on_unsafe: OnUnsafe
) -> Any:
    """Returns the shapes of a function's results, and raises or warns if it mixes the rows of a batch."""
    jaxpr, shapes = _traced(fn, arrays, axes, batch)
    places = [None if axis is None else Rows(axis % x.ndim) for x, axis in zip(arrays, axes, strict=True)]
    _, findings = follow(jaxpr, batch, places)
    unsafe = [finding for finding in findings if finding.changes_numbers]
    if unsafe:
        lines = [f"  {finding}. {_ADVICE[finding.mixing]}." for finding in dict.fromkeys(unsafe)]
        message = "\n".join(("batch_invariant: rows of the batch meet.", *lines))
        if on_unsafe == "refuse":
            raise UnsafeFunction(f"{message}\non_unsafe='warn' computes what the function gives for each row alone.")
        warnings.warn(UnsafeFunctionWarning(message), stacklevel=2)
    return shapes


def _as_batch(
    results: Sequence[Any], made: Sequence[bool], one: Any, whole: Any, out_axes: Any, count: int, checked: int
) -> Any:
    """The results `[B, ...]` with their rows where the function has them, as the pytree that it returns.

    Args:
        results: of the program for one example.
        made: which depend on the example.
        one: the shapes for a batch of one.
        whole: the shapes for a batch of `checked` rows.
        out_axes: see `batch_invariant`.
        count: the number of rows.
        checked: see `whole`.
    """
    paths = [tree_util.keystr(path) for path, _ in tree_util.tree_leaves_with_path(one)]
    out = []
    axes = arguments.spread("batch_invariant", "out_axes", out_axes, one)
    for x, is_mapped, path, alone, among, axis in zip(
        results, made, paths, jax.tree.leaves(one), jax.tree.leaves(whole), axes, strict=True
    ):
        if axis is None and not is_mapped:
            out.append(jnp.asarray(x))
            continue
        expected = list(alone.shape)
        has_rows = axis is not None and -alone.ndim <= axis < alone.ndim and alone.shape[axis] == 1
        if axis is not None and has_rows:
            expected[axis] = checked
        if axis is None or not has_rows or tuple(expected) != among.shape:
            raise UnsafeFunction(
                f"batch_invariant: result{path} has shape {alone.shape} for a batch of 1 and {among.shape} for one "
                f"of {checked}, and out_axes says {axis}; accepted: results whose axis of rows out_axes names. A "
                "number of the whole batch, such as a mean loss, is for the caller to add up."
            )
        x = x if is_mapped else jnp.broadcast_to(jnp.asarray(x)[None], (count, *alone.shape))
        axis = axis % alone.ndim
        out.append(jnp.moveaxis(jnp.squeeze(x, axis + 1), 0, axis))
    return jax.tree.unflatten(jax.tree.structure(one), out)
