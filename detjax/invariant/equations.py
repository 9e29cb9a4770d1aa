"""Equations of a traced function: the kind of each, which decides its bits, and the line that it comes from."""

import contextlib
import dataclasses
import enum
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax._src import source_info_util  # JAX has no public way from an equation to the user's line
from jax.extend import core
from jax.interpreters import partial_eval

from detjax import ops
from detjax.runtime import backends, compilation, varying


class Kind(enum.Enum):
    """The reason for the bits of an equation's results."""

    CALL = "contains other equations"
    ROUNDED = "single elements, rounded once"
    APPROXIMATED = "single elements, by the device's own approximation"
    EXACT = "moves, selects or counts: every order of work gives the same bits"
    SUM = "adds or otherwise reduces numbers in an order that the compiler chooses"
    OPERATION = "an operation of detjax: under contract, with a batching rule that keeps the bits of rows"
    OPAQUE = "computed in an unknown way"


CALLS: Final = frozenset(
    "jit pjit closed_call core_call remat2 checkpoint custom_jvp_call custom_vjp_call custom_vmap_call".split()
)
"""Primitives that hold one function with the same arguments."""

OWN_RULES: Final = frozenset(("custom_jvp_call", "custom_vjp_call", "custom_vmap_call"))
"""Calls whose function has its own derivative or batching rule."""

_LOOPS: Final = frozenset(("scan", "while", "cond", "shard_map"))

_ROUNDED: Final = frozenset("add sub mul div sqrt add_any integer_pow square convert_element_type".split())

_MADE_OF_REALS: Final = frozenset("mul div sqrt integer_pow square abs sign".split())
"""Primitives that compute a complex number by several real operations."""

_APPROXIMATED: Final = frozenset(
    (
        "exp exp2 expm1 log log1p tanh logistic erf erfc erf_inv sin cos tan pow rsqrt cbrt sinh cosh asin acos atan "
        "atan2 asinh acosh atanh lgamma digamma rem"
    ).split()
)


def _with_reason(reason: str, primitives: str) -> dict[str, str]:
    return dict.fromkeys(primitives.split(), reason)


_EXACT_ON_ELEMENTS: Final[Mapping[str, str]] = {
    **_with_reason(
        "keeps or picks the bits of an element",
        "copy stop_gradient optimization_barrier sharding_constraint pvary real imag complex select_n "
        "bitcast_convert_type",
    ),
    **_with_reason("changes only the sign bit", "neg abs conj"),
    **_with_reason("has one exact result for each number", "sign floor ceil round"),
    **_with_reason("rounds one element once, to nearest, ties to even, as IEEE 754 specifies", "reduce_precision"),
    **_with_reason("is IEEE 754's maximum or minimum of one pair, -0.0 below 0.0, in one instruction", "max min clamp"),
    **_with_reason("steps to the next number by its bits as an integer", "nextafter"),
    **_with_reason(
        "compares numbers, where zeros of both signs are equal and NaN equals nothing",
        "eq ne lt le gt ge eq_to lt_to le_to is_finite",
    ),
    **_with_reason(
        "is integer logic", "and or xor not shift_left shift_right_logical shift_right_arithmetic population_count clz"
    ),
}
"""Primitives whose results have the shape of their arguments, exact element by element, each with the reason."""

_EXACT_MOVES: Final[Mapping[str, str]] = {
    **_with_reason(
        "moves bits to positions that shapes and indices determine",
        "broadcast_in_dim reshape squeeze transpose concatenate pad slice dynamic_slice rev "
        "dynamic_update_slice gather split unstack stack tile",
    ),
    **_with_reason("counts", "iota"),
    **_with_reason("is the first of equal numbers, by a comparison that includes indices", "argmax argmin"),
    **_with_reason(
        "is one of the numbers in every order, except for the sign of zero and the bits of NaN: see `EXTREMES`",
        "reduce_max reduce_min cummax cummin reduce_window_max reduce_window_min scatter-min scatter-max",
    ),
    **_with_reason("is integer logic, the same in every order", "reduce_and reduce_or reduce_xor"),
    **_with_reason("has one order if it is stable; all zeros are equal, and all NaN", "sort"),
    **_with_reason("orders by bits, and equal numbers by index", "top_k"),
    **_with_reason("computes integers from a key", "random_bits random_fold_in random_split random_seed"),
}
"""Further exact primitives, each with the reason."""

