"""Models that pool: their heads and hidden states against transformers, their files, and what is refused."""

import dataclasses
import functools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import models
from detjax.models import CheckpointError, Decoder, KVCache, load, save
from detjax.models.checkpoint.weight_updates import UpdatableWeights
from detjax.models.parts.pooling import ChunkRows, PooledRows, carried_on, embeddings, scores
from tests.models.hugging_face import FIXTURES, changed_json, changed_tensors, tensors
from tests.support.bits import assert_same_bits, same_bits
from tests.support.simulated_devices import ALL_HOLD, run_on_devices

POOLING = FIXTURES / "pooling"
HEADS = ("classifier", "process-reward", "reward")
TOLERANCE = 2e-4


@functools.cache
def model(name: str) -> Decoder:
    return load(POOLING / name, dtype="float32", progress=False)[0]


@functools.cache
def reference(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(POOLING / name / "reference.npz"))


def copied(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(POOLING / name, folder / name))


# --- transformers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HEADS)
def test_logits_of_classes_are_those_of_transformers(name: str) -> None:
    tokens = jnp.asarray(reference(name)["tokens"][None])
    with detjax.use_backend("stock"):
        logits = np.asarray(detjax.jit(model(name).__call__)(tokens))[0]
    np.testing.assert_allclose(logits, reference(name)["logits"], rtol=0, atol=TOLERANCE)


def test_hidden_states_of_a_model_without_a_head_are_those_of_transformers() -> None:
    tokens = jnp.asarray(reference("embedding")["tokens"][None])
    with detjax.use_backend("stock"):
        hidden = np.asarray(model("embedding").hidden(tokens)[0])[0]
    np.testing.assert_allclose(hidden, reference("embedding")["hidden"], rtol=0, atol=TOLERANCE)


def test_the_options_are_read() -> None:
    pooling = {name: model(name).config.pooling for name in (*HEADS, "embedding")}
    labels = {name: None if one is None else one.labels for name, one in pooling.items()}
    assert labels == {
        "classifier": ("bad", "fair", "good"),
        "process-reward": ("LABEL_0", "LABEL_1"),
        "reward": ("LABEL_0",),
        "embedding": (),
    }
    assert [pooling[name].score for name in HEADS] == ["softmax", "softmax", "sigmoid"]  # pyright: ignore
    embedding = pooling["embedding"]
    assert embedding is not None
    assert (embedding.method, embedding.normalized, embedding.dimensions) == ("last", True, (16, 40))
    assert [name for name, _ in embedding.prompts] == ["document", "query"]


# --- one set of bits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["process-reward", "reward"])
def test_chunks_give_the_logits_of_one_call_among_other_requests(name: str) -> None:
    decoder, given = model(name), reference(name)["tokens"][:75]
    others = np.random.default_rng(0).integers(0, decoder.config.vocab_size, (2, 75))
    tokens = jnp.asarray(np.stack([others[0], given, others[1]]), jnp.int32)
    whole = detjax.jit(decoder.__call__)(tokens[1:2])
    step = detjax.jit(lambda tokens, cache: decoder(tokens, cache))
    cache, pieces = KVCache.empty(decoder.config, 3, 75, decoder.dtype), []
    for start in range(0, 75, 25):
        logits, cache = step(tokens[:, start : start + 25], cache)
        pieces.append(np.asarray(logits)[1])
    assert_same_bits(np.concatenate(pieces), np.asarray(whole)[0])


def test_rows_are_added_in_the_order_of_their_positions_in_any_chunks() -> None:
    rng = np.random.default_rng(0)
    rows = [
        (rng.standard_normal((count, 7)) * 10.0 ** rng.integers(-3, 4, (count, 1))).astype(np.float32)
        for count in (9, 5)
    ]
    expected = np.zeros((2, 7), np.float32)
    for number, matrix in enumerate(rows):
        for row in matrix:
            expected[number] = expected[number] + row
    carried = {}
    for sizes in ((9, 5), (4, 2), (1, 1)):
        total = jnp.full((3, 7), 7.0)  # what earlier sequences left there
        begin = [0, 0]
        while any(begin[one] < len(rows[one]) for one in (0, 1)):
            chunk = [matrix[start : start + size] for matrix, start, size in zip(rows, begin, sizes, strict=True)]
            padded = np.concatenate([np.pad(part, ((0, 9 - len(part)), (0, 0)), constant_values=3) for part in chunk])
            counts = [len(part) for part in chunk]
            slots = [slot if count else 3 for slot, count in zip((2, 0), counts, strict=True)]
            chunks = ChunkRows(*(np.array(values, np.int32) for values in ([0, 9], counts, begin, slots)))
            total = carried_on(total, jnp.asarray(padded), chunks, method="mean")
            begin = [start + count for start, count in zip(begin, counts, strict=True)]
        carried[sizes] = np.asarray(total)[[2, 0]]
        assert_same_bits(carried[sizes], expected)
    assert not same_bits(np.stack([matrix[::-1].cumsum(axis=0)[-1] for matrix in rows]), expected)


