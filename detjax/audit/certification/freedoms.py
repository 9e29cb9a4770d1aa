"""Finds the choices of a compiler in a traced function: orders, roundings, signs of zeros, bits of NaN.

This is an abstract interpretation, equation by equation and into every call, loop and branch. It tracks a `Fact` for
each array. A choice that only decides the sign of zeros is a risk if the sign is visible: in a result, in a division by
the zero, or where bits are read. The maximum in `exp(x - max(x))` has no visible sign, so it is not a risk.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from detjax.audit.certification import signs
from detjax.audit.certification.contracts import contract_of
from detjax.audit.certification.signs import Signs
from detjax.invariant import equations
from detjax.invariant.equations import EXTREMES, Kind, aval
from detjax.invariant.walker import walk
from detjax.runtime import backends

type Path = tuple[int, ...]
"""The ids of the surrounding calls and of an equation."""


class Exclusion(enum.Enum):
    """Numbers that a proof excludes, because equivalent code may treat them differently.

    IEEE 754 leaves the sign and payload of NaN open, and a maximum on a CPU may ignore a NaN. Some instructions flush
    subnormal numbers to zero and others do not.
    """

    NAN = "rows that meet NaN"
    SUBNORMAL = "rows that meet subnormal numbers"


class _Mark(enum.IntFlag):
    """Properties that an array may have."""

    VARIES = enum.auto()  # it is not a constant of the program
    PRODUCT = enum.auto()  # its last step may be a product, not rounded yet
    REPEATED = enum.auto()  # it was broadcast
    COMPARED = enum.auto()  # it holds results of comparisons of floating-point numbers
    NARROW = enum.auto()  # it derives from numbers rounded to less than 32 bits
    BITS_OF_NAN = enum.auto()  # code may differ in the sign and payload of its NaN
    NAN = enum.auto()  # see `Exclusion`
    SUBNORMAL = enum.auto()


_NO_MARKS: Final = _Mark(0)
_OF_ANY_DTYPE: Final = ~(_Mark.PRODUCT | _Mark.BITS_OF_NAN)
"""Properties that integers may have, too."""


@dataclasses.dataclass(frozen=True)
class Fact:
    """The facts about an array.

    Attributes:
        signs: the kinds of numbers that it may hold.
        marks: further properties that it may have.
        choosers: the equations in which the compiler chooses the sign of its zeros.
    """

    signs: Signs
    marks: _Mark = _NO_MARKS
    choosers: frozenset[Path] = frozenset()

    def __or__(self, other: "Fact") -> "Fact":
        return Fact(self.signs | other.signs, self.marks | other.marks, self.choosers | other.choosers)


def _split(text: str) -> frozenset[str]:
    return frozenset(text.split())


MOVES: Final = _split(
    "broadcast_in_dim reshape squeeze transpose concatenate pad slice dynamic_slice rev "
    "dynamic_update_slice gather split unstack stack tile copy stop_gradient optimization_barrier "
    "sharding_constraint pvary real imag scatter"
)
"""Primitives that move numbers without changing a bit."""

_KEEPS_BITS: Final = MOVES | _split("neg abs select_n sort conj complex")

_KEEPS_PRODUCTS: Final = _split(
    "broadcast_in_dim reshape squeeze transpose slice rev copy stop_gradient neg select_n "
    "concatenate pad split unstack stack tile sharding_constraint pvary real imag complex conj"
)
"""Primitives through which a compiler may fuse a product with a sum."""

_RESHAPES: Final = _split("reshape squeeze transpose copy stop_gradient")

_NO_PRODUCT: Final = _split("add sub add_any convert_element_type sqrt max min sign floor ceil round")
"""Primitives that compute, but do not end in a product."""

_BLIND: Final = _split(
    "exp exp2 logistic cos cosh erfc acos log lgamma abs square eq ne lt le gt ge eq_to lt_to le_to is_finite argmax "
    "argmin"
)
"""Primitives with the same result for zeros of either sign."""

_KEEPS_SIGN_OF_ZERO: Final = _split(
    "neg sign floor ceil round mul add sub add_any max min clamp sqrt tanh sin tan asin atan sinh asinh atanh erf "
    "erf_inv expm1 log1p cbrt reduce_precision select_n sort conj complex reduce_sum reduce_prod cumsum cumprod "
    "reduce_window_sum dot_general conv_general_dilated scatter-add scatter_add scatter-mul scatter_mul"
)
"""Primitives whose results for zeros of either sign are equal, or zeros too."""

_CHOICES_OF_NAN: Final = _split("argmax argmin top_k")
"""Primitives that may choose among several NaN."""

_INTEGERS: Final = _split("threefry2x32 axis_index platform_index")
"""Primitives that compute integers in their own way, the same in all code."""

_COMPARISONS: Final = _split("eq ne lt le gt ge eq_to lt_to le_to")

_BLIND_OPERATIONS: Final = ("softmax", "matmul", "grouped_matmul")
"""Operations of detjax whose results do not depend on the signs of zeros in their first operand."""


class Freedoms:
    """The equations of a function whose bits the compiler may choose.

    Attributes:
        why: the reason for each of these equations.
        exclusions: the numbers that a proof excludes.
    """

    def __init__(self, jaxpr: core.Jaxpr, is_pinned: bool) -> None:
        """Args:
        jaxpr: the function; all of its results are visible.
        is_pinned: whether the program is compiled with detjax' pinned options.
        """
        self.why: dict[Path, str] = {}
        self.exclusions: frozenset[Exclusion] = frozenset()
        self._is_pinned = is_pinned
        self._calls: list[core.JaxprEqn] = []
        arguments = [Fact(signs.atom_signs(v), _Mark.VARIES) for v in jaxpr.invars]
        for fact, atom in zip(self._jaxpr(jaxpr, arguments), jaxpr.outvars, strict=True):
            self._see(fact)
            self.exclusions |= {one for one in Exclusion if fact.marks & _Mark[one.name]}
            if equations.is_inexact(atom) and _has_open_nan(fact):
                self.exclusions |= {Exclusion.NAN}

    def reason(self, eqn: core.JaxprEqn) -> str | None:
        """Returns the reason for an equation, in any call; None if the compiler has no choice."""
        return next((why for path, why in self.why.items() if path[-1] == id(eqn)), None)

    def _see(self, fact: Fact) -> None:
        """Records the choices of the sign of a visible zero as risks."""
        for path in fact.choosers:
            self.why[path] = _WHY_ZEROS

    def _jaxpr(self, jaxpr: core.Jaxpr, facts: Sequence[Fact]) -> list[Fact]:
        constants = [Fact(signs.value_signs(value)) for value in jaxpr.consts]
        return walk(jaxpr, [*constants, *facts], self._equation, lambda atom: Fact(signs.atom_signs(atom)))

    def _equation(self, eqn: core.JaxprEqn, facts: list[Fact]) -> list[Fact]:
        contract = contract_of(eqn)
        if contract is not None:
            for fact in facts[1 if contract in _BLIND_OPERATIONS else 0 :]:
                self._see(fact)
            return [Fact(signs.atom_signs(v), _Mark.VARIES) for v in eqn.outvars]
        kind = equations.kind(eqn)
        if kind is Kind.CALL:
            self._calls.append(eqn)
            results = self._call(eqn, facts)
            self._calls.pop()
            return results
        if (why := self._choice(eqn, kind, facts)) is not None:
            self.why[self._path(eqn)] = why
        return self._results(eqn, kind, facts)

    def _path(self, eqn: core.JaxprEqn) -> Path:
        return (*map(id, self._calls), id(eqn))

    # Control flow ---------------------------------------------------------------------------------------------------

    def _call(self, eqn: core.JaxprEqn, facts: list[Fact]) -> list[Fact]:
        name, params = eqn.primitive.name, eqn.params
        if name == "scan":
            consts, carries, xs = equations.scan_arguments(eqn, facts)
            step = lambda carries: self._jaxpr(params["jaxpr"], [*consts, *carries, *xs])  # noqa: E731
            return _settled(carries, step)
        if name == "while":
            tested, consts, carries = equations.while_arguments(eqn, facts)

            def trip(carries: list[Fact]) -> list[Fact]:
                self._jaxpr(params["cond_jaxpr"], [*tested, *carries])
                return self._jaxpr(params["body_jaxpr"], [*consts, *carries])

            return _settled(carries, trip)
        if name == "cond":
            branches = [self._jaxpr(branch, facts[1:]) for branch in params["branches"]]
            return [functools.reduce(Fact.__or__, results) for results in zip(*branches, strict=True)]
        return self._jaxpr(params["jaxpr"] if name == "shard_map" else equations.body(eqn), facts)

    # Choices ----------------------------------------------------------------------------------------------------------

    def _choice(self, eqn: core.JaxprEqn, kind: Kind, facts: Sequence[Fact]) -> str | None:
        """Returns why XLA may choose other bits for an equation at other shapes; None if it may not."""
        name, is_cpu = eqn.primitive.name, backends.target() == "cpu"
        inexact = [v for v in (*eqn.invars, *eqn.outvars) if equations.is_inexact(v)]
        if kind is Kind.SUM:
            return _why_sums(eqn)
        if kind is Kind.OPAQUE:
            if name == "scatter" and eqn.params["unique_indices"]:
                return None
            # CPUs write updates in sequence.
            is_known = name in _INTEGERS or (name == "scatter" and is_cpu)
            return _WHY_OPAQUE if eqn.outvars and (inexact or not is_known) else None
        if name.startswith("random_") and any(map(_is_batched_generator, (*eqn.invars, *eqn.outvars))):
            return "draws from a generator whose numbers for one key depend on neighbouring keys"
        if not inexact:
            return None
        if name == "sort" and not eqn.params["is_stable"]:
            return "orders equal numbers by an algorithm that XLA chooses by shape; a stable sort does not"
        if name == "top_k" and not is_cpu and signs.has_zeros_of_both_signs(facts[0].signs):
            return "orders zeros of both signs by an algorithm that XLA chooses by shape"
        if name in EXTREMES and is_cpu and any(fact.marks & _Mark.NARROW for fact in facts):
            return "may be fused with a rounding to a narrow type and use more precision from some size on"
        if kind is Kind.APPROXIMATED and any(map(equations.is_complex, inexact)):
            return "computes complex numbers with several roundings, which the compiler arranges and fuses by shape"
        if kind is Kind.APPROXIMATED and is_cpu:
            return _WHY_APPROXIMATED
        if name in ("add", "sub", "add_any") and any(fact.marks & _Mark.PRODUCT for fact in facts):
            return "a product before a sum may become a fused multiply-add, which rounds once, depending on fusions"
        if name == "div" and is_cpu and facts[1].marks & _Mark.REPEATED:
            return "a division by a broadcast value may become a product with its reciprocal, which rounds twice"
        if kind is not Kind.EXACT and not self._is_pinned and any(map(_is_narrow, inexact)):
            return "XLA may keep more precision than the narrow type within a fusion; detjax.jit forbids it"
        return None

    # Facts ------------------------------------------------------------------------------------------------------------

    def _results(self, eqn: core.JaxprEqn, kind: Kind, facts: list[Fact]) -> list[Fact]:
        name = eqn.primitive.name
        if not eqn.outvars:
            return []
        if name in ("optimization_barrier", "sort"):  # one result per operand
            return [dataclasses.replace(fact, marks=fact.marks & ~_Mark.PRODUCT) for fact in facts]
        fact_of_results = Fact(self._signs(eqn, facts), self._marks(eqn, kind, facts), self._choosers(eqn, facts))
        return [fact_of_results if equations.is_inexact(v) else _exact(fact_of_results, v) for v in eqn.outvars]

    def _signs(self, eqn: core.JaxprEqn, facts: Sequence[Fact]) -> Signs:
        name, floats = eqn.primitive.name, _float_signs(eqn, facts)
        if any(map(equations.is_inexact, eqn.invars)):
            if name in EXTREMES:
                return signs.maximum(floats)
            if name in MOVES | {"select_n"}:
                return floats | _filling(eqn) if name == "gather" else floats
        return signs.result(eqn, [fact.signs for fact in facts])

    def _marks(self, eqn: core.JaxprEqn, kind: Kind, facts: Sequence[Fact]) -> _Mark:
        name = eqn.primitive.name
        operand_marks = functools.reduce(_Mark.__or__, (fact.marks for fact in facts), _NO_MARKS)
        reads, makes = (any(map(equations.is_inexact, atoms)) for atoms in (eqn.invars, eqn.outvars))
        marks = operand_marks & (_Mark.VARIES | _Mark.NAN | _Mark.SUBNORMAL | _Mark.NARROW)
        if name in _KEEPS_PRODUCTS:
            marks |= operand_marks & _Mark.PRODUCT
        elif name == "div" and backends.target() == "cpu":
            marks |= _Mark.PRODUCT if facts[1].marks & _Mark.REPEATED else _NO_MARKS
        elif kind in (Kind.ROUNDED, Kind.APPROXIMATED) and name not in _NO_PRODUCT:
            marks |= _Mark.PRODUCT
        if name == "broadcast_in_dim":
            marks |= _Mark.REPEATED
        elif name in _RESHAPES:
            marks |= operand_marks & _Mark.REPEATED
        if (name in _COMPARISONS and reads) or not makes:
            marks |= _Mark.COMPARED if name in _COMPARISONS and reads else operand_marks & _Mark.COMPARED
        if kind is Kind.ROUNDED and any(map(_is_narrow, eqn.outvars)):
            marks |= _Mark.NARROW
        marks |= self._marks_of_nan(eqn, facts, operand_marks, reads)
        return marks | self._marks_of_subnormal(eqn, facts, operand_marks)

    @staticmethod
    def _marks_of_nan(eqn: core.JaxprEqn, facts: Sequence[Fact], operand_marks: _Mark, reads: bool) -> _Mark:
        name = eqn.primitive.name
        if _float_signs(eqn, facts) & Signs.NAN and name in EXTREMES | _CHOICES_OF_NAN:
            return _Mark.NAN | _Mark.BITS_OF_NAN
        if name == "bitcast_convert_type" and _has_open_nan(facts[0]):
            return _Mark.NAN
        if name in _KEEPS_BITS:
            return operand_marks & _Mark.BITS_OF_NAN
        return _Mark.BITS_OF_NAN if reads else _NO_MARKS

    @staticmethod
    def _marks_of_subnormal(eqn: core.JaxprEqn, facts: Sequence[Fact], operand_marks: _Mark) -> _Mark:
        if backends.target() != "cpu":
            return _NO_MARKS
        name = eqn.primitive.name
        chooses = name in EXTREMES | {"max", "min", "clamp"} or (name == "select_n" and operand_marks & _Mark.COMPARED)
        return _Mark.SUBNORMAL if chooses and _float_signs(eqn, facts) & Signs.SUBNORMAL else _NO_MARKS

    def _choosers(self, eqn: core.JaxprEqn, facts: Sequence[Fact]) -> frozenset[Path]:
        """Returns the equations that choose the sign of the results' zeros; records choices that are visible here."""
        kept: frozenset[Path] = frozenset()
        for index, fact in enumerate(facts):
            if not fact.choosers:
                continue
            flow = _flow(eqn, index, facts)
            if flow is _Flow.KEPT:
                kept |= fact.choosers
            elif flow is _Flow.SEEN:
                self._see(fact)
        if eqn.primitive.name in EXTREMES and equations.is_inexact(eqn.invars[0]):
            if signs.has_zeros_of_both_signs(_float_signs(eqn, facts)):
                kept |= {self._path(eqn)}
        return kept