EXACT: Final[Mapping[str, str]] = {**_EXACT_ON_ELEMENTS, **_EXACT_MOVES}
"""Primitives that give the same bits in every order and in any generated code, each with the reason.
`detjax.audit.certification.freedoms` covers what they leave open, such as the sign of a zero."""

EXTREMES: Final = frozenset(
    "reduce_max reduce_min cummax cummin reduce_window_max reduce_window_min scatter-max scatter-min".split()
)
"""Maxima and minima: exact for integers. For floating-point numbers the order decides the sign of zero, the bits of
NaN, and on CPUs the choice among subnormal numbers."""

_SUMS: Final = frozenset(
    (
        "dot_general reduce_sum reduce_prod cumsum cumprod cumlogsumexp conv_general_dilated reduce_window_sum "
        "reduce_window reduce ragged_dot_general ragged_dot scatter-add scatter_add scatter-mul scatter_mul psum psum2 "
        "psum_invariant psum_scatter reduce_scatter fft select_and_scatter_add"
    ).split()
)

_ANY_REDUCTION: Final = ("reduce", "reduce_window")
"""Reductions by a user's function, whose order matters in any dtype."""

ELEMENTWISE: Final = _ROUNDED | _APPROXIMATED | frozenset((*_EXACT_ON_ELEMENTS, "random_wrap", "random_unwrap"))
"""Primitives whose results have the shape of their arguments, element by element."""


def kind(eqn: core.JaxprEqn) -> Kind:
    """Returns the kind of an equation.

    Sums of integers are exact. Complex numbers take several real operations, so operations that are exact or rounded
    once for real numbers are approximations for them, unless they keep real and imaginary parts separate.
    """
    name = eqn.primitive.name
    if operation(eqn) is not None:
        return Kind.OPERATION
    if name in CALLS or name in _LOOPS:
        return Kind.CALL
    if name in _MADE_OF_REALS and any(map(is_complex, (*eqn.invars, *eqn.outvars))):
        return Kind.APPROXIMATED
    if name in EXACT:
        return Kind.EXACT
    if name in _ANY_REDUCTION:
        return Kind.SUM
    if name in ELEMENTWISE or name in _SUMS:
        if not any(is_inexact(v) for v in (*eqn.invars, *eqn.outvars)):
            return Kind.EXACT
        return Kind.SUM if name in _SUMS else Kind.ROUNDED if name in _ROUNDED else Kind.APPROXIMATED
    return Kind.OPAQUE


def is_exact(eqn: core.JaxprEqn) -> bool:
    """Returns whether an equation has the same bits however it is computed: it moves, selects or widens numbers."""
    if eqn.primitive.name != "convert_element_type":
        return kind(eqn) is Kind.EXACT
    operand, result = (aval(v).dtype for v in (*eqn.invars, *eqn.outvars))
    if not (jnp.issubdtype(operand, jnp.floating) and jnp.issubdtype(result, jnp.floating)):
        return False
    operand, result = jnp.finfo(operand), jnp.finfo(result)
    return operand.nmant <= result.nmant and operand.nexp <= result.nexp


def aval(atom: Any) -> Any:
    """Returns the abstract value of a variable or literal, which has a shape and a dtype if it is an array."""
    return atom.aval


def is_inexact(atom: Any) -> bool:
    """Returns whether a variable or literal of a jaxpr holds floating or complex numbers."""
    return jnp.issubdtype(getattr(aval(atom), "dtype", jnp.int32), jnp.inexact)


