"""Certificates: statements about whether a function's rows depend on their batch, from its program and from runs."""

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax
from jax import tree_util
from jax.extend import core
from jax.interpreters import partial_eval
from rich.console import Group
from rich.table import Table
from rich.text import Text

from detjax.audit.certification import programs
from detjax.audit.certification.freedoms import Exclusion, Freedoms
from detjax.audit.certification.roles import RISKS, Risk, Role, Roles, mixed_risks
from detjax.audit.certification.trials import Counterexample, Rows, Runs, trials
from detjax.invariant import UnsafeFunction, arguments
from detjax.invariant.places import Rows as BatchRows
from detjax.runtime import backends, compilation, fingerprints

BATCH_SIZES: Final = (1, 2, 3, 8, 17)
"""The default batch sizes of the runs."""


class Outcome(enum.Enum):
    """The outcome of a certificate. Later outcomes promise more."""

    REFUTED = "refuted"
    OBSERVED = "observed"
    PROVEN = "proven"

    def is_at_least(self, other: "Outcome") -> bool:
        """Returns whether this outcome promises at least as much as another."""
        outcomes = list(Outcome)
        return outcomes.index(self) >= outcomes.index(other)


@dataclasses.dataclass(frozen=True)
class Certificate:
    """The result of certifying a function.

    Attributes:
        function: the function's name.
        outcome: PROVEN: no equation mixes rows or leaves bits to XLA, and no run showed a different bit. OBSERVED:
            there are risks, but no run showed a different bit. REFUTED: a run did.
        risks: the equations without a proof, those that mix rows first.
        roles: the number of equations of each role.
        contracts: the number of calls of each operation of detjax.
        exclusions: the numbers that a proof excludes; the runs compare them too.
        batch_sizes: the batch sizes of the runs.
        cases: the number of compared runs.
        counterexample: the counterexample with the smallest batch.
        compiled_by: the compilation that the certificate covers: "detjax.jit", or "the caller" for a compiled function.
            Another compilation may round differently, above all to narrow types.
        backend: the backend of detjax' operations.
        device: the device of the runs.
        fingerprint: the digest of `detjax.fingerprint`.
    """

    function: str
    outcome: Outcome
    risks: tuple[Risk, ...]
    roles: dict[Role, int]
    contracts: dict[str, int]
    exclusions: tuple[Exclusion, ...]
    batch_sizes: tuple[int, ...]
    cases: int
    counterexample: Counterexample | None
    compiled_by: str
    backend: str
    device: str
    fingerprint: str

    def as_dict(self) -> dict[str, Any]:
        """Returns all fields as a JSON object."""
        return dataclasses.asdict(self) | {
            "outcome": self.outcome.value,
            "risks": [risk.as_dict() for risk in self.risks],
            "exclusions": [exclusion.name.lower() for exclusion in self.exclusions],
            "roles": {role.name.lower(): count for role, count in self.roles.items()},
        }

    def __str__(self) -> str:
        if self.counterexample is not None:
            return f"{self.function} is refuted: {self.counterexample}"
        cases = f"equal in {self.cases} cases, batches of {', '.join(map(str, self.batch_sizes))}"
        if self.outcome is Outcome.PROVEN:
            exclusions = f" except for {' and '.join(one.value for one in self.exclusions)}" if self.exclusions else ""
            source = f"{self.function} as compiled by {self.compiled_by}"
            return f"{source} is proven by construction{exclusions}, and {cases}"
        return f"{self.function} is observed {cases}; {len(self.risks)} equations have no proof"


