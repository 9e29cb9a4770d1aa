import dataclasses
import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from detjax.models import CheckpointError, Decoder, DecoderConfig, Draft, KVCache, load, load_draft
from tests.models.draft_files import (
    COLUMNS,
    Tensors,
    as_decoder,
    eagle3_config,
    eagle3_hidden,
    eagle3_logits,
    eagle3_tensors,
    in_speculators_layout,
    rms,
    speculators_config,
    with_next_token_layer,
    write,
)
from tests.models.hugging_face import changed_json, changed_tensors, tensors
from tests.support.bits import assert_same_bits

WIDTH, VOCABULARY, GUESSED, LAYERS = 32, 48, 20, 8
TOLERANCE = 2e-4
IDS = np.random.default_rng(1).integers(0, VOCABULARY, (2, 9))


@functools.cache
def target() -> Decoder:
    """A small Llama of 8 layers; its own rotary embedding is not the head's."""
    config = DecoderConfig.from_hugging_face(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": WIDTH,
            "intermediate_size": 40,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rope_theta": 10000.0,
            "vocab_size": VOCABULARY,
        },
        "config.json",
    )
    return Decoder(config, rngs=nnx.Rngs(0))


@functools.cache
def residuals() -> tuple[np.ndarray, ...]:
    """The residual streams that enter each layer, for IDS."""
    return tuple(np.asarray(x, float) for x in _hidden_and_residuals(tuple(range(LAYERS)))[1])


def _hidden_and_residuals(depths: tuple[int, ...]) -> tuple[Any, Any]:
    cache = target().empty_cache(*IDS.shape)
    queries = cache.next_queries(jnp.full(len(IDS), IDS.shape[1]))
    hidden, streams, _ = target().hidden_and_residual_states(jnp.asarray(IDS), queries, cache.state, depths=depths)
    return hidden, streams


def expected(head: Tensors, depths: tuple[int, ...], **options: Any) -> np.ndarray:
    """The logits of a head by its formulas, for IDS."""
    table = head.get("embed_tokens.weight", np.asarray(target().embedding.weight[...])).astype(float)
    features = np.concatenate([residuals()[depth] for depth in depths], axis=-1)[:, :-1]
    mapped = features @ head["fc.weight"].astype(float).T
    next_tokens = IDS[:, :-1] if options.get("fault") == "token of its own row" else IDS[:, 1:]
    rows = zip(table[next_tokens], mapped, strict=True)
    return np.stack([eagle3_logits(head, eagle3_hidden(head, *row, **options)) for row in rows])


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = eagle3_config(WIDTH, VOCABULARY, GUESSED)
    return write(tmp_path_factory.mktemp("eagle3"), config, eagle3_tensors(WIDTH, VOCABULARY, GUESSED))


@pytest.fixture
def copied(eagle3: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(eagle3, tmp_path / "copy"))


def test_a_residual_stream_is_what_a_shorter_decoder_ends_with() -> None:
    hidden, streams = _hidden_and_residuals((0, 3))
    assert_same_bits(streams[0], target().embedding(jnp.asarray(IDS)))
    shorter = Decoder(dataclasses.replace(target().config, layers=3, windows=(None,) * 3), rngs=nnx.Rngs(0))
    shorter.embedding, shorter.final_norm = target().embedding, target().final_norm
    shorter.layers = nnx.List(list(target().layers)[:3])
    assert_same_bits(target().final_norm(streams[1]), shorter.hidden(jnp.asarray(IDS))[0])
    assert_same_bits(hidden, target().hidden(jnp.asarray(IDS))[0])


def test_an_eagle3_head_has_the_logits_of_its_formulas(eagle3: Path) -> None:
    draft, head = load_draft(eagle3, target()), tensors(eagle3)
    logits = draft.logits(IDS)
    assert logits.shape == (2, 8, GUESSED) and logits.dtype == np.float32 and draft.vocab_size == GUESSED
    np.testing.assert_allclose(logits, expected(head, (2, 4, 5)), atol=TOLERANCE)
    assert draft.target_ids is not None
    np.testing.assert_array_equal(draft.target_ids, np.flatnonzero(head["t2d"]))
    np.testing.assert_array_equal(draft.target_ids, np.arange(GUESSED) + head["d2t"])


