"""Traces: digests of every equation's results, which show where two runs first diverge."""

import dataclasses
import functools
import io
import json
import math
import operator
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from jax import Array, lax, tree_util
from jax.interpreters import partial_eval

from detjax.audit.bisection import digests, flat_programs, targets
from detjax.audit.bisection.flat_programs import FlatProgram, Key, Step
from detjax.audit.bisection.layer_names import named_layers
from detjax.invariant import arguments, equations
from detjax.invariant.arguments import Leaves
from detjax.invariant.places import UNKNOWN, Place, Rows, Shared
from detjax.runtime import fingerprints

type Level = Literal["equations", "layers"]

_FORMAT: Final = 1
ARGUMENT: Final = "argument"
"""The primitive of entries that are arguments."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """An array with digests in a trace.

    Attributes:
        primitive: the equation's primitive; "argument" for an argument.
        layer: the names of its scopes, joined by slashes; an argument's own name.
        line: the user's line, as file and number; empty if unknown.
        path: for each surrounding scan its index and -1, or -2 if it runs backwards; then the equation's index.
        result: its index among the equation's results.
        shape: the shape of a row; of the whole array if it has no rows.
        dtype: the dtype's name.
        leaves_layer: whether equations of other layers read it.
        mixes_rows: whether it combines different rows, so that runs of other batches may differ.
    """

    primitive: str
    layer: str
    line: str
    path: tuple[int, ...]
    result: int
    shape: tuple[int, ...]
    dtype: str
    leaves_layer: bool
    mixes_rows: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """The digests of one run.

    Attributes:
        entries: the arrays with digests: the arguments, then the results of equations in order.
        digests: for each entry uint32 `[*iterations, B, blocks]`: iterations of the surrounding scans, rows of the
            batch (B = 1 without rows), and blocks of a row.
        batch: the number of rows; None if nothing has rows.
        level: "equations" or "layers".
        fingerprint: the fields of `detjax.fingerprint()`.
        run: the function and its arguments; None if the trace was read from a file.
    """

    entries: tuple[Entry, ...]
    digests: Sequence[np.ndarray]
    batch: int | None
    level: str
    fingerprint: Mapping[str, Any]
    run: "Run | None" = None

    def save(self, file: Path) -> None:
        """Writes the trace as a NumPy archive."""
        description = {
            "format": _FORMAT,
            "batch": self.batch,
            "level": self.level,
            "fingerprint": dict(self.fingerprint),
            "entries": [dataclasses.asdict(entry) for entry in self.entries],
            "shapes": [digest.shape for digest in self.digests],
        }
        flat = np.concatenate([np.empty(0, np.uint32), *(digest.reshape(-1) for digest in self.digests)])
        with open(file, "wb") as out:
            np.savez_compressed(out, digests=flat, description=np.frombuffer(json.dumps(description).encode(), "u1"))

    @classmethod
    def load(cls, file: Path) -> "Trace":
        """Reads a saved trace.

        Raises:
            OSError: the file cannot be read.
            ValueError: it does not hold a trace.
        """
        content = Path(file).read_bytes()
        try:
            if not zipfile.is_zipfile(io.BytesIO(content)):
                raise ValueError("it is not a NumPy archive")
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                flat, description = arrays["digests"], json.loads(arrays["description"].tobytes())
            if description["format"] != _FORMAT:
                raise ValueError(f"format {description['format']} is not {_FORMAT}")
            shapes = description["shapes"]
            cuts = np.cumsum([math.prod(shape) for shape in shapes])
            parts = np.split(flat, cuts)
            if parts.pop().size or flat.dtype != np.uint32 or len(description["entries"]) != len(shapes):
                raise ValueError("its digests do not match its entries")
            entries = [
                Entry(**{**entry, "path": tuple(entry["path"]), "shape": tuple(entry["shape"])})
                for entry in description["entries"]
            ]
            by_entry = tuple(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))
            return cls(tuple(entries), by_entry, description["batch"], description["level"], description["fingerprint"])
        except (KeyError, TypeError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(
                f"{file}: not a trace ({error}); accepted: files from Trace.save or detjax trace"
            ) from None


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """A function's steps with arguments.

    Attributes:
        program: the steps.
        leaves: the arrays among the arguments.
        places: the places of the arrays.
        batch: the number of rows, or None.
        jit: compiles programs.
        keys: the key of each entry of the trace, without arguments.
    """

    program: FlatProgram
    leaves: tuple[Any, ...]
    places: tuple[Place, ...]
    batch: int | None
    jit: Callable[..., Any]
    keys: tuple[Key, ...]

    @functools.cached_property
    def seals(self) -> frozenset[Key]:
        """The results with digests, which pass through a barrier."""
        return frozenset(self.keys)

    def sealed(self, step: Step, outputs: list[Any]) -> list[Any]:
        """Returns a step's results, through a barrier where the trace has digests; see `trace_digests`."""
        keys = [(step.number, k) for k in range(len(outputs))]
        return [lax.optimization_barrier(x) if key in self.seals else x for key, x in zip(keys, outputs, strict=True)]

    def argument(self, number: int, row: int | None) -> np.ndarray:
        """Returns an argument, or one of its rows, as `values` does."""
        cut = np.asarray(_rows(self.leaves[number], self.places[number], self.batch))
        return cut if row is None else cut[min(row, cut.shape[0] - 1)]

    @property
    def results(self) -> list[Key]:
        """The function's results that equations compute."""
        keys = {number: (step.number, k) for step in self.program.steps for k, number in enumerate(step.outputs)}
        return [keys[atom] for atom in self.program.results if isinstance(atom, int) and atom in keys]

    def values(self, keys: Sequence[Key], rows: Sequence[int | None], is_sealed: bool = True) -> dict[Key, np.ndarray]:
        """Runs the function again and returns results of steps, `[*iterations, ...]`.

        Args:
            keys: the results to return.
            rows: the row of each result; None for all rows, along an axis after the iterations.
            is_sealed: whether arrays with digests stay separate results of the program. If not, the program is the one
                that `fn` compiles to, except for the returned results.
        """
        wanted = dict(zip(keys, rows, strict=True))

        def visit(step: Step, outputs: list[Any]) -> tuple[list[Any], dict[Key, Any]]:
            outputs = self.sealed(step, outputs) if is_sealed else outputs
            seen = {}
            for k, (x, place) in enumerate(zip(outputs, step.places, strict=True)):
                if (step.number, k) in wanted:
                    cut, row = _rows(x, place, self.batch), wanted[step.number, k]
                    seen[step.number, k] = cut if row is None else cut[min(row, cut.shape[0] - 1)]
            return outputs, seen

        got = self.jit(lambda leaves: self.program.run(leaves, visit)[1])(self.leaves)
        return {key: np.asarray(x) for key, x in got.items()}


