"""Masks of the tokens that a constraint allows."""

import gc
import json
import random
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tokenizers

import detjax.demo
from detjax.engine import constraints
from detjax.engine.constraint import Constraint
from detjax.engine.constraints import ConstraintCompiler
from detjax.engine.token_masks import Masks, Matcher
from detjax.models import Tokenizer
from tests.support.tokenizers import with_byte_fallback

TOKENIZER = Tokenizer.load(Path(detjax.demo.CHECKPOINT))
VOCABULARY, END = 1040, 0  # the model has more logits than the tokenizer has tokens


@pytest.fixture(scope="module")
def compiler() -> ConstraintCompiler:
    assert TOKENIZER is not None
    return ConstraintCompiler(TOKENIZER, VOCABULARY, [END])


def started(compiler: ConstraintCompiler, constraint: Constraint) -> Matcher:
    return compiler.compile(constraint).matcher()


def masks(compiler: ConstraintCompiler, rows: int, matchers: Mapping[int, Matcher]) -> np.ndarray:
    return np.asarray(compiler.start_masks(rows, matchers, list).result().allowed)


def accept(compiler: ConstraintCompiler, matcher: Matcher, *tokens: int) -> Masks:
    """Passes the next tokens to a matcher, and returns its row of masks."""
    for token in tokens[:-1]:
        compiler.start_masks(0, {}, partial(list, [(matcher, token)])).result()
    return compiler.start_masks(1, {0: matcher}, partial(list, [(matcher, tokens[-1])])).result()


def allowed(compiler: ConstraintCompiler, matcher: Matcher) -> list[int]:
    bits = np.unpackbits(masks(compiler, 1, {0: matcher}).view(np.uint8), bitorder="little")
    assert not bits[len(TOKENIZER or ()) :].any(), "a token without text is allowed"
    return np.flatnonzero(bits).tolist()


def sampled(compiler: ConstraintCompiler, constraint: Constraint, seed: int) -> str:
    """A text of random allowed tokens. The end is chosen as soon as it is allowed."""
    draw, matcher, tokens = random.Random(seed), started(compiler, constraint), list[int]()
    while len(tokens) < 1000:
        choices = allowed(compiler, matcher)
        if END in choices:
            break
        tokens.append(draw.choice(choices))
        accept(compiler, matcher, tokens[-1])
    assert TOKENIZER is not None
    return TOKENIZER.decode(tokens)


SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 150}, "name": {"enum": ["Romeo", "Juliet"]}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.mark.parametrize("seed", range(8))
def test_random_allowed_tokens_make_json_that_the_schema_accepts(compiler: ConstraintCompiler, seed: int) -> None:
    value = json.loads(sampled(compiler, Constraint.json_schema(SCHEMA), seed))
    assert set(value) == {"name", "age"}
    assert value["name"] in ("Romeo", "Juliet")
    assert 0 <= value["age"] <= 150


@pytest.mark.parametrize("seed", range(4))
def test_random_allowed_tokens_match_a_regular_expression(compiler: ConstraintCompiler, seed: int) -> None:
    text = sampled(compiler, Constraint("regex", "[a-c]{3}-[0-9]{2}"), seed)
    assert len(text) == 6
    assert set(text[:3]) <= set("abc")
    assert text[3] == "-"
    assert text[4:].isdigit()


def test_random_allowed_tokens_make_one_of_several_texts(compiler: ConstraintCompiler) -> None:
    constraint = Constraint.choice(["yes", "no", 'a "quote"'])
    assert {sampled(compiler, constraint, seed) for seed in range(20)} == {"yes", "no", 'a "quote"'}


def test_a_grammar_may_be_recursive(compiler: ConstraintCompiler) -> None:
    text = sampled(compiler, Constraint("grammar", 'start: "(" start ")" | "x"'), 3)
    assert text == "(" * text.count("(") + "x" + ")" * text.count("(")


