"""A reward model gives each completion one reward, in any group."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from detjax.engine import Engine, classify
from detjax.models import Decoder, Tokenizer, load
from detjax.rl.policy_gradients import advantages
from detjax.rl.rewards import RewardModel
from tests.support.bits import assert_same_bits

FIXTURES = Path(__file__).parents[1] / "fixtures"
SIZES = {"max_samples": 3, "token_budget": 48, "max_length": 300, "num_pages": 9}


@functools.cache
def loaded(*answers: str) -> tuple[Decoder, Tokenizer | None]:
    overrides: dict[str, Any] = {"classifier_from_token": list(answers), "method": "no_post_processing"}
    return load(FIXTURES / "qwen3", progress=False, overrides=overrides)


def test_rewards_do_not_depend_on_the_group() -> None:
    prompts, groups = ["1 + 2 =", "3 + 4 ="], [["3", "4", "5"], ["7", "", "8"]]
    with Engine(*loaded("a"), **SIZES) as engine:
        reward = RewardModel(engine)
        rewards = reward(prompts, groups)
        assert rewards.shape == (2, 3)
        for row, prompt, group in zip(rewards, prompts, groups, strict=True):
            for value, completion in zip(row, group, strict=True):
                assert_same_bits(reward([prompt], [[completion]]), np.float64([[value]]))
        plain = RewardModel(engine, uses_chat_template=False, is_scored=True)(prompts, groups)
        assert_same_bits(plain[1, 2], np.float64(classify(engine, ["3 + 4 =8"])[0, 0]))
        tokenizer = engine.tokenizer
        assert tokenizer is not None
        messages = [{"role": "user", "content": "3 + 4 ="}, {"role": "assistant", "content": "8"}]
        tokens = tokenizer.encode(tokenizer.apply_chat_template(messages, add_generation_prompt=False), False)
        assert_same_bits(reward.for_tokens([[tokens, tokens[:9]]])[0, 0], rewards[1, 2])
        assert advantages.grpo(rewards).shape == (2, 3)


def test_models_without_a_reward_are_refused() -> None:
    with Engine(*loaded("a", "b"), **SIZES) as engine, pytest.raises(ValueError, match="the model has 2 classes"):
        RewardModel(engine)
    embedding = load(FIXTURES / "pooling" / "embedding", progress=False)
    with Engine(*embedding, **SIZES) as engine, pytest.raises(ValueError, match="gives embeddings; accepted: a model"):
        RewardModel(engine)
    with Engine(*load(FIXTURES / "qwen3", progress=False), **SIZES) as engine:
        with pytest.raises(ValueError, match="RewardModel: the model generates; accepted: a model that pools"):
            RewardModel(engine)