@pytest.mark.parametrize(
    "options",
    [
        *({"fault": name} for name in ("hidden before embedding", "no hidden norm", "no positions")),
        {"fault": "token of its own row"},
        {"normalized_first": True},
        {"theta": 10000.0},
    ],
    ids=str,
)
def test_other_formulas_have_other_logits(eagle3: Path, options: dict[str, Any]) -> None:
    logits = load_draft(eagle3, target()).logits(IDS)
    assert np.abs(logits - expected(tensors(eagle3), (2, 4, 5), **options)).max() > 100 * TOLERANCE


def test_residual_streams_are_side_by_side_from_low_to_high(eagle3: Path) -> None:
    head = tensors(eagle3)
    logits = load_draft(eagle3, target()).logits(IDS)
    assert np.abs(logits - expected(head, (5, 4, 2))).max() > 100 * TOLERANCE


def test_a_head_of_speculators_has_the_logits_of_its_formulas(tmp_path: Path) -> None:
    head = eagle3_tensors(WIDTH, VOCABULARY, GUESSED, norms=True)
    write(tmp_path, speculators_config(WIDTH, VOCABULARY, GUESSED), in_speculators_layout(head))
    logits = load_draft(tmp_path, target()).logits(IDS)
    np.testing.assert_allclose(logits, expected(head, (0, 1, 5), normalized_first=True), atol=TOLERANCE)
    assert np.abs(logits - expected(head, (0, 1, 5))).max() > 100 * TOLERANCE


def test_a_head_without_tables_uses_those_of_the_target(tmp_path: Path) -> None:
    head = eagle3_tensors(WIDTH, VOCABULARY)
    lm_head = head.pop("lm_head.weight")
    write(tmp_path, eagle3_config(WIDTH, VOCABULARY, draft_vocab_size=None), head)
    draft = load_draft(tmp_path, target())
    together = head | {"lm_head.weight": np.asarray(target().head.weight[...])}
    np.testing.assert_allclose(draft.logits(IDS), expected(together, (2, 4, 5)), atol=TOLERANCE)
    assert draft.target_ids is None and lm_head.shape == (draft.vocab_size, WIDTH)


def test_guesses_chain_the_hidden_states_before_the_last_norm(eagle3: Path) -> None:
    draft, head, known = load_draft(eagle3, target()), tensors(eagle3), 5
    features = jnp.concatenate([jnp.asarray(residuals()[depth], jnp.float32) for depth in (2, 4, 5)], axis=-1)
    mapped, tokens, cache = draft.mapped(features), jnp.asarray(IDS[:, 1:]), _cache(draft, 8)
    queries = cache.next_queries(jnp.full(2, known))
    hidden, state = draft.rows(tokens[:, :known], mapped[:, :known], queries, cache.state[0])
    plain, cache = hidden, cache.written((state,), queries)
    table = np.asarray(target().embedding.weight[...], float)
    inputs = [np.asarray(x, float) for x in mapped[:, :known]]
    for row in range(known, 8):
        queries = cache.next_queries(jnp.ones(2, jnp.int32))
        hidden, state = draft.rows(
            tokens[:, row : row + 1], draft.head.chained(hidden[:, -1:]), queries, cache.state[0]
        )
        cache = cache.written((state,), queries)
        for request, x in enumerate(inputs):
            before = eagle3_hidden(head, table[IDS[request, 1 : row + 1]], x)
            inputs[request] = np.concatenate([x, before[-1:]])
            wanted = eagle3_hidden(head, table[IDS[request, 1 : row + 2]], inputs[request])[-1]
            np.testing.assert_allclose(hidden[request, 0], wanted, atol=TOLERANCE)
    # Rows with true features replace the keys and values of guesses.
    cache = dataclasses.replace(cache, lengths=jnp.full(2, known))
    queries = cache.next_queries(jnp.full(2, 3))
    again, _ = draft.rows(tokens[:, known:8], mapped[:, known:8], queries, cache.state[0])
    assert_same_bits(jnp.concatenate([draft.row_logits(plain), draft.row_logits(again)], axis=1), draft.logits(IDS))