def is_complex(atom: Any) -> bool:
    """Returns whether a variable or literal of a jaxpr holds complex numbers."""
    return jnp.issubdtype(getattr(aval(atom), "dtype", jnp.int32), jnp.complexfloating)


def shapes(eqn: core.JaxprEqn) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of an equation's operands."""
    return tuple(tuple(getattr(aval(v), "shape", ())) for v in eqn.invars)


def operation(eqn: core.JaxprEqn) -> str | None:
    """Returns the name of the operation of detjax that an equation calls; None for other equations and for `stock`.

    Operations are recognized by the file that defines them, so a function of the same name elsewhere does not count. A
    function within an operation that has its own batching rule, such as its gradient, counts too.
    """
    name = eqn.primitive.name
    if name not in ("jit", "pjit", "custom_vmap_call") or backends.backend() == backends.STOCK:
        return None
    traced = body(eqn).debug_info
    defined = traced.func_filename if traced is not None else None
    if defined is None or not is_in_ops(defined):
        return None
    return str(eqn.params["name"]) if "name" in eqn.params else str(traced.func_name)


_OPERATIONS: Final = pathlib.Path(ops.__file__).parent


@functools.cache
def is_in_ops(file: str) -> bool:
    """Returns whether a file belongs to `detjax.ops`."""
    return _OPERATIONS in pathlib.Path(file).parents


def is_call(eqn: core.JaxprEqn) -> bool:
    """Returns whether an equation calls one function with its own arguments, other than an operation of detjax."""
    return eqn.primitive.name in CALLS and operation(eqn) is None


_BODIES: Final = ("call_jaxpr", "jaxpr", "call")
"""Parameters in which primitives of `CALLS` hold their function."""


def body(eqn: core.JaxprEqn) -> core.Jaxpr:
    """Returns the function that an equation of `CALLS` holds."""
    return next(eqn.params[name] for name in _BODIES if name in eqn.params)


def bodies(eqn: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """Yields every function that an equation holds."""
    for value in eqn.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, core.Jaxpr):
                yield part


def all_equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """Yields the equations of a jaxpr, including nested ones."""
    for eqn in jaxpr.eqns:
        yield eqn
        for part in bodies(eqn):
            yield from all_equations(part)


def line(eqn: core.JaxprEqn) -> str | None:
    """Returns the user's line that an equation comes from, with the layer's name if it has one."""
    source, name = source_line(eqn), layer(eqn)
    return None if source is None else source + (f" (in {name})" if name else "")


def source_line(eqn: core.JaxprEqn) -> str | None:
    """Returns the user's line that an equation comes from, as file and number."""
    frames = source_info_util.user_frames(eqn.source_info.traceback)
    # A call of a function from `detjax.jit` comes from the line that calls it.
    frame = next((frame for frame in frames if frame.file_name != compilation.__file__), None)
    return None if frame is None else f"{frame.file_name}:{frame.start_line}"


def line_outside(eqn: core.JaxprEqn, package: str) -> str:
    """Returns the line that an equation comes from: the first outside of a package, or else the last within it."""
    detjax = str(pathlib.Path(compilation.__file__).parents[1])
    frames = source_info_util.user_frames(eqn.source_info.traceback)
    frames = [frame for frame in frames if not frame.file_name.startswith(detjax)]
    frame = next((frame for frame in frames if f"/{package}/" not in frame.file_name), frames[-1] if frames else None)
    return "an unknown line" if frame is None else f"{frame.file_name}:{frame.start_line}"