def test_a_complete_text_can_only_end(compiler: ConstraintCompiler) -> None:
    matcher = started(compiler, Constraint.choice(["!"]))
    assert allowed(compiler, matcher) == [1]
    accept(compiler, matcher, 1)
    assert allowed(compiler, matcher) == [END]


def test_matchers_of_one_constraint_go_their_own_ways(compiler: ConstraintCompiler) -> None:
    constraint = Constraint("regex", "[!#]{2}")
    one, other = started(compiler, constraint), started(compiler, constraint)
    accept(compiler, one, 1, 3)
    assert allowed(compiler, one) == [END]
    assert END not in allowed(compiler, other)
    assert allowed(compiler, started(compiler, constraint)) == allowed(compiler, other)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ('["a"]', ("regex", "choice")),  # a quote or the letter; the letter
        ("true", ("regex", "json_schema")),  # this word; any JSON
        ('start: "x"', ("regex", "grammar")),  # these words; the letter
    ],
)
def test_constraints_of_one_text_and_two_kinds_are_not_the_same(
    compiler: ConstraintCompiler, text: str, kinds: tuple[str, str]
) -> None:
    both = [Constraint(kind, text) for kind in kinds]
    for one in (*both, *both[::-1]):  # whichever comes first
        assert compiler.compile(one) is compiler.compile(Constraint(one.kind, one.text))
    by_kind = [allowed(compiler, started(compiler, one)) for one in both]
    assert len({*map(tuple, by_kind)}) == len(both)


def test_the_constraints_used_last_are_kept_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TOKENIZER is not None
    monkeypatch.setattr(constraints, "_MAX_COMPILED", 2)
    compiler = ConstraintCompiler(TOKENIZER, VOCABULARY, [END])
    a, b, c = (Constraint("regex", letter) for letter in "abc")
    first, _, again, _ = (compiler.compile(one) for one in (a, b, a, c))
    assert again is first is compiler.compile(a)
    assert [*compiler._compiled] == [c, a]  # not b, which was not used since


def test_a_constraint_keeps_options_and_characters_of_its_text() -> None:
    assert Constraint.choice(["é", 'a "b"']).text == '["é","a \\"b\\""]'
    schema = {"type": "object", "x-guidance": {"whitespace_flexible": False, "coerce_one_of": True}}
    assert Constraint.json_schema(schema).text == json.dumps(schema, separators=(",", ":"))
    free = json.loads(Constraint.json_schema(schema, any_whitespace=True).text)
    assert free == schema  # what the schema says beats the argument
    assert json.loads(Constraint.json_schema({"type": "null"}, any_whitespace=True).text) == {
        "type": "null",
        "x-guidance": {"whitespace_flexible": True},
    }


@pytest.mark.parametrize(("vocabulary", "words"), [(1, 1), (32, 1), (33, 2), (1024, 32), (1025, 33)])
def test_a_mask_has_a_bit_for_each_token(vocabulary: int, words: int) -> None:
    assert constraints.all_allowed(3, vocabulary).shape == (3, words)
    assert {*constraints.all_allowed(3, vocabulary).ravel().tolist()} == {0xFFFFFFFF}


def test_errors_of_the_library_are_one_line_of_limited_length() -> None:
    assert constraints.one_line("") == ""
    assert constraints.one_line("what\n  quoted\nerror: why\nerror: more") == "what why"
    assert constraints.one_line("what\nquoted") == "what"
    assert constraints.one_line("x" * 400) == "x" * 400
    assert constraints.one_line("x" * 401) == "x" * 400 + "..."