def certify(
    fn: Callable[..., Any],
    args: Sequence[Any],
    batch_axes: Any = 0,
    out_axes: Any = 0,
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
) -> Certificate:
    """Certifies whether the rows of a function's results depend on the batch, in any bit.

    The function is traced, and each equation gets a role (see `detjax.audit.Role`). Then it runs: two of the given rows
    are placed first, in the middle and last in batches of several sizes, with three kinds of neighbours, and their
    results are compared with the smallest batch, bit by bit. If a batch differs, the sizes between it and the next
    smaller one are tried too.

    A proof covers the order of additions, roundings, and the path of rows through the program. It assumes that
    `detjax.ops` and `detjax.batch_invariant` keep their contracts, and that XLA rounds single elements as IEEE 754
    specifies.

    Args:
        fn: a function of arrays and static values (everything that is not an array). `detjax.jit` compiles it, unless
            it is compiled already: `jax.jit(fn)` is certified as JAX compiles it.
        args: its positional arguments, with at least one row; two different rows make the runs more informative.
        batch_axes: for each argument, the axis of its rows: an integer, None for values that all rows share, or a
            pytree of these. One integer holds for all arguments.
        out_axes: the axis of the rows in each result, in the same form. Results with None are not compared.
        batch_sizes: the batch sizes of the runs.

    Raises:
        TypeError: an argument with rows is not an array.
        ValueError: axes do not fit the arguments or results, there are no rows or no batch sizes, or the function
            cannot be traced for these batches.

    Example:
        >>> certificate = detjax.certify(lambda x: x / jnp.max(x), (jnp.arange(1.0, 9.0).reshape(4, 2),))
        >>> certificate.outcome.value
        'refuted'
    """
    sizes = sorted(set(batch_sizes))
    if not sizes or sizes[0] < 1:
        raise ValueError(f"certify: batch_sizes are {tuple(batch_sizes)}; accepted: at least one size, each at least 1")
    function = _Function(fn, tuple(args), batch_axes, out_axes)
    roles, unproven, exclusions = function.read(sizes)
    cases, counterexample = function.observed(sizes)
    equal = Outcome.OBSERVED if unproven else Outcome.PROVEN
    outcome = equal if counterexample is None else Outcome.REFUTED
    return Certificate(
        function=function.name,
        outcome=outcome,
        risks=unproven,
        roles=roles.counts(),
        contracts={name: roles.contracts.count(name) for name in sorted(set(roles.contracts))},
        exclusions=exclusions,
        batch_sizes=tuple(sizes),
        cases=cases,
        counterexample=counterexample,
        compiled_by="the caller" if function.is_compiled else "detjax.jit",
        backend=backends.backend(),
        device=backends.device_name(),
        fingerprint=fingerprints.fingerprint().digest,
    )


def risks(
    fn: Callable[..., Any],
    args: Sequence[Any],
    batch_axes: Any = 0,
    out_axes: Any = 0,
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
) -> tuple[Risk, ...]:
    """Returns the equations of a function without a proof, and does not run it; see `certify`."""
    return reading(fn, args, batch_axes, out_axes, batch_sizes=batch_sizes)[0]


def reading(
    fn: Callable[..., Any],
    args: Sequence[Any],
    batch_axes: Any = 0,
    out_axes: Any = 0,
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
) -> tuple[tuple[Risk, ...], tuple[Exclusion, ...]]:
    """Returns the risks, and the numbers that a proof excludes."""
    return _Function(fn, tuple(args), batch_axes, out_axes).read(batch_sizes)[1:]