def trace_digests(
    fn: Callable[..., Any], batch_axes: Any = None, *, level: Level = "equations", jit: Callable[..., Any] = jax.jit
) -> Callable[..., tuple[Any, Trace]]:
    """Returns a function that returns `fn`'s results and a `Trace` of the run, for `detjax.bisect`.

    Each array with digests passes through a barrier, so that later equations read the array that was digested. XLA may
    fuse the rest differently than in `fn`: if runs of `fn` differ and traced runs do not, the cause is a fusion that
    the barriers prevent.

    Layers are named by `jax.named_scope`. Linen modules name their layers; NNX modules among the arguments get their
    paths as names. Within scans each iteration has digests; for while loops, branches and kernels only the results do.

    Args:
        fn: a function of arrays and static values (everything that is not an array). Or a Flax module: the result takes
            the arguments of an NNX module's call, or of a Linen module's `apply`.
        batch_axes: for each positional argument the axis of its rows, as in `detjax.batch_invariant`. Each row has its
            own digests, so that traces of different batch sizes can be compared. None: nothing has rows.
        level: "equations": the results of each equation have digests, except for equations that only move elements.
            "layers": only values that leave a named layer, which takes less time.
        jit: compiles the program; `detjax.jit` for functions under contract.

    Raises:
        ValueError: the level is unknown; or, when called, batches have different sizes or no rows, or `batch_axes` does
            not fit.
        TypeError: an argument with rows is not an array; when called.

    Example:
        >>> traced = detjax.trace_digests(lambda x: jnp.sin(x) + 1, batch_axes=0)
        >>> result, trace = traced(jnp.arange(4.0))
        >>> result.shape
        (4,)
    """
    if level not in get_args(Level.__value__):
        raise ValueError(f"trace_digests: level is {level!r}; accepted: {', '.join(get_args(Level.__value__))}")
    if isinstance(fn, nn.Module):
        return _Traced(fn.apply, batch_axes, 1, level, jit)
    if isinstance(fn, nnx.Module):
        return functools.partial(_Traced(operator.call, batch_axes, 1, level, jit), fn)
    return _Traced(fn, batch_axes, 0, level, jit)