def test_masks_of_a_text_are_those_of_each_step_until_a_token_is_refused(compiler: ConstraintCompiler) -> None:
    compiled = compiler.compile(Constraint("regex", "[!#]{2}"))
    matcher, expected = compiled.matcher(), []
    for token in (1, 3, END):
        expected.append(masks(compiler, 1, {0: matcher})[0])
        accept(compiler, matcher, token)
    given = [*compiler.masks_of(compiled, [1, 3, END])]
    np.testing.assert_array_equal(given, expected)
    assert len({mask.tobytes() for mask in given}) == 2
    np.testing.assert_array_equal([*compiler.masks_of(compiled, [1, 9, 3])], expected[:2])


def test_a_matcher_goes_on_from_the_tokens_that_a_text_has(compiler: ConstraintCompiler) -> None:
    compiled = compiler.compile(Constraint("regex", "[!#]{2}"))
    assert allowed(compiler, compiled.matcher([1, 3])) == [END]
    for _ in range(3):  # also with one from the pool
        assert allowed(compiler, compiled.matcher([1])) == allowed(compiler, compiled.matcher()) != [END]


def test_masks_of_several_samples_are_those_of_each_alone(compiler: ConstraintCompiler) -> None:
    constraints = [Constraint.json_schema(SCHEMA), Constraint("regex", "[0-9]+"), Constraint.choice(["a", "b"])]
    together = masks(compiler, 5, {2 * row: started(compiler, one) for row, one in enumerate(constraints)})
    for row, constraint in enumerate(constraints):
        np.testing.assert_array_equal(together[2 * row], masks(compiler, 1, {0: started(compiler, constraint)})[0])
    assert (together[1] == 0xFFFFFFFF).all()
    assert (together[3] == 0xFFFFFFFF).all()


def test_rows_without_constraints_allow_all_tokens(compiler: ConstraintCompiler) -> None:
    free = masks(compiler, 3, {})
    matcher = started(compiler, Constraint.choice(["a"]))
    np.testing.assert_array_equal(masks(compiler, 3, {1: matcher})[[0, 2]], free[:2])
    assert np.unpackbits(free[0].view(np.uint8), bitorder="little").sum() >= VOCABULARY


def test_masks_of_a_step_and_of_the_next_may_be_asked_for_at_once(compiler: ConstraintCompiler) -> None:
    # The second ones are asked for before the library's matchers have been made for the first.
    for _ in range(20):
        matchers = {row: started(compiler, Constraint.choice(["abc", "!"])) for row in range(8)}
        first = compiler.start_masks(8, matchers, list)

        def accepted(
            matchers: dict[int, Matcher] = matchers, first: Future[Masks] = first
        ) -> list[tuple[Matcher, int]]:
            first.result()
            return [(matcher, 1) for matcher in matchers.values()]

        second = compiler.start_masks(8, matchers, accepted).result()
        assert second.failures == {}
        assert (np.asarray(second.allowed) == np.asarray(first.result().allowed)).all(axis=1).sum() == 0
        assert allowed(compiler, matchers[0]) == [END]


def begun(compiler: ConstraintCompiler, constraint: Constraint, count: int) -> tuple[list[Matcher], np.ndarray]:
    """Samples that begin together, and their masks."""
    compiled = compiler.compile(constraint)
    matchers = [compiled.matcher() for _ in range(count)]
    return matchers, masks(compiler, count, dict(enumerate(matchers)))


def pooled_matchers(compiler: ConstraintCompiler) -> int:
    """Returns the number of matchers in the pool, once it is complete."""
    deadline = time.monotonic() + 300
    while compiler._pool._is_busy and time.monotonic() < deadline:
        time.sleep(0.01)
    return sum(map(len, compiler._pool._matchers.values()))