class _Function:
    """A function of the arrays among its arguments."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], batch_axes: Any, out_axes: Any) -> None:
        leaves, arrays = arguments.Leaves.from_call("certify", batch_axes, args, {})
        self.name: str = getattr(fn, "__qualname__", type(fn).__qualname__)
        self.is_compiled = hasattr(fn, "lower")
        self.arrays, self.axes = [jax.numpy.asarray(x) for x in arrays], leaves.array_axes
        self.rows = arguments.count_rows("certify", self.arrays, self.axes)
        self._out_axes = out_axes

        def call(*arrays: Any) -> Any:
            positional, named = jax.tree.unflatten(leaves.tree, leaves.with_arrays(arrays))
            return fn(*positional, **named)

        # A compiled function has its own options, which JAX accepts only for the outermost program.
        self._call = call
        self._run = call if self.is_compiled else compilation.jit(call)

    def traced(self, batch: int) -> tuple[core.Jaxpr, Any]:
        """Returns the program for a batch of `batch` rows, and the shapes of its results."""

        def shape(x: Any, axis: int | None) -> jax.ShapeDtypeStruct:
            sizes = list(x.shape)
            if axis is not None:
                sizes[axis] = batch
            return jax.ShapeDtypeStruct(tuple(sizes), x.dtype)

        try:
            with compilation.under_contract():
                closed, shapes = jax.make_jaxpr(self._call, return_shape=True)(*map(shape, self.arrays, self.axes))
        except compilation.EnvironmentContradiction:
            raise
        except Exception as error:  # the function may raise anything for shapes that it does not accept
            said = str(error).split("\n")
            # The second line names the user's line that mixes rows.
            reason = f"{type(error).__name__}: {' '.join(said[: 2 if isinstance(error, UnsafeFunction) else 1])}"
            raise ValueError(
                f"certify: {self.name} cannot be traced for a batch of {batch} ({reason}); accepted: functions of any "
                "number of rows, and batch_axes that name the axis of the rows in every argument"
            ) from error
        return closed.jaxpr if hasattr(closed, "jaxpr") else closed, shapes

    @functools.cached_property
    def out_axes(self) -> list[int | None]:
        """The axis of the rows in each array among the results.

        Raises:
            ValueError: a result does not have the axis, or other axes change with the batch.
        """
        few, many = 2, 5
        shapes, more_shapes = self.traced(few)[1], self.traced(many)[1]
        axes = arguments.spread("certify", "out_axes", self._out_axes, shapes)
        results = tree_util.tree_leaves_with_path(shapes)
        for (path, x), y, axis in zip(results, jax.tree.leaves(more_shapes), axes, strict=True):
            if axis is None:
                continue
            expected = list(x.shape)
            if -x.ndim <= axis < x.ndim and x.shape[axis] == few:
                expected[axis] = many
            if tuple(expected) != y.shape or x.shape == y.shape:
                raise ValueError(
                    f"certify: result{tree_util.keystr(path)} of {self.name} has shape {x.shape} for a batch of {few} "
                    f"and {y.shape} for one of {many}, and out_axes is {axis}; accepted: results whose axis of rows "
                    "out_axes names, and None for results without rows, such as a mean loss"
                )
        return axes

    def read(self, sizes: Sequence[int]) -> tuple[Roles, tuple[Risk, ...], tuple[Exclusion, ...]]:
        """Returns the roles of the program's equations, its risks, and the numbers that a proof excludes."""
        batch = arguments.distinct_batch([self.rows, *(size for x in self.arrays for size in x.shape)])
        jaxpr = self._program(batch)
        freedoms = Freedoms(jaxpr, is_pinned=not self.is_compiled)
        roles = Roles(batch, freedoms)
        places = [None if a is None else BatchRows(a % x.ndim) for x, a in zip(self.arrays, self.axes, strict=True)]
        results = roles.jaxpr(jaxpr, places)
        roles.check_results(jaxpr, results, [axis for axis in self.out_axes if axis is not None])
        unproven = [*mixed_risks(jaxpr), *roles.risks]
        if not any(risk.role is Role.MIXES for risk in unproven):
            unproven = [*unproven, *self._other_programs(jaxpr, batch, [size for size in sizes if size > 1])]
        risks = tuple(sorted(unproven, key=lambda risk: RISKS.index(risk.role)))
        return roles, risks, tuple(sorted(freedoms.exclusions, key=list(Exclusion).index))

    def _program(self, batch: int) -> core.Jaxpr:
        """Returns the program of the results with rows, after dead-code elimination."""
        has_rows = [axis is not None for axis in self.out_axes]
        return partial_eval.dce_jaxpr_consts(self.traced(batch)[0], has_rows, True)[0]

    def _other_programs(self, jaxpr: core.Jaxpr, batch: int, sizes: Sequence[int]) -> Iterator[Risk]:
        """Yields a risk if the program of another batch size differs in more than the number of rows."""
        for size in sizes:
            change = programs.Comparison(batch, size).change(jaxpr, self._program(size))
            if change is not None:
                yield Risk.from_equation(change.eqn, Role.MIXES, change.why)
                return

    def observed(self, sizes: Sequence[int]) -> tuple[int, Counterexample | None]:
        """Runs the function; returns the number of compared runs, and the counterexample with the smallest batch."""
        runs = Runs(self._run, Rows(self.arrays, self.axes), self.out_axes, sizes[0])
        cases = 0
        equal = 0
        for size in sizes:
            for trial in trials(size, self.rows):
                cases += 1
                if (differing := runs.counterexample(trial)) is None:
                    continue
                # Batch sizes between the last equal one and this one may differ too.
                smaller = (runs.counterexample(t) for n in range(equal + 1, size) for t in trials(n, self.rows))
                return cases, next(filter(None, smaller), differing)
            equal = size
        return cases, None


_STYLES: Final = {Outcome.PROVEN: "green", Outcome.OBSERVED: "yellow", Outcome.REFUTED: "bold red"}


def report(certificate: Certificate) -> Group:
    """Returns a certificate as text for people."""
    roles = Table("equations", "role", title=certificate.function, title_justify="left")
    for role, count in certificate.roles.items():
        detail = ", ".join(f"{name} {n}" for name, n in certificate.contracts.items()) if role is Role.CONTRACT else ""
        if count:
            roles.add_row(str(count), Text(f"{role.value}{': ' if detail else ''}{detail}"))
    parts: list[Any] = [roles]
    if certificate.risks:
        parts.append(risk_table(certificate.risks))
    source = f"{certificate.device}, compiled by {certificate.compiled_by}, fingerprint {certificate.fingerprint}"
    return Group(*parts, Text(str(certificate), style=_STYLES[certificate.outcome]), Text(source))


def risk_table(unproven: Sequence[Risk]) -> Table:
    """Returns a table of risks."""
    table = Table("operation", "risk", "line", show_lines=True)
    for risk in dict.fromkeys(unproven):
        operands = ", ".join(f"{d}{list(s)}" for d, s in zip(risk.dtypes, risk.shapes, strict=True))
        times = f", {unproven.count(risk)} times" if unproven.count(risk) > 1 else ""
        why = f"{risk.role.value}: {risk.why}"
        table.add_row(Text(f"{risk.primitive} of {operands}{times}"), Text(why), Text(risk.line, overflow="fold"))
    return table
