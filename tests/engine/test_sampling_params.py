"""Sampling parameters: which are accepted, what they need of a program, and what a checkpoint recommends."""

import dataclasses
import math
import warnings
from typing import Any

import pytest

from detjax.engine import Constraint, FieldError, SamplingParams
from detjax.engine.sampling_variant import SamplingVariant
from detjax.models import Decoder, GenerationDefaults
from tests.support.small_loops import small_model
from tests.support.unchecked import without_checks

ABOVE, BELOW = (lambda x: math.nextafter(x, math.inf)), (lambda x: math.nextafter(x, -math.inf))
NAN = float("nan")
LIMITS: dict[str, tuple[list[Any], list[Any]]] = {
    "max_tokens": ([1, 10**9], [0, -1]),
    "temperature": ([0.0, 1e-30, 1e30], [-1e-30, BELOW(1e-30), ABOVE(1e30), NAN, math.inf]),
    "top_k": ([0, 1, 2**31 - 1], [-1, 2**31]),
    "top_p": ([5e-324, 1.0], [0.0, ABOVE(1.0), NAN]),
    "min_p": ([0.0, 1.0], [-5e-324, ABOVE(1.0), NAN]),
    "presence_penalty": ([-2.0, 2.0], [BELOW(-2.0), ABOVE(2.0), NAN]),
    "frequency_penalty": ([-2.0, 2.0], [BELOW(-2.0), ABOVE(2.0), NAN]),
    "repetition_penalty": ([1e-6, 1e6], [0.0, BELOW(1e-6), ABOVE(1e6), NAN, math.inf]),
    "min_tokens": ([0, 128], [-1, 129]),
    "seed": ([0, 2**64 - 1], [-1, 2**64]),
    "n": ([1, 10**6], [0]),
    "stop": ([(), ("a", "b")], [("",), ("a", "")]),
    "allowed_token_ids": ([(), (0,), (2**31, 3)], [(-1,), (3, -1)]),
    "bad_words": ([(), ("a", "b")], [("",), ("a", "")]),
    "scored_answer": ([0], [1, -1]),
    "top_logprobs": ([0, 10**6], [-1]),
    "logit_bias": (
        [((0, -100.0), (1, 100.0)), tuple((token, 0.0) for token in range(300))],
        [
            ((0, BELOW(-100.0)),),
            ((3, 0.0), (0, ABOVE(100.0))),
            ((0, NAN),),
            ((-1, 0.0),),
            ((1, 0.0), (1, 0.0)),
            tuple((token, 0.0) for token in range(301)),
        ],
    ),
}
"""For each field, values at the borders of what is accepted, and values beyond them."""


@pytest.mark.parametrize("field", LIMITS)
def test_values_are_accepted_up_to_their_limits_and_refused_by_name_beyond(field: str) -> None:
    accepted, refused = LIMITS[field]
    for value in accepted:
        assert getattr(SamplingParams(**{field: value}), field) == value
    for value in refused:
        with pytest.raises(ValueError, match=rf"{field} (is|has) .*; accepted: ") as raised:
            SamplingParams(**{field: value})
        if field != "seed":
            assert isinstance(raised.value, FieldError) and raised.value.field == field


def test_one_string_is_no_tuple_of_stop_strings() -> None:
    for stop in ("ab", ""):
        with pytest.raises(FieldError, match=r"stop is .*; accepted: a tuple of strings that are not empty"):
            without_checks(SamplingParams, stop=stop).__post_init__()


def test_many_stop_tokens_are_accepted_unless_they_are_held_back() -> None:
    SamplingParams(min_tokens=1, stop_token_ids=tuple(range(200)))
    SamplingParams(stop_token_ids=tuple(range(10_000)))
    with pytest.raises(FieldError, match="201 stop_token_ids; accepted: up to 200 with min_tokens") as raised:
        SamplingParams(min_tokens=1, stop_token_ids=tuple(range(201)))
    assert raised.value.field == "stop_token_ids"


def test_a_constrained_text_ends_when_it_is_complete() -> None:
    constraint = Constraint.choice(["a"])
    assert SamplingParams(constraint=constraint).constraint is constraint
    for field, value in (("ignore_eos", True), ("min_tokens", 1)):
        with pytest.raises(FieldError, match="accepted: False and 0") as raised:
            SamplingParams(constraint=constraint, **{field: value})  # pyright: ignore[reportArgumentType]
        assert raised.value.field == field


# --- what they need ---------------------------------------------------------------------------------------------------

