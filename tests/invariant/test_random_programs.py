"""Random programs that certificates call proven have one set of bits in batches of every size."""

import pytest

from benchmarks.studies.random_programs import programs as random_programs
from benchmarks.studies.random_programs.programs import COMPILATIONS, Program, Step, judged, smallest
from detjax.audit.certification import signs

TOGETHER = 10
PROGRAMS = 2000


@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", range(0, PROGRAMS, TOGETHER))
def test_no_proof_of_a_random_program_is_false(first: int) -> None:
    programs = [Program.from_seed(seed) for seed in range(first, first + TOGETHER)]
    for compilation in COMPILATIONS:
        for verdict in judged(programs, compilation):
            if verdict.is_false_proof:
                pytest.fail(f"proven under {compilation}, and other bits: {_smallest(verdict)}")


def _smallest(verdict: random_programs.Verdict) -> str:
    """The smallest program that moves in the same batch; the whole one if it moves in company alone."""

    def is_wrong(program: Program) -> bool:
        return judged([program], verdict.compilation, verdict.batch)[0].is_false_proof

    return str(smallest(verdict.program, is_wrong) if is_wrong(verdict.program) else verdict.program)


@pytest.mark.parametrize("compilation", COMPILATIONS)
def test_a_false_proof_is_found_and_made_smaller(compilation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with the rule that every largest number is exact, there are false proofs."""
    steps = (
        Step("rolled", (0,)),
        Step("zeros", (1,)),
        Step("reversed", (2,)),
        Step("largest", (3,)),
        Step("rolled", (4,)),
    )
    program = Program(0, "float32", 128, steps)
    (verdict,) = judged([program], compilation, small=2)
    assert (verdict.is_proven, verdict.by_old_rule, verdict.batch, verdict.outcome) == (False, True, 2, "refuted")
    monkeypatch.setattr(signs, "has_zeros_of_both_signs", lambda signs: False)
    (verdict,) = judged([program], compilation, small=2)
    assert verdict.is_false_proof
    smaller = _smallest(verdict)
    assert "= zeros of" in smaller and "= largest of" in smaller and "5 = " not in smaller


def test_programs_of_a_seed_are_the_same_and_have_all_steps() -> None:
    programs = [Program.from_seed(seed) for seed in range(400)]
    assert programs == [Program.from_seed(seed) for seed in range(400)]
    assert {step.name for program in programs for step in program.steps} == random_programs.STEPS.keys()
    assert {program.dtype for program in programs} == set(random_programs.DTYPES)