def layer(eqn: core.JaxprEqn) -> str:
    """Returns the names of the scopes around an equation within its function, joined by slashes.

    `jnp.einsum` opens a scope named after its subscripts, which is left out.
    """
    return "/".join(name for name in str(eqn.source_info.name_stack).split("/") if "->" not in name)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """Equations in order, with their inputs, their results, and the values of further variables."""

    inputs: tuple[core.Var, ...]
    eqns: tuple[core.JaxprEqn, ...]
    results: tuple[Any, ...]
    constants: tuple[tuple[core.Var, Any], ...] = ()

    @classmethod
    def from_jaxpr(cls, jaxpr: core.Jaxpr) -> "Program":
        """Returns the program of a jaxpr."""
        constants = tuple(zip(jaxpr.constvars, jaxpr.consts, strict=True))
        return cls(tuple(jaxpr.invars), tuple(jaxpr.eqns), tuple(jaxpr.outvars), constants)

    def __call__(self, *values: Any) -> list[Any]:
        """Returns the results for values of the inputs."""
        env = Values(zip(self.inputs, values, strict=True))
        env.update(self.constants)
        for eqn in self.eqns:
            env.update(zip(eqn.outvars, bind(eqn, env.read(eqn.invars)), strict=True))
        return env.read(self.results)


class Values(dict[core.Var, Any]):
    """Maps variables to values."""

    def read(self, atoms: Sequence[Any]) -> list[Any]:
        """Returns the values of variables and literals."""
        return [atom.val if isinstance(atom, core.Literal) else self[atom] for atom in atoms]


def bind(eqn: core.JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Returns an equation's results for values of its operands, in the context in which it was traced."""
    with at_line(eqn):
        return _retyped(eqn, values) if varying.is_typed() else bound(eqn, values)


def bound(eqn: core.JaxprEqn, values: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """Returns an equation's results in the current context, by default with its own parameters."""
    results = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params if params is None else params))
    return list(results) if eqn.primitive.multiple_results else [results]