FILTERS: tuple[dict[str, Any], ...] = ({"top_k": 1}, {"top_p": 0.999}, {"min_p": 1e-9})
PENALTIES: tuple[dict[str, Any], ...] = (
    {"presence_penalty": -0.1},
    {"frequency_penalty": 0.1},
    {"repetition_penalty": 0.9},
)


def needs(**fields: Any) -> SamplingVariant:
    params = SamplingParams(**fields)
    needed = SamplingVariant.needed_by([params])
    assert needed == params.needs
    return needed


def test_each_field_needs_its_own_capability_of_a_program() -> None:
    plain = SamplingVariant(False, 0, False, False, False)
    for fields in ({}, {"temperature": 1.3}, {"seed": 3}, {"stop_token_ids": (3,)}, *FILTERS):  # greedy, so no filters
        assert needs(**fields) == plain, fields
    for fields in FILTERS:
        assert needs(temperature=1e-9, **fields) == plain._replace(filtered=True), fields
    for fields in (*PENALTIES, {"logit_bias": ((1, 0.0),)}, {"min_tokens": 1}):
        assert needs(**fields) == plain._replace(adjusted=True), fields
    assert needs(top_logprobs=3) == plain._replace(top_logprobs=3)
    for fields in ({"constraint": Constraint.choice(["a"])}, {"allowed_token_ids": (3,)}, {"bad_words": ("a",)}):
        assert needs(**fields) == plain._replace(constrained=True), fields
    assert needs(include_stop_str_in_output=True, skip_special_tokens=False) == plain
    assert needs(sampling_logprobs=True) == plain._replace(distribution=True)
    assert needs(prompt_logprobs=True, top_logprobs=2) == plain._replace(top_logprobs=2)


def test_only_penalties_depend_on_earlier_tokens() -> None:
    assert all(SamplingParams(**fields).penalized for fields in PENALTIES)
    others = SamplingParams(logit_bias=((1, 1.0),), min_tokens=2)
    assert others.adjusted and not others.penalized


def test_a_step_needs_what_any_of_its_samples_needs() -> None:
    some = [SamplingParams(top_logprobs=2), SamplingParams(temperature=1.0, top_k=3), SamplingParams(top_logprobs=1)]
    assert SamplingVariant.needed_by(some) == SamplingVariant(True, 2)
    variants = SamplingVariant.for_serving(2)
    for needed in (*variants, SamplingVariant(True, 2, True, True, True)):
        assert any(variant.serves(needed) for variant in variants)
    for index, part in enumerate(variants[-1]):
        lacking = list(variants[-1])
        lacking[index] = 0 if part is not True else False
        assert not SamplingVariant(*lacking).serves(variants[-1])


# --- what a checkpoint recommends -------------------------------------------------------------------------------------


def recommending(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> Decoder:
    defaults = dataclasses.replace(GenerationDefaults(), **fields)
    monkeypatch.setattr(small_model(), "generation_defaults", defaults)
    return small_model()


def test_recommended_settings_are_the_checkpoints_and_given_ones_beat_them(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1}
    model = recommending(monkeypatch, do_sample=True, **fields)
    assert SamplingParams.recommended(model) == SamplingParams(**fields)
    given = {"temperature": 0.0, "min_p": 0.0, "max_tokens": 3}
    assert SamplingParams.recommended(model, **given) == SamplingParams(**{**fields, **given})
    monkeypatch.setattr(model, "generation_defaults", None)
    assert SamplingParams.recommended(model, top_k=2) == SamplingParams(top_k=2)


def test_a_checkpoint_that_samples_without_a_temperature_has_temperature_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SamplingParams.recommended(recommending(monkeypatch, do_sample=True)) == SamplingParams(temperature=1.0)
    model = recommending(monkeypatch, do_sample=False, temperature=0.7, top_k=20)
    assert SamplingParams.recommended(model) == SamplingParams()


@pytest.mark.parametrize("do_sample", [False, True])
def test_recommended_penalties_are_used_or_told(monkeypatch: pytest.MonkeyPatch, do_sample: bool) -> None:
    unread = '{"encoder_repetition_penalty": 1.1, "length_penalty": 1, "diversity_penalty": null, "x": 2}'
    model = recommending(monkeypatch, do_sample=do_sample, temperature=1.0, unread='{"repetition_penalty": 1.2}')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert SamplingParams.recommended(model).repetition_penalty == 1.2
        assert SamplingParams.recommended(model, repetition_penalty=1.0).repetition_penalty == 1
    model = recommending(monkeypatch, do_sample=do_sample, temperature=1.0, unread=unread)
    with pytest.warns(UserWarning, match=r"leaves out {'encoder_repetition_penalty': 1.1}, which"):
        assert SamplingParams.recommended(model).repetition_penalty == 1.0