def test_samples_begin_with_matchers_that_were_made_in_advance() -> None:
    assert TOKENIZER is not None
    compiler = ConstraintCompiler(TOKENIZER, VOCABULARY, [END])
    constraint = Constraint.json_schema(SCHEMA)
    _, first = begun(compiler, constraint, 3)
    assert pooled_matchers(compiler) == 0  # the constraint may occur in a single request
    begun(compiler, constraint, 3)
    assert pooled_matchers(compiler) == 3
    pooled = {*map(id, *compiler._pool._matchers.values())}
    matchers, again = begun(compiler, constraint, 4)
    assert len(pooled & {id(matcher.state) for matcher in matchers}) == 3
    assert len({id(matcher.state) for matcher in matchers}) == 4
    np.testing.assert_array_equal(again[:3], first)
    np.testing.assert_array_equal(again[3:], first[:1])
    assert pooled_matchers(compiler) == 4
    # Each goes its own way.
    (brace,) = TOKENIZER.encode("{")
    accept(compiler, matchers[0], brace)
    np.testing.assert_array_equal(masks(compiler, 1, {0: matchers[1]}), first[:1])
    np.testing.assert_array_equal(begun(compiler, constraint, 4)[1], again)


def test_matchers_of_ended_samples_are_freed() -> None:
    assert TOKENIZER is not None
    compiler = ConstraintCompiler(TOKENIZER, VOCABULARY, [END])
    matchers, _ = begun(compiler, Constraint.choice(["!"]), 100)
    references = [weakref.ref(matcher) for matcher in matchers]
    while matchers:
        matchers.pop().end()
    assert pooled_matchers(compiler) == 0
    gc.collect()
    assert all(reference() is None for reference in references)


def test_there_is_a_limit_to_the_matchers_that_are_made_in_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "_MAX_POOLED", 6)
    assert TOKENIZER is not None
    compiler = ConstraintCompiler(TOKENIZER, VOCABULARY, [END])
    a, b, c = (Constraint("regex", f"{letter}[0-9]+") for letter in "abc")
    for constraint, count in ((a, 3), (b, 2), (c, 8)):
        for _ in range(2):
            begun(compiler, constraint, count)
        assert pooled_matchers(compiler) == {a: 3, b: 5, c: 6}[constraint]


def check_same_masks(compiler: ConstraintCompiler, others: ConstraintCompiler) -> None:
    draw = random.Random(0)
    for text in (SCHEMA, {"type": "string", "maxLength": 12}, {"type": "array", "items": {"type": "string"}}):
        one, other = (started(library, Constraint.json_schema(text)) for library in (compiler, others))
        for _ in range(60):
            mask = masks(compiler, 1, {0: one})
            np.testing.assert_array_equal(mask, masks(others, 1, {0: other}))
            choices = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
            token = draw.choice(choices)
            if token == END:
                break
            accept(compiler, one, token)
            accept(others, other, token)


def test_no_mask_depends_on_the_classes_of_tokens_that_make_it_faster(
    compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraints, "_SLICES", [])
    assert TOKENIZER is not None
    check_same_masks(compiler, ConstraintCompiler(TOKENIZER, VOCABULARY, [END]))


def test_no_mask_depends_on_who_tokenizes_what_is_certain(
    compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraints._CalledTokenizer, "has_tokens_of", lambda *_: False)
    calls, call = [], constraints._CalledTokenizer.__call__

    def noted(tokenizer: object, text: str) -> list[int]:
        calls.append(text)
        return call(tokenizer, text)  # type: ignore[arg-type]

    monkeypatch.setattr(constraints._CalledTokenizer, "__call__", noted)
    assert TOKENIZER is not None
    check_same_masks(compiler, ConstraintCompiler(TOKENIZER, VOCABULARY, [END]))
    assert calls


def with_an_added_token(path: Path) -> Tokenizer:
    """A tokenizer with an added token that is not special."""
    with_byte_fallback(path)
    written = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    written.add_tokens(["aab"])
    written.save(str(path / "tokenizer.json"))
    tokenizer = Tokenizer.load(path)
    assert tokenizer is not None
    return tokenizer


