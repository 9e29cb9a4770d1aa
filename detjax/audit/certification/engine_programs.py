"""Finds the equations of an engine's programs whose bits the compiler may choose."""

from collections.abc import Iterable
from typing import Any

import jax

from detjax.audit.certification.roles import Risk, risks_of_order
from detjax.engine.program import Parameters, StepProgram
from detjax.models import Decoder
from detjax.models.network import split
from detjax.runtime import compilation


def engine_risks(model: Decoder, programs: Iterable[StepProgram]) -> dict[str, tuple[Risk, ...]]:
    """Returns the equations whose bits XLA may choose, for each program of an engine that has such equations.

    Requests are packed in an engine's batch without an axis of their own, so programs are checked for equations outside
    of detjax' contracts, not for mixed rows.

    Args:
        model: the engine's model.
        programs: from `Engine.programs`.
    """
    network, weights = split(model)
    by_purpose = {}
    for program in programs:

        def call(weights: Any, *args: Any, program: StepProgram = program) -> Any:
            return program.fn(network, Parameters(weights), *args, **program.static)

        with compilation.under_contract():
            traced = jax.make_jaxpr(call)(weights, *program.args)
        risks = tuple(risks_of_order(traced.jaxpr))
        if risks:
            by_purpose[program.purpose] = risks
    return by_purpose