def _float_signs(eqn: core.JaxprEqn, facts: Sequence[Fact]) -> Signs:
    """Returns the kinds of numbers in an equation's floating-point operands."""
    floats = (fact.signs for fact, v in zip(facts, eqn.invars, strict=True) if equations.is_inexact(v))
    return functools.reduce(Signs.__or__, floats, signs.NONE)


def _filling(eqn: core.JaxprEqn) -> Signs:
    """Returns the kinds of a gather's fill value."""
    if eqn.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        return signs.NONE
    value = eqn.params["fill_value"]
    return Signs.NAN if value is None else signs.value_signs(value)


class _Flow(enum.Enum):
    """The effect of an operand's sign of zero on the results of an equation."""

    KEPT = "the results differ only in the sign of zeros"
    GONE = "the results are the same"
    SEEN = "the results differ"


def _flow(eqn: core.JaxprEqn, index: int, facts: Sequence[Fact]) -> _Flow:
    name = eqn.primitive.name
    if name in ("add", "add_any"):
        other = facts[1 - index]
        # Adding 0.0 or any other number hides the sign of a zero, but XLA drops additions of constant zeros.
        is_gone = not other.signs & Signs.MINUS_ZERO and other.marks & _Mark.VARIES
        return _Flow.GONE if is_gone else _Flow.KEPT
    if name in _BLIND:
        return _Flow.GONE
    if name in MOVES | EXTREMES | _KEEPS_SIGN_OF_ZERO:
        return _Flow.KEPT
    if name == "convert_element_type":
        return _Flow.KEPT if equations.is_inexact(eqn.outvars[0]) else _Flow.GONE
    if name in ("div", "rem"):
        return _Flow.SEEN if index else _Flow.KEPT
    if name == "integer_pow":
        exponent = eqn.params["y"]
        return _Flow.GONE if exponent % 2 == 0 else _Flow.KEPT if exponent > 0 else _Flow.SEEN
    return _Flow.SEEN


