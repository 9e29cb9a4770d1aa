"""The adapter to Tunix without Tunix: a stand-in of the few names that the adapter takes from it.

`test_tunix.py` runs Tunix' own learners, in an environment of their own.
"""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from detjax.models import Decoder, GenerationDefaults
from detjax.ops import log_softmax
from detjax.rl.rollouts import seed_of
from tests.rl import policies
from tests.support.bits import assert_same_bits, same_bits
from tests.support.unchecked import unchecked

NAMES = "tunix", "tunix.rl", "tunix.rl.common", "tunix.rl.rollout", "tunix.rl.rollout.base_rollout"


@pytest.fixture(scope="module")
def tunix() -> Iterator[Any]:
    """The adapter, imported with the stand-in."""
    made = {name: ModuleType(name) for name in NAMES}
    for name, module in made.items():
        if "." in name:
            parent, _, last = name.rpartition(".")
            setattr(made[parent], last, module)
    base: Any = made["tunix.rl.rollout.base_rollout"]
    base.BaseRollout, base.RolloutOutput = object, SimpleNamespace
    with pytest.MonkeyPatch.context() as patch:
        for name, module in made.items():
            patch.setitem(sys.modules, name, module)
        patch.delitem(sys.modules, "detjax.rl.tunix", raising=False)
        yield importlib.import_module("detjax.rl.tunix")
        patch.delitem(sys.modules, "detjax.rl.tunix")


def causal_mask(rows: list[list[int]]) -> jax.Array:
    """Tunix' mask of rows in which 1 stands for a token."""
    present = np.array(rows, bool)
    return jnp.asarray(np.tril(np.ones((present.shape[1],) * 2, bool))[None] & present[:, None, :])


TOKENS = jnp.asarray([[32, 32, 1, 2, 3, 32], [4, 5, 32, 32, 32, 32], [1, 2, 3, 4, 5, 6]], jnp.int32)
"""Rows that are padded on both sides, on the right and nowhere; 32 is the padding."""
PRESENT = [[0, 0, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]]


def test_padded_rows_have_the_logits_of_their_tokens_alone(tunix: Any) -> None:
    decoder = policies.policy()
    model = unchecked(tunix.TunixModel)(decoder)
    mask = causal_mask(PRESENT)
    logits, cache = model(TOKENS, attention_mask=mask)
    assert cache is None and logits.shape == (3, 6, decoder.config.vocab_size)
    hidden, _ = model(TOKENS, attention_mask=mask, skip_lm_head=True)
    assert_same_bits(model.compute_final_logits(hidden), logits)
    for row, present in enumerate(PRESENT):
        places = np.flatnonzero(present)
        alone = decoder(TOKENS[row, places][None])
        assert_same_bits(logits[row, places], alone[0])


def test_a_critic_has_its_own_weights_and_begins_with_values_of_0(tunix: Any) -> None:
    decoder = policies.policy()
    critic = tunix.TunixCritic(decoder)
    values, cache = critic(TOKENS, attention_mask=causal_mask(PRESENT))
    assert cache is None and values.shape == (3, 6, 1) and values.dtype == jnp.float32 and not values.any()
    critic.value[...] = jnp.ones_like(critic.value[...])
    values, _ = critic(TOKENS, attention_mask=causal_mask(PRESENT))
    hidden, _ = decoder.hidden(TOKENS[2:], None)
    np.testing.assert_allclose(values[2, :, 0], hidden[0].astype(np.float32).sum(axis=-1), rtol=1e-2, atol=1e-2)
    before = np.asarray(decoder.embedding.weight[...])
    critic.decoder.embedding.weight[...] = 0 * critic.decoder.embedding.weight[...]
    assert_same_bits(np.asarray(decoder.embedding.weight[...]), before)


def test_caches_and_packed_sequences_are_refused(tunix: Any) -> None:
    for model in (tunix.TunixModel(policies.policy()), tunix.TunixCritic(policies.policy())):
        name = type(model).__name__
        with pytest.raises(NotImplementedError, match=f"{name}: packed sequences; accepted: padded rows"):
            model(TOKENS)
        with pytest.raises(NotImplementedError, match=f"{name}: a cache; accepted: padded rows"):
            model(TOKENS, cache={}, attention_mask=causal_mask(PRESENT))


def test_a_tokenizer_pads_with_an_id_that_no_token_has(tunix: Any) -> None:
    decoder = policies.policy()
    tokenizer = tunix.TunixTokenizer(policies.tokenizer(), decoder)
    vocabulary, end = decoder.config.vocab_size, policies.end_token()
    assert (tokenizer.pad_id(), tokenizer.eos_id(), tokenizer.bos_id()) == (vocabulary, end, end)
    ids = tokenizer.encode("1+2=", add_special_tokens=False)
    assert ids == list(policies.tokenizer().encode("1+2="))
    assert tokenizer.decode([vocabulary, *ids, vocabulary, end], skip=True) == "1+2="
    for defaults in (None, GenerationDefaults()):
        decoder.generation_defaults = defaults
        with pytest.raises(ValueError, match="TunixTokenizer: the model has no end-of-sequence token"):
            tunix.TunixTokenizer(policies.tokenizer(), decoder)


