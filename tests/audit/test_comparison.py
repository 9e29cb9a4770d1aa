"""Logprobs from files of several engines are compared up to the first token that differs."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from detjax import cli
from detjax.audit import Transcript, compare, read_logprobs
from detjax.audit.comparison.compare import THRESHOLDS, Threshold
from detjax.audit.comparison.logprob_files import ScoredTokens
from detjax.engine import SamplingParams
from tests.support import commands

LOGPROBS = [-0.5, -1.25, -3.0]
IDS = [7, 8, 9]
TEXTS = ["a", "b", "c"]
FIRST = {"logprob": 0.0, "rank": 1}


def chat(texts: list[str], logprobs: list[float], top: list[str]) -> dict[str, Any]:
    content = [
        {"token": text, "logprob": logprob, "bytes": [1], "top_logprobs": [{"token": best, "logprob": logprob + 0.1}]}
        for text, logprob, best in zip(texts, logprobs, top, strict=True)
    ]
    return {"choices": [{"index": 0, "logprobs": {"content": content, "refusal": None}}]}


FORMATS: dict[str, Any] = {
    "transcript": Transcript((1,), SamplingParams(), tuple(IDS), tuple(LOGPROBS)).as_json(),
    "plain ids": {"tokens": IDS, "logprobs": LOGPROBS},
    "plain texts": {"tokens": TEXTS, "logprobs": LOGPROBS},
    "no tokens": {"logprobs": LOGPROBS},
    "generate": {
        "generations": [{"completions": [{"tokens": IDS, "logprobs": LOGPROBS, "top_logprobs": [[], [], []]}]}]
    },
    "chat": chat(TEXTS, LOGPROBS, TEXTS),
    "completions": {
        "choices": [
            {"token_ids": IDS, "logprobs": {"tokens": ["x", *TEXTS], "token_logprobs": [None, *LOGPROBS]}},
        ]
    },
    "responses": {
        "output": [
            {"type": "reasoning"},
            {"content": [{"logprobs": chat(TEXTS, LOGPROBS, TEXTS)["choices"][0]["logprobs"]["content"]}]},
        ]
    },
    "vLLM": {
        "outputs": [
            {
                "token_ids": IDS,
                "logprobs": [
                    {
                        str(token): {"logprob": logprob, "rank": 2, "decoded_token": text},
                        "3": {"logprob": 0.0, "rank": 1},
                    }
                    for token, logprob, text in zip(IDS, LOGPROBS, TEXTS, strict=True)
                ],
            }
        ]
    },
    "SGLang": {
        "text": "abc",
        "meta_info": {
            "output_token_logprobs": [[x, token, None] for x, token in zip(LOGPROBS, IDS, strict=True)],
            "output_top_logprobs": [[[-0.1, 3, None], [x, 5, None]] for x in LOGPROBS],
        },
    },
}


def written(path: Path, *values: Any) -> Path:
    path.write_text("\n".join(map(json.dumps, values)))
    return path


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_logprobs(name: str, tmp_path: Path) -> None:
    (sample,) = read_logprobs(written(tmp_path / "file.jsonl", FORMATS[name]))
    assert sample.logprobs.tolist() == LOGPROBS
    assert sample.ids in (None, IDS)
    assert sample.texts in (None, TEXTS)
    assert (sample.ids, sample.texts) != (None, None) or name == "no tokens"


def test_the_likeliest_tokens_are_read_where_an_engine_says_them(tmp_path: Path) -> None:
    engines = [read_logprobs(written(tmp_path / name, FORMATS[name]))[0] for name in ("vLLM", "SGLang", "chat")]
    assert [list(one.likeliest_ids or one.likeliest_texts or ()) for one in engines] == [[3] * 3, [3] * 3, TEXTS]
    assert compare(engines[:1], engines[1:2]).top1_agreement == 1.0


def test_lines_and_lists_hold_the_same_samples(tmp_path: Path) -> None:
    values = [FORMATS["transcript"], FORMATS["SGLang"]]
    whole = tmp_path / "whole.json"
    whole.write_text(json.dumps(values, indent=1))
    lines = read_logprobs(written(tmp_path / "lines.jsonl", *values))
    assert [one.ids for one in read_logprobs(whole)] == [one.ids for one in lines] == [IDS, IDS]


def test_tokens_count_up_to_the_first_that_differs(tmp_path: Path) -> None:
    first = read_logprobs(written(tmp_path / "a", chat(TEXTS, LOGPROBS, TEXTS), chat(TEXTS, LOGPROBS, TEXTS)))
    other = [-0.5, -1.25 - 2**-22, -1.0]
    second = read_logprobs(
        written(tmp_path / "b", chat(TEXTS, LOGPROBS, TEXTS), chat(["a", "b", "z"], other, ["a", "q", "z"]))
    )
    measured = compare(first, second)
    assert (measured.samples, measured.samples_of_equal_tokens, measured.first_other_token) == (2, 1, (1, 2))
    assert (measured.divergence.tokens, measured.divergence.unequal_tokens) == (5, 1)
    assert (measured.divergence.first_unequal, measured.divergence.largest_ulps) == ((1, 1), 2)
    assert measured.top1_agreement == 4 / 6  # the context before "z" was the same
    assert measured.divergence.k1 == 2**-22 / 5
    assert measured.beyond() == []


def test_an_answer_that_ends_earlier_differs_at_its_end(tmp_path: Path) -> None:
    first = read_logprobs(written(tmp_path / "a", {"tokens": IDS, "logprobs": LOGPROBS}))
    second = read_logprobs(written(tmp_path / "b", {"tokens": IDS[:2], "logprobs": LOGPROBS[:2]}))
    assert compare(first, second).first_other_token == compare(second, first).first_other_token == (0, 2)


def test_equal_sets_have_no_divergence_and_keep_every_threshold(tmp_path: Path) -> None:
    samples = read_logprobs(written(tmp_path / "a", FORMATS["vLLM"]))
    measured = compare(samples, samples)
    assert (measured.divergence.unequal_tokens, measured.largest_ratio, measured.smallest_ratio) == (0, 1.0, 1.0)
    assert (measured.effective_share, measured.top1_agreement, measured.beyond()) == (1.0, 1.0, [])


@pytest.mark.parametrize(
    ("change", "beyond"),
    [
        ([0.02, 0.0, 0.03], {"k1"}),
        ([0.3, -0.3, 0.0], {"k2", "k3"}),
        ([-12.0, 0.0, 0.0], {"k1", "k2", "k3", "smallest_ratio"}),
        ([5.0, 0.0, 0.0], {"k1", "k2", "k3"}),
    ],
)
def test_each_threshold_is_told(change: list[float], beyond: set[str], tmp_path: Path) -> None:
    moved = [x + y for x, y in zip(LOGPROBS, change, strict=True)]
    files = [written(tmp_path / name, {"logprobs": values}) for name, values in (("a", LOGPROBS), ("b", moved))]
    assert set(compare(*map(read_logprobs, files)).beyond()) == beyond <= set(THRESHOLDS)


def test_few_tokens_that_carry_all_the_weight_are_beyond_the_threshold(tmp_path: Path) -> None:
    before = written(tmp_path / "a", {"logprobs": [-9.0] * 10})
    after = written(tmp_path / "b", {"logprobs": [-1.0] + [-9.0] * 9})
    assert "effective_share" in compare(read_logprobs(before), read_logprobs(after)).beyond()


def test_minus_infinity_is_read_in_every_way_it_is_written(tmp_path: Path) -> None:
    (sample,) = read_logprobs(written(tmp_path / "a", {"logprobs": ["-inf", -9999.0, -1.0]}))
    assert sample.logprobs.tolist() == [-math.inf, -math.inf, -1.0]
    assert sample.logprobs.dtype == np.float32


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ([], "compare: 1 and 0 samples; accepted: equal numbers"),
        (
            [{"tokens": TEXTS, "logprobs": LOGPROBS}],
            "compare: sample 0 has token ids on one side and texts on the other",
        ),
        ([{"logprobs": LOGPROBS[:2]}], "compare: sample 0 has 3 and 2 logprobs"),
    ],
)
def test_sets_that_do_not_belong_together_are_refused(second: list[Any], message: str, tmp_path: Path) -> None:
    first = read_logprobs(written(tmp_path / "a", {"tokens": IDS, "logprobs": LOGPROBS}))
    other = read_logprobs(written(tmp_path / "b", *second)) if second else []
    with pytest.raises(ValueError, match=message):
        compare(first, other)


@pytest.mark.parametrize("value", [3, {}, {"choices": [{"text": "x"}]}, {"logprobs": ["x"]}, {"meta_info": {}}])
def test_a_value_without_logprobs_is_refused_with_its_place(value: Any, tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", FORMATS["SGLang"], value)
    with pytest.raises(ValueError, match=r"line 2 .*accepted: transcripts, responses of OpenAI's API"):
        read_logprobs(file)


def test_the_command_prints_every_measure_and_ends_with_1_beyond_a_threshold(tmp_path: Path) -> None:
    near, far = ({"tokens": IDS, "logprobs": [x - d for x in LOGPROBS]} for d in (1e-6, 1.0))
    files = {
        name: str(written(tmp_path / name, value))
        for name, value in (("a", FORMATS["SGLang"]), ("b", near), ("c", far))
    }
    shown = commands.run(cli.main, "divergence", files["a"], files["b"], env={"COLUMNS": "120"})
    assert shown.exit_code == 0
    for name in ("first token that differs", "k1", "k2", "k3", "same most likely token", "ulps", "effective sample"):
        assert name in shown.output
    failed = commands.run(cli.main, "divergence", files["a"], files["c"], "--json")
    assert failed.exit_code == 1
    assert set(json.loads(failed.output)["beyond"]) == {"k1", "k2", "k3"}
    absent = commands.run(cli.main, "divergence", files["a"], tmp_path / "absent")
    assert absent.exit_code == 2


@pytest.mark.parametrize(("is_least", "within"), [(False, [True, True, False]), (True, [False, True, True])])
def test_a_bound_itself_is_within_it_and_nan_is_not(is_least: bool, within: list[bool]) -> None:
    threshold = Threshold("measure", 0.5, is_least, "source")
    assert [threshold.holds(x) for x in (0.25, 0.5, 0.75)] == within
    assert not threshold.holds(math.nan)


def test_thresholds_are_those_of_the_literature() -> None:
    bounds = {name: (one.bound, one.is_least) for name, one in THRESHOLDS.items()}
    upper = dict.fromkeys(("k1", "k2", "k3"), (0.01, False))
    assert bounds == upper | {"effective_share": (0.3, True), "smallest_ratio": (1e-4, True)}


@pytest.mark.parametrize(
    ("value", "read"),
    [(-9999.0, -math.inf), (-9998.5, -9998.5), (-1e30, -math.inf), ("-inf", -math.inf), (None, math.nan)],
)
def test_logprobs_from_9999_on_are_minus_infinity(value: Any, read: float, tmp_path: Path) -> None:
    (sample,) = read_logprobs(written(tmp_path / "a", {"logprobs": [value]}))
    np.testing.assert_equal(sample.logprobs, np.float32([read]))


def test_the_likeliest_token_of_vllm_is_the_first_by_rank_or_by_logprob(tmp_path: Path) -> None:
    entries: list[dict[str, Any]] = [
        {"7": {"logprob": -1.0, "rank": 2}, "3": {"logprob": -0.5, "rank": 1}},
        {"7": {"logprob": -1.0, "rank": 3}},  # the likeliest one is unknown
        {"7": {"logprob": -0.25}, "3": {"logprob": -0.5}},
        {"7": {"logprob": -0.25}},
        {"7": -0.75, "3": -0.5},
    ]
    (sample,) = read_logprobs(written(tmp_path / "a", {"token_ids": [7] * 5, "logprobs": entries}))
    assert list(sample.likeliest_ids or ()) == [3, None, 7, None, 3]
    assert sample.logprobs.tolist() == [-1.0, -1.0, -0.25, -0.25, -0.75] and sample.texts is None


def test_an_echoed_prompt_is_left_out_where_ids_say_how_long_the_answer_is(tmp_path: Path) -> None:
    logprobs = {
        "tokens": ["p", "q", "a"],
        "token_logprobs": [None, -2.0, -0.5],
        "top_logprobs": [None, {"q": -2.0}, {"a": -0.5, "b": -0.25}],
    }
    file = written(tmp_path / "a", {"choices": [{"token_ids": [9], "logprobs": logprobs}, {"logprobs": logprobs}]})
    answer, whole = read_logprobs(file)
    assert (answer.ids, answer.texts, answer.likeliest_texts) == ([9], ["a"], ["b"])
    assert answer.logprobs.tolist() == [-0.5]
    assert whole.ids is None and whole.texts == ["p", "q", "a"] and whole.likeliest_texts == [None, "q", "b"]


def test_ratios_and_shares_are_those_of_the_probabilities() -> None:
    one, other = (
        ScoredTokens(np.float32(x), ids=[1, 2, 3]) for x in ([-1.0, -2.0, -math.inf], [-2.0, -1.0, -math.inf])
    )
    measured = compare([one], [other])
    assert (measured.largest_ratio, measured.smallest_ratio) == (math.e, math.exp(-1))
    assert measured.effective_share == measured.divergence.effective_sample_size / 3
    assert measured.top1_agreement is None
    impossible = compare([other], [ScoredTokens(np.float32([-2.0, -math.inf, 0.0]), ids=[1, 2, 3])])
    assert (impossible.largest_ratio, impossible.smallest_ratio) == (math.inf, 0.0)
    unknown = compare([one], [ScoredTokens(np.float32([math.nan, -1.0, -1.0]), ids=[1, 2, 3])])
    assert math.isnan(unknown.largest_ratio) and math.isnan(unknown.smallest_ratio)
    assert {"k1", "k2", "k3", "effective_share", "smallest_ratio"} == set(unknown.beyond())
    none = compare([], [])
    assert (none.largest_ratio, none.smallest_ratio, none.effective_share) == (1.0, 1.0, 1.0)


def test_ids_count_where_both_sides_have_them_and_texts_otherwise() -> None:
    numbers = np.float32([-1.0, -1.0])
    first = ScoredTokens(numbers, ids=[1, 2], texts=["a", "b"])
    assert compare([first], [ScoredTokens(numbers, ids=[1, 3], texts=["a", "b"])]).first_other_token == (0, 1)
    assert compare([first], [ScoredTokens(numbers, texts=["a", "b"])]).first_other_token is None
    assert compare([first], [ScoredTokens(numbers, texts=["c", "b"])]).first_other_token == (0, 0)