def _has_open_nan(fact: Fact) -> bool:
    return bool(fact.signs & Signs.NAN and fact.marks & _Mark.BITS_OF_NAN)


def _exact(fact: Fact, atom: Any) -> Fact:
    """Returns the fact of an array of integers, whose zeros have no sign."""
    return Fact(signs.atom_signs(atom), fact.marks & _OF_ANY_DTYPE)


def _settled(carries: list[Fact], step: Callable[[list[Fact]], list[Fact]]) -> list[Fact]:
    """Returns the facts of a loop's results, once the facts of its carries hold in every iteration."""
    while True:
        results = step(carries)
        joined = [x | y for x, y in zip(carries, results, strict=False)]
        if joined == carries:
            return [*carries, *results[len(carries) :]]
        carries = joined


_WHY_APPROXIMATED: Final = (
    "vector and scalar code of a CPU approximate it with different bits, and the shape decides between them"
)
_WHY_OPAQUE: Final = "computes in an unknown way"
_WHY_ZEROS: Final = (
    "chooses between zeros of both signs by the order of comparisons, which XLA chooses by shape; the sign is visible"
)


def _is_narrow(atom: Any) -> bool:
    return equations.is_inexact(atom) and jnp.dtype(aval(atom).dtype).itemsize < 4


def _is_batched_generator(atom: Any) -> bool:
    dtype = getattr(aval(atom), "dtype", jnp.int32)
    return jnp.issubdtype(dtype, jax.dtypes.prng_key) and "rbg" in str(dtype)


def _why_sums(eqn: core.JaxprEqn) -> str:
    name = eqn.primitive.name
    if name.startswith("psum") or name == "reduce_scatter":
        why = "adds over devices in the order of the collective's algorithm, which XLA chooses by size"
    elif name.startswith("scatter"):
        why = "adds numbers with equal indices in the order in which threads arrive"
    elif name.startswith("cum"):
        why = "accumulates by a tree of partial sums that XLA chooses by shape"
    elif name.startswith("conv"):
        why = "convolves by an algorithm that XLA chooses by shape, including the batch size"
    elif name.startswith(("dot", "ragged_dot")):
        why = "adds products in blocks and splits that XLA chooses by shape, including the batch size"
    else:
        why = "adds in an order that XLA chooses by shape and fusion"
    if any(_is_narrow(v) for v in eqn.outvars):
        why += f"; the sums are {aval(eqn.outvars[0]).dtype}, so each order rounds differently"
    return why
