"""Assigns each equation of a traced function its role in the proof that rows do not depend on their batch."""

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Any, Final

from jax.extend import core

from detjax.audit.certification.contracts import PREPARED, contract_of
from detjax.audit.certification.freedoms import Freedoms, Path
from detjax.invariant import equations, refusals
from detjax.invariant.batch_axis import BatchAxisTracer, operation_places
from detjax.invariant.equations import Kind, aval
from detjax.invariant.findings import Mixing
from detjax.invariant.places import UNKNOWN, Place, Rows, Shared


class Role(enum.Enum):
    """The role of an equation in the proof. Later roles outweigh earlier ones."""

    SHARED = "has no rows"
    APART = "keeps rows separate by construction"
    EXACT = "exact in any order"
    CONTRACT = "under contract"
    CHOSEN = "XLA may choose"
    MIXES = "mixes rows"


RISKS: Final = (Role.MIXES, Role.CHOSEN)
"""Roles that prevent a proof, the more serious one first."""


@dataclasses.dataclass(frozen=True)
class Risk:
    """An equation that may give a row other bits in another batch.

    Attributes:
        role: one of `RISKS`.
        primitive: the equation's primitive.
        why: the reason.
        line: the user's line, with the layer's name if it has one.
        shapes: the shapes of its operands for the traced batch.
        dtypes: their dtypes.
    """

    role: Role
    primitive: str
    why: str
    line: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @classmethod
    def from_equation(cls, eqn: core.JaxprEqn, role: Role, why: str, line: str | None = None) -> "Risk":
        """Returns the risk of an equation, by default with its own line."""
        dtypes = tuple(str(getattr(aval(v), "dtype", "token")) for v in eqn.invars)
        line = line or equations.line(eqn) or "an unknown line"
        return cls(role, eqn.primitive.name, why, line, equations.shapes(eqn), dtypes)

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields as a JSON object."""
        return dataclasses.asdict(self) | {"role": self.role.name.lower()}


class Roles(BatchAxisTracer):
    """Traces the axis of the batch through a function, and records the role of every equation."""

    def __init__(self, batch: int, freedoms: Freedoms) -> None:
        """Args:
        batch: the number of rows, a prime number that divides no other axis of an array.
        freedoms: the choices of XLA in the traced function.
        """
        super().__init__(batch)
        self._freedoms = freedoms
        self._equations: dict[tuple[int, ...], tuple[Role, Risk | str | None]] = {}

    @property
    def risks(self) -> list[Risk]:
        """The equations that are risks, the more serious ones first."""
        risks = [detail for _, detail in self._equations.values() if isinstance(detail, Risk)]
        return sorted(risks, key=lambda risk: RISKS.index(risk.role))

    @property
    def contracts(self) -> list[str]:
        """The operations under contract that the function calls, one entry per call."""
        return [str(detail) for role, detail in self._equations.values() if role is Role.CONTRACT]

    def counts(self) -> dict[Role, int]:
        """Returns the number of equations of each role."""
        roles = [role for role, _ in self._equations.values()]
        return {role: roles.count(role) for role in Role}

    def check_results(self, jaxpr: core.Jaxpr, places: Sequence[Place], axes: Sequence[int | None]) -> None:
        """Records a risk if the rows of a result are not along its axis, unless there are findings already."""
        makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        for atom, place, axis in zip(jaxpr.outvars, places, axes, strict=True):
            if axis is None or self.findings:
                continue
            axis %= aval(atom).ndim
            is_separate = place == Rows(axis) or (isinstance(place, Shared) and axis in place.uniform)
            if not is_separate and not isinstance(atom, core.Literal) and atom in makers:
                self.mixes(makers[atom], Mixing.SLOT, "gives a result whose rows are not the arguments' rows")

    def mixes(self, eqn: core.JaxprEqn, mixing: Mixing, what: str) -> Any:
        """Reports an equation that mixes rows; see `BatchAxisTracer.mixes`."""
        self._note(eqn, Role.MIXES, Risk.from_equation(eqn, Role.MIXES, what, self.line(eqn)))
        return super().mixes(eqn, mixing, what)

    def equation(self, eqn: core.JaxprEqn, places: list[Place]) -> list[Place]:
        """Returns the places of an equation's results, and records its role."""
        contract = contract_of(eqn)
        if contract is not None:
            self._note(eqn, Role.CONTRACT, contract)
            return self._under_contract(eqn, places, contract)
        kind = equations.kind(eqn)
        if kind is not Kind.CALL:
            self._classify(eqn, places)
        return super().equation(eqn, places)

    def _classify(self, eqn: core.JaxprEqn, places: list[Place]) -> None:
        why = self._freedoms.why.get(self._path(eqn))
        if why is not None:
            self._note(eqn, Role.CHOSEN, Risk.from_equation(eqn, Role.CHOSEN, why, self.line(eqn)))
        elif not any(not isinstance(place, Shared) for place in places):
            self._note(eqn, Role.SHARED)
        elif equations.kind(eqn) is Kind.EXACT and eqn.primitive.name not in equations.ELEMENTWISE:
            self._note(eqn, Role.EXACT)
        else:
            self._note(eqn, Role.APART)

    def _path(self, eqn: core.JaxprEqn) -> Path:
        return (*map(id, self.calls), id(eqn))

    def _note(self, eqn: core.JaxprEqn, role: Role, detail: Risk | str | None = None) -> None:
        """Records an equation's role. Loops are traced several times, and the most serious role counts."""
        path = self._path(eqn)
        roles = list(Role)
        known = self._equations.get(path)
        if known is None or roles.index(role) >= roles.index(known[0]):
            self._equations[path] = role, detail

    def _under_contract(self, eqn: core.JaxprEqn, places: list[Place], contract: str) -> list[Place]:
        """Returns the places of the results of an operation, which keeps the rows of its leading axes separate.

        An operation may reorder rows, for example by expert. Their place is then unknown until another operation
        restores the order.
        """
        if self.findings and any(place is UNKNOWN for place in places):
            return [UNKNOWN] * len(eqn.outvars)
        rows = [place for place in places if isinstance(place, Rows)]
        if not rows and all(isinstance(place, Shared) for place in places):
            return operation_places(eqn, places, self.batch)
        weight = _WEIGHTS.get(contract, len(places))
        if any(not isinstance(place, Shared) for place in places[weight : weight + 1]):
            return [self.mixes(eqn, Mixing.OTHER, f"has rows in the weight of {contract}")] * len(eqn.outvars)
        if not rows or contract == PREPARED:
            return [UNKNOWN] * len(eqn.outvars)
        first = places[0]
        if contract in _ALONG_THE_LAST and isinstance(first, Rows) and first.axis == aval(eqn.invars[0]).ndim - 1:
            return [self.mixes(eqn, Mixing.SUM, f"works along the batch in {contract}")] * len(eqn.outvars)
        return operation_places(eqn, places, self.batch)