def test_an_embedding_is_cut_and_then_normalized() -> None:
    rows = np.float32([[3, 4, 12], [0, 0, 0], [3, 4, 12]])
    wanted = PooledRows(np.array([True, True, False]), np.array([2, 3, 2], np.int32))
    given = np.asarray(embeddings(jnp.asarray(rows), wanted))
    np.testing.assert_allclose(given, [[0.6, 0.8, 0], [0, 0, 0], [3, 4, 0]], rtol=1e-6)


def test_scores_are_functions_of_logits() -> None:
    logits, wanted = jnp.asarray([[0.0, 2.0], [0.0, 2.0]]), PooledRows(np.array([True, False]), np.zeros(2, np.int32))
    options = model("classifier").config.pooling
    assert options is not None
    for score, expected in (("softmax", [0.1192029, 0.8807971]), ("sigmoid", [0.5, 0.8807971]), ("identity", [0, 2])):
        given = np.asarray(scores(logits, dataclasses.replace(options, score=score), wanted))
        np.testing.assert_allclose(given, [expected, [0, 2]], rtol=1e-6)


def test_every_number_of_devices_gives_the_bits_of_one() -> None:
    run_on_devices(__name__, devices=2)


def main() -> None:
    """Compares the head's logits on one device and on two."""
    for name in ("process-reward", "reward"):
        decoder, tokens = model(name), jnp.asarray(reference(name)["tokens"][None, :11])
        mesh = models.mesh_of(2)
        assert mesh is not None
        assert_same_bits(np.asarray(models.sharded(decoder, mesh)(tokens)), np.asarray(decoder(tokens)))
    print(ALL_HOLD)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*HEADS, "embedding"])
def test_saved_checkpoints_have_the_same_options_and_tensors(name: str, tmp_path: Path) -> None:
    decoder, tokenizer = load(POOLING / name, progress=False)
    save(decoder, tmp_path / "saved", tokenizer=tokenizer)
    again, _ = load(tmp_path / "saved", progress=False)
    assert again.config == decoder.config
    assert models.digest(again) == models.digest(decoder)
    stored, written = tensors(POOLING / name), tensors(tmp_path / "saved")
    if name == "embedding":
        stored = {f"model.{tensor}": x for tensor, x in stored.items()}
    assert stored.keys() == written.keys()
    for tensor, x in stored.items():
        assert_same_bits(written[tensor], x)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["architectures"] == json.loads((POOLING / name / "config.json").read_text())["architectures"]


@pytest.mark.parametrize("name", ["embedding", "reward"])
def test_updates_of_weights_are_read_as_the_checkpoint_is(name: str) -> None:
    decoder, _ = load(POOLING / name, progress=False)
    update = UpdatableWeights(decoder).read(POOLING / name, lambda _: None, needs_all=True)
    assert update.is_whole
    assert update.digest.value == models.digest(decoder)


def test_a_head_that_nobody_needs_is_skipped(tmp_path: Path) -> None:
    folder = copied("embedding", tmp_path)
    with changed_tensors(folder / "model.safetensors") as stored:
        stored["lm_head.weight"] = stored["embed_tokens.weight"] * 2
    assert models.digest(load(folder, progress=False)[0]) == models.digest(
        load(POOLING / "embedding", progress=False)[0]
    )


def test_a_language_models_head_gives_the_answers_logits() -> None:
    overrides = {"classifier_from_token": ["a", "b", "c"], "method": "no_post_processing"}
    generates, _ = load(FIXTURES / "qwen3", dtype="float32", progress=False)
    classifies, tokenizer = load(FIXTURES / "qwen3", dtype="float32", progress=False, overrides=overrides)
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((3, generates.config.hidden_size)), jnp.float32)
    assert tokenizer is not None
    ids = [tokenizer.id_of(text) or 0 for text in overrides["classifier_from_token"]]
    assert_same_bits(np.asarray(classifies.logits(hidden)), np.asarray(generates.logits(hidden))[:, ids])
    pair = {"classifier_from_token": ["a", "b"], "is_original_qwen3_reranker": True}
    reranks, _ = load(FIXTURES / "qwen3", dtype="float32", progress=False, overrides=pair)
    no, yes = np.asarray(generates.logits(hidden))[:, ids[:2]].T
    assert_same_bits(np.asarray(reranks.logits(hidden))[:, 0], yes - no)