class _Traced:
    """The function of `trace_digests`; all rows share the first `shared` arguments, before those in `batch_axes`."""

    def __init__(
        self, fn: Callable[..., Any], batch_axes: Any, shared: int, level: Level, jit: Callable[..., Any]
    ) -> None:
        self._fn = fn
        self._batch_axes = batch_axes
        self._shared = shared
        self._level = level
        self._jit = jit
        self._compiled: list[_Compiled] = []

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Trace]:
        signature, arrays = Leaves.from_call("trace_digests", self._batch_axes, args, kwargs, self._shared)
        compiled = next((one for one in self._compiled if one.serves(signature, arrays)), None)
        if compiled is None:
            names = [tree_util.keystr(path) for path, _ in tree_util.tree_leaves_with_path((args, kwargs))]
            named = [name for name, array in zip(names, signature.is_array, strict=True) if array]
            named_axes = list(zip(named, signature.array_axes, strict=True))
            function = functools.partial(_call, self._fn, signature)
            compiled = _Compiled(function, signature, arrays, named_axes, self._level, self._jit)
            self._compiled.append(compiled)
        return compiled(arrays)


def _call(fn: Callable[..., Any], signature: Leaves, *arrays: Any) -> Any:
    args, kwargs = jax.tree.unflatten(signature.tree, signature.with_arrays(arrays))
    with named_layers((args, kwargs)):
        return fn(*args, **kwargs)


class _Compiled:
    """A function with digests for arguments of one kind."""

    def __init__(
        self,
        fn: Callable[..., Any],
        signature: Leaves,
        arrays: Sequence[Any],
        named_axes: Sequence[tuple[str, int | None]],
        level: str,
        jit: Callable[..., Any],
    ) -> None:
        self._given = signature
        self._types = [(x.shape, x.dtype) for x in arrays]
        axes = [axis for _, axis in named_axes]
        has_rows = any(axis is not None for axis in axes)
        self._batch = arguments.count_rows("trace_digests", arrays, axes) if has_rows else None
        self._level = level
        self._jit = jit
        self._places: tuple[Place, ...] = tuple(
            Shared() if axis is None else Rows(axis % x.ndim) for x, axis in zip(arrays, axes, strict=True)
        )
        # A new function, because JAX caches traces, and names of layers are not part of the key.
        jaxpr, shapes = jax.make_jaxpr(lambda *arrays: fn(*arrays), return_shape=True)(*arrays)
        jaxpr = partial_eval.dce_jaxpr_consts(jaxpr, [True] * len(jaxpr.outvars), True)[0]
        self._tree = jax.tree.structure(shapes)
        self.program = flat_programs.flatten(jaxpr, self._batch, self._places)
        self._keys, entries = _observed(self.program, self._batch, level)
        self._entries = (*map(self._argument, arrays, [name for name, _ in named_axes], self._places), *entries)
        self._run = jit(self._with_digests)
        self._fingerprint = dataclasses.asdict(fingerprints.fingerprint())
        self._seen: tuple[tuple[Any, ...], list[Array | None]] = ((), [])
        self._shapes: list[tuple[int, ...]] = []

    def serves(self, signature: Leaves, arrays: Sequence[Any]) -> bool:
        """Returns whether a call has arguments of this kind."""
        # Weights are many, and the same arrays in every call.
        previous = self._seen[0] or [None] * len(arrays)
        return signature == self._given and all(
            x is before or (x.shape, x.dtype) == kind
            for x, before, kind in zip(arrays, previous, self._types, strict=True)
        )

    def __call__(self, arrays: tuple[Any, ...]) -> tuple[Any, Trace]:
        shared = self._shared_digests(arrays)
        # No copy to the host starts here: JAX 0.11.2 aborts a process that exits during one on a CPU.
        results, others = self._run(arrays)
        digests = _Digests(shared, others, self._shapes)
        trace = Trace(self._entries, digests, self._batch, self._level, self._fingerprint, self._run_of(arrays))
        return jax.tree.unflatten(self._tree, results), trace

    def _run_of(self, arrays: tuple[Any, ...]) -> Run:
        return Run(self.program, arrays, self._places, self._batch, self._jit, self._keys)

    def _shared_digests(self, arrays: tuple[Any, ...]) -> list[Array | None]:
        """Returns the digests of arguments without rows, None for others; reuses them for arrays of the last call."""
        shared = tuple(None if isinstance(p, Rows) else x for x, p in zip(arrays, self._places, strict=True))
        if len(shared) == len(self._seen[0]) and all(map(operator.is_, shared, self._seen[0])):
            return self._seen[1]
        before = dict(zip(map(id, self._seen[0]), self._seen[1], strict=True))

        def digest_of(x: Any) -> Array:
            known = before.get(id(x))
            return _digest(x, Shared(), self._batch) if known is None else known

        digests = [None if x is None else digest_of(x) for x in shared]
        # NumPy arrays may be modified before the next call.
        self._seen = ((), []) if any(isinstance(x, np.ndarray) for x in shared) else (shared, digests)
        return digests

    def _with_digests(self, arrays: tuple[Any, ...]) -> tuple[list[Any], Array]:
        """Returns the results, and in one array all digests except for arguments without rows."""
        results, seen = self._observed(arrays)
        rows = [
            _rows(x, place, self._batch)
            for x, place in zip(arrays, self._places, strict=True)
            if isinstance(place, Rows)
        ]
        parts = [*digests.digests(rows), *(seen[key] for key in self._keys)]
        self._shapes = [digest.shape for digest in parts]
        return results, jnp.concatenate([jnp.empty(0, jnp.uint32), *(digest.reshape(-1) for digest in parts)])

    def _observed(self, arrays: tuple[Any, ...]) -> tuple[list[Any], dict[Key, Any]]:
        run = self._run_of(arrays)

        def visit(step: Step, outputs: list[Any]) -> tuple[list[Any], dict[Key, Any]]:
            outputs = run.sealed(step, outputs)
            keys = [(step.number, k) for k in range(len(outputs))]
            zipped = zip(keys, outputs, step.places, strict=True)
            return outputs, {key: _rows(x, place, self._batch) for key, x, place in zipped if key in run.seals}

        def reduction(rows: dict[Key, Any]) -> dict[Key, Any]:
            return dict(zip(rows, digests.digests([*rows.values()]), strict=True))

        return self.program.run(arrays, visit, reduction)

    def _argument(self, x: Any, name: str, place: Place) -> Entry:
        shape = jax.eval_shape(lambda x: _rows(x, place, self._batch), x)
        return Entry(ARGUMENT, name, "", (), 0, shape.shape[1:], str(shape.dtype), False, False)


