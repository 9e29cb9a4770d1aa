"""Whether an engine's own programs leave any bit to the compiler."""

from collections.abc import Iterable
from typing import Any

import jax

from detjax.audit.certification.roles import Risk, risks_of_order
from detjax.engine.step_programs import Parameters, StepProgram
from detjax.models import Decoder
from detjax.models.network import split
from detjax.runtime import compilation


def engine_risks(model: Decoder, programs: Iterable[StepProgram]) -> dict[str, tuple[Risk, ...]]:
    """Returns, for each program of an engine that has any, the equations whose bits XLA may choose.

    Requests are packed in an engine's batch and have no axis of their own, so programs are read for what computes
    outside of detjax' contracts, not for where rows go.

    Args:
        model: the engine's model.
        programs: those of `Engine.programs`.
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