def with_logit_score(folder: Path, name: str, activation: str, **tokens: int | None) -> Path:
    """A copy of a fixture with the files that Sentence Transformers 5.4 writes for a reranker."""
    copy = Path(shutil.copytree(FIXTURES / name, folder / name))
    types = ("base.modules.transformer.Transformer", "cross_encoder.modules.logit_score.LogitScore")
    paths = ("", "1_LogitScore")
    modules = [{"path": path, "type": f"sentence_transformers.{kind}"} for path, kind in zip(paths, types, strict=True)]
    (copy / "modules.json").write_text(json.dumps(modules))
    (copy / "1_LogitScore").mkdir()
    (copy / "1_LogitScore" / "config.json").write_text(json.dumps(tokens))
    settings = {"activation_fn": activation, "default_prompt_name": None, "model_type": "CrossEncoder", "prompts": {}}
    (copy / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return copy


def test_files_of_sentence_transformers_make_a_reranker(tmp_path: Path) -> None:
    sigmoid, identity = "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"
    generates, _ = load(FIXTURES / "qwen2", progress=False)
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((3, generates.config.hidden_size)), jnp.bfloat16)
    no, yes = np.asarray(generates.logits(hidden))[:, [7, 9]].T
    for number, (activation, false) in enumerate(((sigmoid, 7), (identity, None))):
        folder = with_logit_score(tmp_path / str(number), "qwen2", activation, true_token_id=9, false_token_id=false)
        decoder, _ = load(folder, progress=False)
        assert_same_bits(np.asarray(decoder.logits(hidden))[:, 0], yes - no if false else yes)
        pooling = decoder.config.pooling
        assert pooling is not None
        assert pooling.score == ("sigmoid" if false else "identity")
        save(decoder, tmp_path / f"saved {number}")
        assert load(tmp_path / f"saved {number}", progress=False)[0].config == decoder.config
    for key, value, message in (
        ("true_token_id", None, "true_token_id is None; accepted: an integer from 0 to "),
        ("false_token_id", 1 << 20, "false_token_id is 1048576; accepted: an integer from 0 to"),
    ):
        tokens = {"true_token_id": 9, "false_token_id": 7} | {key: value}
        with pytest.raises(CheckpointError, match=message):
            load(with_logit_score(tmp_path / key, "qwen2", sigmoid, **tokens), progress=False)


def test_files_of_sentence_transformers_say_how_a_classifier_scores(tmp_path: Path) -> None:
    folder = copied("reward", tmp_path)
    (folder / "modules.json").write_text('[{"path": "", "type": "sentence_transformers.models.Transformer"}]')
    settings = {"activation_fn": "torch.nn.modules.linear.Identity", "model_type": "CrossEncoder"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    decoder, _ = load(folder, progress=False)
    assert decoder.config.pooling is not None
    assert decoder.config.pooling.score == "identity"
    save(decoder, tmp_path / "saved")
    assert load(tmp_path / "saved", progress=False)[0].config == decoder.config
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings | {"default_prompt_name": "a"}))
    with pytest.raises(
        CheckpointError, match="default_prompt_name is 'a'; accepted: null, for models that score pairs"
    ):
        load(folder, progress=False)