def test_logprobs_of_ids_are_the_engines_and_those_of_padding_0(tunix: Any) -> None:
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 33)), jnp.bfloat16)
    ids = jnp.asarray([[0, 32, 33], [40, 5, 31]], jnp.int32)
    result = np.asarray(tunix.selective_log_softmax(logits, ids))
    expected = np.asarray(log_softmax(logits.astype(jnp.float32)))
    for row, column in np.ndindex(2, 3):
        token = int(ids[row, column])
        assert result[row, column] == (expected[row, column, token] if token < 33 else 0)


CONFIG = SimpleNamespace(
    max_prompt_length=9,
    max_tokens_to_generate=6,
    temperature=1.0,
    top_p=None,
    top_k=None,
    eos_tokens=None,
)


def config(**changes: Any) -> Any:
    return SimpleNamespace(**vars(CONFIG) | changes)


def rollout_of(tunix: Any, decoder: Decoder, **options: Any) -> Any:
    tokenizer = tunix.TunixTokenizer(policies.tokenizer(), decoder)
    sizes = {"max_samples": 4, "token_budget": 24}
    return tunix.TunixRollout(tunix.TunixModel(decoder), tokenizer, "a mesh", CONFIG, **sizes | options)


@pytest.fixture
def rollout(tunix: Any) -> Iterator[Any]:
    made = rollout_of(tunix, policies.policy())
    yield made
    made.close()


def asked_seeds(tunix: Any, rollout: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Records what is asked of the engine, which then answers nothing."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(tunix, "rollouts", lambda *given: seen.append(given) or [])
    return seen


def test_seeds_follow_from_synchronizations_prompts_and_their_occurrences(
    tunix: Any, rollout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = asked_seeds(tunix, rollout, monkeypatch)
    one, two = (list(policies.tokenizer().encode(text)) for text in ("1+2=", "34="))

    def seeds_of(texts: list[str] | str) -> list[int]:
        rollout.generate(texts, config())
        return seen[-1][3]

    together = seeds_of(["1+2=", "34=", "1+2="])
    assert together == [seed_of(0, 0, *one, 0), seed_of(0, 0, *two, 0), seed_of(0, 0, *one, 1)]
    assert seeds_of("34=") == [seed_of(0, 0, *two, 1)]  # a single text, of an agentic learner
    rollout.update_params(nnx.state(rollout._actor, nnx.Param))
    assert seeds_of(["34=", "1+2="]) == [seed_of(0, 1, *two, 0), seed_of(0, 1, *one, 0)]
    assert len(set(together + seen[-1][3])) == 5
    assert all(call[2].max_tokens == 6 and call[2].temperature == 1 and call[2].n == 1 for call in seen)
    assert seen[0][2].stop_token_ids == (policies.end_token(),)
    rollout.generate(["34="], config(eos_tokens=[5, 6]))
    assert seen[-1][2].stop_token_ids == (5, 6)


def test_rollouts_of_another_seed_draw_with_other_seeds(tunix: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = rollout_of(tunix, policies.policy(), seed=5)
    seen = asked_seeds(tunix, made, monkeypatch)
    made.generate(["34="], config())
    made.close()
    assert seen[0][3] == [seed_of(5, 0, *policies.tokenizer().encode("34="), 0)]


def test_rollouts_use_the_weights_of_the_last_synchronization(tunix: Any, rollout: Any) -> None:
    given: list[Any] = []
    rollout._engine.update_weights = given.append
    actor = rollout._actor
    first = np.asarray(actor.decoder.embedding.weight[...])
    rollout._synchronized()
    # The learner then changes the actor in place.
    actor.decoder.embedding.weight[...] = 2 * actor.decoder.embedding.weight[...]
    rollout._synchronized()
    assert len(given) == 1
    assert_same_bits(np.asarray(given[0]["embedding"]["weight"][...]), first)
    rollout.update_params(nnx.state(actor, nnx.Param))
    assert len(given) == 2 and same_bits(np.asarray(given[1]["embedding"]["weight"][...]), 2 * first)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"temperature": 0.9}, "temperature 0.9, top_p None, top_k None; accepted: temperature 1 and no filters"),
        ({"top_p": 0.9}, "temperature 1.0, top_p 0.9, top_k None; accepted"),
        ({"top_k": 5}, "temperature 1.0, top_p None, top_k 5; accepted"),
        (
            {"max_tokens_to_generate": 12},
            "a prompt has 4 tokens; accepted: at most 3, since the engine's max_length is 15",
        ),
    ],
)
def test_requests_that_a_learner_could_not_train_on_are_refused(
    tunix: Any, rollout: Any, changes: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = asked_seeds(tunix, rollout, monkeypatch)
    with pytest.raises(ValueError) as raised:
        rollout.generate(["34=", "1+2="], config(**changes))
    assert str(raised.value).startswith(f"TunixRollout: {says}") and not seen


@pytest.mark.parametrize("changes", [{"top_p": 1, "top_k": -1}, {"top_k": 0}, {"max_tokens_to_generate": 11}])
def test_requests_without_filters_and_of_the_longest_prompts_are_accepted(
    tunix: Any, rollout: Any, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = asked_seeds(tunix, rollout, monkeypatch)
    rollout.generate(["1+2="], config(**changes))
    assert len(seen) == 1