class _Digests(Sequence[np.ndarray]):
    """The digests of a trace, which stay on the device until one is read.

    Args:
        shared: digests of arguments without rows; None for other arguments.
        others: all other digests, flat: arguments with rows, then results of equations.
        shapes: the shapes of the other digests.
    """

    def __init__(self, shared: Sequence[Array | None], others: Array, shapes: Sequence[tuple[int, ...]]) -> None:
        self._shared, self._others, self._shapes = shared, others, shapes

    @functools.cached_property
    def _fetched(self) -> tuple[np.ndarray, ...]:
        cuts = np.cumsum([math.prod(shape) for shape in self._shapes])
        parts = np.split(np.asarray(self._others), cuts)[: len(self._shapes)]
        others = iter([part.reshape(shape) for part, shape in zip(parts, self._shapes, strict=True)])
        arguments = [next(others) if x is None else np.asarray(x) for x in self._shared]
        return *arguments, *others

    def __getitem__(self, index: Any) -> Any:
        return self._fetched[index]

    def __len__(self) -> int:
        return len(self._fetched)


def _rows(x: Any, place: Place, batch: int | None) -> Array:
    """Returns an array, or the data of random keys, as `digests.in_rows` does."""
    return digests.in_rows(digests.plain(x), place, batch)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _digest(x: Any, place: Place, batch: int | None) -> Array:
    return digests.digest(_rows(x, place, batch))


def _observed(program: FlatProgram, batch: int | None, level: str) -> tuple[tuple[Key, ...], list[Entry]]:
    """Returns the keys of results with digests, and their entries."""
    keys, entries = [], []
    outside: dict[int, set[int]] = {}
    for part, step in program.all_steps():
        if id(part) not in outside:
            outside[id(part)] = flat_programs.leaving(part)
        for k, (var, place) in enumerate(zip(step.eqn.outvars, step.places, strict=True)):
            leaves = step.outputs[k] in outside[id(part)]
            wanted = flat_programs.is_observed(step) if level == "equations" else leaves and step.body is None
            if not wanted or not hasattr(equations.aval(var), "shape"):
                continue
            shape = jax.eval_shape(lambda x, place=place: _rows(x, place, batch), equations.aval(var))
            keys.append((step.number, k))
            entries.append(
                Entry(
                    step.primitive,
                    step.layer,
                    step.line,
                    step.path,
                    k,
                    shape.shape[1:],
                    str(shape.dtype),
                    leaves,
                    place is UNKNOWN,
                )
            )
    return tuple(keys), entries


def traced(name: str) -> Trace:
    """Returns the trace of a function that a module defines.

    Args:
        name: "module:function", also from the working directory. The function has no parameters and returns
            `(fn, args)` or `(fn, args, options)`: the function to trace, its positional arguments, and options of
            `trace_digests` by name.

    Raises:
        ValueError: the function cannot be imported, or returns something else.
    """
    target = targets.named_object("MODULE:FUNCTION", name)()
    if not isinstance(target, tuple) or len(target) not in (2, 3) or not isinstance(target[1], tuple):
        raise ValueError(f"{name} returns {type(target).__name__}; accepted: (fn, args) or (fn, args, options)")
    fn, args, *options = target
    return trace_digests(fn, **(options[0] if options else {}))(*args)[1]