def test_a_saved_reranker_reads_its_answers_without_a_tokenizer(tmp_path: Path) -> None:
    overrides = {"classifier_from_token": ["a", "b"], "method": "from_2_way_softmax"}
    decoder, _ = load(FIXTURES / "qwen3", progress=False, overrides=overrides)
    save(decoder, tmp_path / "saved")
    assert load(tmp_path / "saved", progress=False)[0].config == decoder.config


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "file", "changes", "message"),
    [
        (
            "classifier",
            "config.json",
            {"id2label": {"0": "a", "2": "b"}},
            "id2label is .*; accepted: an object of names",
        ),
        ("classifier", "config.json", {"num_labels": 2}, "num_labels is 2; accepted: 3, as id2label has"),
        ("classifier", "config.json", {"problem_type": "ranking"}, "problem_type is 'ranking'; accepted: regression, "),
        (
            "classifier",
            "config.json",
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}},
            r"activation_fn is .*Tanh'; accepted: torch.nn.modules.linear.Identity",
        ),
        ("classifier", "config.json", {"architectures": ["Qwen9ForSequenceClassification"]}, "also ForSequenceClassif"),
        ("embedding", "config.json", {"matryoshka_dimensions": [16, 57]}, "accepted: a list of integers from 1 to 56"),
        ("embedding", "config.json", {"is_matryoshka": 1, "matryoshka_dimensions": None}, "accepted: true, false"),
        (
            "embedding",
            "1_Pooling/config.json",
            {"pooling_mode_max_tokens": True},
            "true is pooling_mode_lasttoken, pooling_mode_max",
        ),
        ("embedding", "1_Pooling/config.json", {"pooling_mode": "max"}, "accepted: lasttoken, mean, cls"),
        ("embedding", "1_Pooling/config.json", {"include_prompt": False}, "include_prompt is False; accepted: true"),
        ("embedding", "1_Pooling/config.json", {"word_embedding_dimension": 64}, "accepted: 56, the hidden_size"),
        ("embedding", "config_sentence_transformers.json", {"default_prompt_name": "a"}, "accepted: null, document, "),
        ("embedding", "config_sentence_transformers.json", {"prompts": {"a": 1}}, "an object of texts by name"),
        ("embedding", "config_sentence_transformers.json", {"similarity_fn_name": "dot"}, "accepted: cosine"),
    ],
)
def test_other_options_are_refused(name: str, file: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = copied(name, tmp_path)
    with changed_json(folder / file) as raw:
        raw |= changes
    with pytest.raises(CheckpointError, match=message):
        load(folder, progress=False)


def test_other_modules_are_refused(tmp_path: Path) -> None:
    folder = copied("embedding", tmp_path)
    modules = json.loads((folder / "modules.json").read_text())
    dense = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    for listed, message in (
        (
            [*modules[:2], dense],
            "the modules are Transformer, Pooling, Dense, and the architecture is Qwen3ForCausalLM; a",
        ),
        (
            modules[:1],
            "the modules are Transformer, and the architecture is Qwen3ForCausalLM; accepted: Transformer, P",
        ),
        ({"modules": 1}, "accepted: a list of objects with a type and a path"),
    ):
        (folder / "modules.json").write_text(json.dumps(listed))
        with pytest.raises(CheckpointError, match=message):
            load(folder, progress=False)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"classifier_from_token": ["a", "b"]}, "method is missing; accepted: from_2_way_softmax, no_post_processing"),
        ({"is_original_qwen3_reranker": True}, r"classifier_from_token is missing; accepted: the tokens \["),
        ({"classifier_from_token": ["a"], "method": "from_2_way_softmax"}, r"\['a'\]; accepted: two tokens"),
        ({"classifier_from_token": "a", "method": "no_post_processing"}, "accepted: a list of tokens"),
        ({"classifier_from_token": ["a", "no such token"], "method": "from_2_way_softmax"}, "the tokenizer's ids are"),
        (
            {"classifier_from_token": ["a"], "classifier_token_ids": [1, 2], "method": "no_post_processing"},
            "accepted: the ids of the 1 tokens",
        ),
        (
            {"classifier_from_token": ["a"], "classifier_token_ids": [1], "method": "no_post_processing"},
            "the tokenizer's ids are",
        ),
    ],
)
def test_other_answers_are_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(FIXTURES / "qwen3", progress=False, overrides=overrides)


def test_a_text_may_be_no_longer_than_sentence_transformers_reads(tmp_path: Path) -> None:
    folder = copied("embedding", tmp_path)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 77, "do_lower_case": false}')
    assert load(folder, progress=False)[0].config.max_positions == 77
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 77, "do_lower_case": true}')
    with pytest.raises(CheckpointError, match="do_lower_case is True; accepted: false"):
        load(folder, progress=False)


def test_models_without_logits_of_tokens_say_so() -> None:
    hidden = jnp.zeros((1, model("embedding").config.hidden_size))
    with pytest.raises(ValueError, match="the model gives embeddings, not logits of tokens; accepted: one "):
        model("embedding").logits(hidden)
    with pytest.raises(ValueError, match="the model gives scores of classes, not logits of tokens"):
        model("reward").logprobs(jnp.zeros((1, 60)), jnp.zeros(1, jnp.int32))


if __name__ == "__main__":
    main(*sys.argv[1:])