def _cache(draft: Draft, rows: int) -> KVCache:
    return KVCache.empty(draft.head.config, 2, rows, draft.dtype)


@pytest.mark.parametrize(
    "name",
    ["deepseek-v3", "qwen3-next", *(pytest.param(n, marks=pytest.mark.nightly) for n in ("glm4-moe", "kimi-k2"))],
)
def test_a_layer_that_predicts_further_tokens_has_the_logits_of_its_formulas(name: str, tmp_path: Path) -> None:
    directory = with_next_token_layer(name, tmp_path / "model")
    model = load(directory, dtype="float32", progress=False)[0]
    draft, stored = load_draft(directory, model), tensors(directory)
    ids = np.random.default_rng(3).integers(0, model.config.vocab_size, (1, 7))
    layers = model.config.layers
    parts = ("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", 1)
    if not name.startswith("qwen"):
        parts = (f"model.layers.{layers}.", "enorm", "hnorm", "eh_proj", 0)
    prefix, embedding_norm, hidden_norm, projection, offset = parts
    weights = {
        part: stored[f"{prefix}{part}.weight"].astype(float) for part in (embedding_norm, hidden_norm, projection)
    }
    embedded = stored["model.embed_tokens.weight"].astype(float)[ids[0, 1:]]
    hidden = np.asarray(model.hidden(jnp.asarray(ids))[0][0, :-1], float)
    eps = model.config.norm_eps
    both = rms(embedded, weights[embedding_norm] + offset, eps), rms(hidden, weights[hidden_norm] + offset, eps)
    rows = np.concatenate(both, axis=-1) @ weights[projection].T
    decoder = load(as_decoder(directory, rows, tmp_path / "decoder"), dtype="float32", progress=False)[0]
    logits = draft.logits(ids)
    assert logits.shape == (1, 6, model.config.vocab_size)
    np.testing.assert_allclose(logits, decoder(jnp.arange(6)[None]), atol=TOLERANCE)


def test_a_head_in_bfloat16_computes_in_bfloat16(eagle3: Path) -> None:
    draft = load_draft(eagle3, target(), dtype="bfloat16")
    logits = draft.logits(IDS)
    assert draft.dtype == ml_dtypes.bfloat16 and logits.dtype == np.float32
    difference = np.abs(logits - load_draft(eagle3, target()).logits(IDS)).max()
    assert TOLERANCE < difference < 0.5


# --- refusals ---------------------------------------------------------------------------------------------------------