def _retyped(eqn: core.JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Returns an equation's results for values that may vary over other mesh axes than in its trace.

    Equations with nested programs are traced again, because their types are fixed by the traced values.
    """
    name, params = eqn.primitive.name, eqn.params
    if name in OWN_RULES or name == "shard_map":
        values = [varying.over(x, aval(v).manual_axis_type.varying) for x, v in zip(values, eqn.invars, strict=True)]
        return bound(eqn, values)
    if name in ("remat2", "checkpoint"):
        program = Program.from_jaxpr(body(eqn))
        return jax.checkpoint(program, policy=params["policy"], prevent_cse=params["prevent_cse"])(*values)
    if name in CALLS:
        return jax.jit(Program.from_jaxpr(body(eqn)).__call__)(*values)
    if name == "scan":
        program = Program.from_jaxpr(params["jaxpr"])
        consts, carry, xs = scan_arguments(eqn, values)

        def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            results = program(*consts, *carry, *xs)
            return results[: len(carry)], results[len(carry) :]

        carry, ys = varying.scan(step, carry, xs, params["length"], params["reverse"], params["unroll"])
        return [*carry, *ys]
    if name == "while":
        tests, after = (Program.from_jaxpr(params[name]) for name in ("cond_jaxpr", "body_jaxpr"))
        tested, consts, carry = while_arguments(eqn, values)
        return varying.while_loop(lambda c: tests(*tested, *c)[0], lambda c: after(*consts, *c), carry)
    if name == "cond":
        branches = [Program.from_jaxpr(branch) for branch in params["branches"]]
        return varying.switch(jnp.asarray(values[0]).astype(jnp.int32), branches, *values[1:])
    return bound(eqn, varying.over(list(values), varying.join(values)))


def without_types(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """Returns a jaxpr without the equations that mark values as varying over axes of a mesh.

    `bind` marks them again. Left in, they would turn each literal into a variable, which the compiler optimizes less
    than it does without a mesh. Functions with their own rules keep these equations.
    """
    if not varying.is_typed():
        return jaxpr
    same: dict[core.Var, Any] = {}
    read = lambda atom: atom if isinstance(atom, core.Literal) else same.get(atom, atom)  # noqa: E731
    eqns = []
    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        if eqn.primitive.name == "pvary":
            same.update(zip(eqn.outvars, operands, strict=True))
            continue
        params = eqn.params if eqn.primitive.name in OWN_RULES else _with_bodies(eqn, without_types)
        eqns.append(eqn.replace(invars=operands, params=params))
    return jaxpr.replace(eqns=eqns, outvars=[read(v) for v in jaxpr.outvars])


_PRINTS: Final = frozenset(("debug_print", "debug_callback"))


def without_prints(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """Returns a jaxpr without `jax.debug.print` and `jax.debug.callback`, and without values that only they read."""
    if not any(contains(eqn, _PRINTS) for eqn in jaxpr.eqns):
        return jaxpr
    return partial_eval.dce_jaxpr_consts(_unprinted(jaxpr), [True] * len(jaxpr.outvars), True)[0]


def _unprinted(jaxpr: core.Jaxpr) -> core.Jaxpr:
    eqns = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _PRINTS:
            continue
        if contains(eqn, _PRINTS):
            effects = frozenset(effect for effect in eqn.effects if type(effect).__name__ != "DebugEffect")
            eqn = eqn.replace(params=_with_bodies(eqn, _unprinted), effects=effects)
        eqns.append(eqn)
    effects = frozenset(effect for effect in jaxpr.effects if type(effect).__name__ != "DebugEffect")
    return jaxpr.replace(eqns=eqns, effects=effects)


def _with_bodies(eqn: core.JaxprEqn, changed: Callable[[core.Jaxpr], core.Jaxpr]) -> dict[str, Any]:
    """Returns an equation's parameters with each nested jaxpr replaced by `changed` of it."""

    def replaced(value: Any) -> Any:
        if isinstance(value, core.Jaxpr):
            return changed(value)
        return tuple(map(replaced, value)) if type(value) in (tuple, list) else value

    return {name: replaced(value) for name, value in eqn.params.items()}


def contains(eqn: core.JaxprEqn, primitives: frozenset[str]) -> bool:
    """Returns whether an equation, or one nested in it, has one of these primitives."""
    is_one = eqn.primitive.name in primitives
    return is_one or any(contains(inner, primitives) for part in bodies(eqn) for inner in part.eqns)


def closed_over(program: Any) -> set[core.Var]:
    """Returns the values that functions with their own gradients (`custom_vjp`) close over, also within calls."""
    closed: set[Any] = set()
    for eqn in program.eqns:
        if eqn.primitive.name == "custom_vjp_call":
            taken: Sequence[Any] = eqn.invars[: eqn.params["num_consts"]]
            closed.update(v for v in taken if isinstance(v, core.Var))
            continue
        for body in bodies(eqn):
            inner = closed_over(body)
            operands = eqn.invars[len(eqn.invars) - len(body.invars) :]  # the index of a branch comes first
            closed.update(v for v, inside in zip(operands, body.invars, strict=False) if inside in inner)
    return {v for v in closed if isinstance(v, core.Var)}


@contextlib.contextmanager
def at_line(eqn: core.JaxprEqn) -> Iterator[None]:
    """Returns a context whose equations get the line of this one, for errors and profiles."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def scan_arguments[T](eqn: core.JaxprEqn, arguments: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
    """Returns a scan's arguments: constants, carry, and arrays that are sliced into steps."""
    consts, carries, _ = (len(part) for part in eqn.params["ft_in"].unpack())
    return _cut(arguments, consts, carries)


def while_arguments[T](eqn: core.JaxprEqn, arguments: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
    """Returns a while loop's arguments: constants of the condition, constants of the body, and carry."""
    return _cut(arguments, eqn.params["cond_nconsts"], eqn.params["body_nconsts"])


def _cut[T](arguments: Sequence[T], first: int, second: int) -> tuple[list[T], list[T], list[T]]:
    return list(arguments[:first]), list(arguments[first : first + second]), list(arguments[first + second :])