_WEIGHTS: Final = {"matmul": 1, "grouped_matmul": 1, "rms_norm": 1, "gated_rms_norm": 2, "embed": 1}
"""The index of the argument that all rows share, by operation."""

_ALONG_THE_LAST: Final = (
    "matmul rms_norm gated_rms_norm l2_norm softmax log_softmax logsumexp sample top_logprobs".split()
)
"""Operations that work along the last axis of their first argument."""


def flattened(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """Yields the equations of a jaxpr, including nested ones except within operations under contract."""
    for eqn in jaxpr.eqns:
        yield eqn
        if contract_of(eqn) is None:
            for body in equations.bodies(eqn):
                yield from flattened(body)


def mixed_risks(jaxpr: core.Jaxpr) -> list[Risk]:
    """Returns the risks of functions that mix rows, where `batch_invariant` computes each row alone instead.

    With `on_unsafe="warn"` these rows do not depend on their batch, but they are not the function's rows, so nothing is
    proven about it.
    """
    findings = dict.fromkeys(
        finding
        for eqn in equations.all_equations(jaxpr)
        for finding in refusals.mixed_by(str(eqn.source_info.name_stack))
    )
    instead = "each row is computed alone instead"
    return [Risk(Role.MIXES, x.primitive, f"{x.what}: {instead}", x.line, x.shapes, x.dtypes) for x in findings]


def risks_of_order(jaxpr: core.Jaxpr) -> Iterator[Risk]:
    """Yields the equations of a program of `detjax.jit` in which XLA may choose bits, regardless of rows."""
    freedoms = Freedoms(jaxpr, is_pinned=True)
    for eqn in flattened(jaxpr):
        if contract_of(eqn) is None and equations.kind(eqn) is not Kind.CALL:
            why = freedoms.reason(eqn)
            if why is not None:
                yield Risk.from_equation(eqn, Role.CHOSEN, why)