def _config(**changes: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        with changed_json(directory / "config.json") as raw:
            raw.update(changes)

    return change


def _stored(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def changed(directory: Path) -> None:
        head = tensors(directory)
        change(head)
        write(directory, _raw(directory), head)

    return changed


def _raw(directory: Path) -> dict[str, Any]:
    with changed_json(directory / "config.json") as raw:
        return raw


def _renamed(head: dict[str, Any], name: str, other: str) -> None:
    head[other] = head[name]


REFUSALS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another method": (_config(speculators_model_type="dflash"), "is 'dflash'; accepted: \"eagle3\""),
    "no residual streams": (_config(eagle_config={"use_aux_hidden_state": False}), "eagle_config.use_aux_hidden_state"),
    "parallel drafting": (_config(parallel_drafting=True), "parallel_drafting is True; accepted: false, null"),
    "two layers": (_config(num_hidden_layers=2), "num_hidden_layers is 2; accepted: 1"),
    "another family": (_config(model_type="gemma"), "model_type is 'gemma'; accepted: llama, qwen3"),
    "another vocabulary": (_config(vocab_size=49), "vocab_size is 49; accepted: 48, the vocabulary of the target"),
    "another target": (_config(target_hidden_size=64), "target_hidden_size is 64; accepted: 32, the width of the"),
    "a layer too deep": (_config(eagle_aux_hidden_state_layer_ids=[1, 8]), "is [1, 8]; accepted: a list of different"),
    "two streams": (_config(eagle_aux_hidden_state_layer_ids=[1, 7]), "has shape (32, 96); accepted: (32, 64)"),
    "a norm by the file alone": (_config(norm_before_fc=True), "norm_before_fc is True; accepted: false, as input_nor"),
    "another width of heads": (_config(head_dim=16), "has shape (32, 32); accepted: (32, 64)"),
    "a bias by the file alone": (_config(attention_bias=True), "_proj.bias' is missing"),
    "more guesses than logits": (_config(draft_vocab_size=21), "of shape (20,); accepted: I64 or I32 of shape (21,)"),
    "no offsets": (_stored(lambda head: head.pop("d2t")), "'d2t' is missing; accepted: one of shape (20,)"),
    "ids in place of offsets": (
        _stored(lambda head: head.update(d2t=head["d2t"] + np.arange(20))),
        "'d2t' gives the tokens",
    ),
    "another mask": (_stored(lambda head: head.update(t2d=~head["t2d"])), "'t2d' marks 28 tokens; accepted: the 20"),
    "an EAGLE-2 head": (_stored(lambda head: head.pop("midlayer.hidden_norm.weight")), "Heads of EAGLE 1 and 2 are"),
    "both names": (
        _stored(lambda head: _renamed(head, "midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")),
        "is the same parameter as",
    ),
    "a second layer": (
        _stored(lambda head: _renamed(head, "norm.weight", "layers.1.input_layernorm.weight")),
        "'layers.1.input_layernorm.weight' is surplus; accepted: the tensors of the eagle3 head",
    ),
    "one norm of heads": (
        _stored(lambda head: head.update({"midlayer.self_attn.q_norm.weight": np.ones(COLUMNS, np.float32)})),
        "'midlayer.self_attn.k_norm.weight' is missing",
    ),
    "a pickle": (
        lambda directory: (directory / "model.safetensors").rename(directory / "pytorch_model.bin"),
        "pytorch_model.bin, a pickle, which can run any code when it is read; accepted: model.safetensors. Convert",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_a_head_does_not_say_plainly_is_refused(case: str, copied: Path) -> None:
    change, message = REFUSALS[case]
    change(copied)
    with pytest.raises(CheckpointError) as raised:
        load_draft(copied, target())
    assert message in str(raised.value)


def test_a_model_without_a_layer_that_predicts_further_tokens_is_refused(tmp_path: Path) -> None:
    directory = with_next_token_layer("glm4-moe", tmp_path / "model")
    model = load(directory, dtype="float32", progress=False)[0]
    prefix = f"model.layers.{model.config.layers}."
    with changed_tensors(directory / "model.safetensors") as stored:
        stored[f"{prefix}embed_tokens.weight"][0] += 1
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight' differs from"):
        load_draft(directory, model)
    with changed_json(directory / "config.json") as raw:
        raw["num_nextn_predict_layers"] = 2
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers is 2; accepted: 1, the layers of this kind"):
        load_draft(directory, model)
    with changed_json(directory / "config.json") as raw:
        del raw["num_nextn_predict_layers"]
    with changed_tensors(directory / "model.safetensors") as stored:
        for name in [name for name in stored if name.startswith(prefix)]:
            del stored[name]
    with pytest.raises(CheckpointError, match="there are 0 layers that predict further tokens, and no EAGLE-3 head"):
        load_draft(directory, model)
    with pytest.raises(CheckpointError, match="architecture is 'Glm4MoeForCausalLM', and 'LlamaForCausalLM' in the mo"):
        load_draft(directory, target())


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (IDS[0], "has shape (9,)"),
        (IDS[:, :1], "has shape (2, 1)"),
        (IDS * 1.0, "dtype float64"),
        (IDS + VOCABULARY, f"accepted: 0 to {VOCABULARY - 1}"),
    ],
)
def test_texts_of_another_form_are_refused(eagle3: Path, ids: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        load_draft(eagle3, target()).logits(ids)
    assert message in str(raised.value)


def test_another_dtype_or_no_directory_is_refused(eagle3: Path) -> None:
    with pytest.raises(ValueError, match="load_draft: dtype is 'int8'; accepted"):
        load_draft(eagle3, target(), dtype="int8")
    with pytest.raises(CheckpointError, match="is not a directory"):
        load_draft(eagle3 / "none", target())