def test_threads_that_compute_masks_do_not_wait_for_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the tokenizer was called")

    monkeypatch.setattr(constraints._CalledTokenizer, "__call__", refuse)
    assert TOKENIZER is not None
    for tokenizer in (TOKENIZER, with_byte_fallback(tmp_path), with_an_added_token(tmp_path)):
        compiler = ConstraintCompiler(tokenizer, len(tokenizer), [END])
        matcher = started(compiler, Constraint.json_schema(SCHEMA))
        for _ in range(8):
            row = masks(compiler, 1, {0: matcher})
            token = int(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))[0])
            assert not accept(compiler, matcher, token).failures


def test_added_tokens_are_no_text_even_if_they_are_not_special(tmp_path: Path) -> None:
    tokenizer = with_an_added_token(tmp_path)
    (added,) = tokenizer.encode("aab", add_special_tokens=False)
    compiler = ConstraintCompiler(tokenizer, len(tokenizer), [END])
    row = masks(compiler, 1, {0: started(compiler, Constraint("regex", "[a-z]+"))})
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    assert bits.any()
    assert not bits[added]


def test_a_refused_token_is_a_failure_of_its_row(compiler: ConstraintCompiler) -> None:
    one, other = (started(compiler, Constraint.choice(["!"])) for _ in range(2))
    result = compiler.start_masks(4, {1: one, 2: other}, partial(list, [(one, 5)])).result()
    assert list(result.failures) == [1]
    assert "doesn't satisfy the grammar" in result.failures[1]
    assert (np.asarray(result.allowed)[1] == 0xFFFFFFFF).all()
    assert allowed(compiler, other) == [1]


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (Constraint("regex", "(a"), "unclosed group"),
        (Constraint("json_schema", '{"type": "foo"}'), "Invalid type: foo"),
        (Constraint("json_schema", "[1"), "is not valid"),
        (Constraint("grammar", "begin: x"), "start"),
        (Constraint("choice", "3"), "is not valid"),
        (Constraint("choice", '["a", 2]'), "is not valid"),
        (Constraint("choice", "[]"), "is not valid"),
    ],
)
def test_an_invalid_constraint_is_refused_by_name(
    compiler: ConstraintCompiler, constraint: Constraint, message: str
) -> None:
    with pytest.raises(ValueError, match=f"the constraint's {constraint.kind} is not valid") as raised:
        compiler.compile(constraint)
    assert message in str(raised.value)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kind is 'xml'; accepted: json_schema, regex, grammar, choice"):
        Constraint("xml", "")


def test_a_model_without_an_end_token_has_no_constraints() -> None:
    assert TOKENIZER is not None
    with pytest.raises(ValueError, match="end-of-sequence token"):
        ConstraintCompiler(TOKENIZER, VOCABULARY, [])


def test_an_expression_that_would_take_much_memory_ends_its_own_sample(compiler: ConstraintCompiler) -> None:
    matcher = started(compiler, Constraint("regex", "(a{1000}){1000}"))
    (token,) = allowed(compiler, matcher)
    assert "too many expressions" in accept(compiler, matcher, token).failures[0]


def test_a_sample_does_not_fail_for_the_states_that_its_neighbours_have_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limits of a constraint count what one sample has reached. Together these samples go beyond them."""
    assert TOKENIZER is not None
    monkeypatch.setattr(constraints, "_LIMITS", constraints._LIMITS | {"max_lexer_states": 1000})
    compiler = ConstraintCompiler(TOKENIZER, VOCABULARY, [END])
    constraint = compiler.compile(Constraint("regex", r"(.|\n)*a(.|\n){30}"))
    (a,), (b,) = (TOKENIZER.encode(letter) for letter in "ab")

    def steps(matcher: Matcher, seed: int, count: int) -> bool:
        """Returns whether a sample fails within this number of random tokens."""
        draw = random.Random(seed)
        return any(accept(compiler, matcher, draw.choice([a, b])).failures for _ in range(count))

    assert not any(steps(constraint.matcher(), seed, 90) for seed in range(4))
    assert steps(constraint.matcher(), 0, 180)
