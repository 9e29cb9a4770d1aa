"""Rewards of a reward model, whose bits depend on nothing but the prompt and the completion."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

from detjax.engine import Engine, classify
from detjax.engine.pooled_texts import check_single_score, options_of


class RewardModel:
    """The rewards that a model which scores one class gives to completions.

    A reward is a function of its prompt and completion: it does not depend on the other completions, on their order, on
    chunks, on the prefix cache or on devices. So a run that is repeated or resumed has the same rewards.
    """

    def __init__(self, engine: Engine, *, is_scored: bool = False, uses_chat_template: bool = True) -> None:
        """Rewards from an engine.

        Args:
            engine: an engine whose model gives the score of one class, such as a `LlamaForSequenceClassification`.
            is_scored: True for the checkpoint's scores, such as the sigmoid of the logit, False for logits.
            uses_chat_template: whether texts become a conversation, if the checkpoint has a chat template: the prompt
                is the user's message, and the completion the answer. Otherwise the completion follows the prompt.

        Raises:
            ValueError: the model generates, gives embeddings, or has several classes.
        """
        options = options_of("RewardModel", engine)
        if options.gives_embeddings:
            raise ValueError("RewardModel: the model gives embeddings; accepted: a model that scores one class")
        check_single_score("RewardModel", options)
        self._engine, self._is_scored = engine, is_scored
        tokenizer = engine.tokenizer
        has_template = tokenizer is not None and tokenizer.has_chat_template
        self._tokenizer = tokenizer if has_template and uses_chat_template else None

    def __call__(self, prompts: Sequence[str], groups: Sequence[Sequence[str]]) -> Float64[np.ndarray, "P G"]:
        """Returns the reward of each completion, for `detjax.rl.policy_gradients.advantages`.

        Args:
            prompts: texts.
            groups: completions of each prompt, the same number for all.

        Raises:
            ValueError: the numbers of prompts and groups differ, or a text is not accepted.
        """
        pairs = [(prompt, one) for prompt, group in zip(prompts, groups, strict=True) for one in group]
        rewards = classify(self._engine, [self._joined(*pair) for pair in pairs], is_scored=self._is_scored)
        return rewards.astype(np.float64).reshape(len(prompts), -1)

    def for_tokens(self, rollouts: Sequence[Sequence[Sequence[int]]]) -> Float64[np.ndarray, "P G"]:
        """Returns the reward of each sequence of tokens, prompt and completion together, of each prompt."""
        flat = [tokens for group in rollouts for tokens in group]
        return classify(self._engine, flat, is_scored=self._is_scored).astype(np.float64).reshape(len(rollouts), -1)

    def _joined(self, prompt: str, completion: str) -> str | list[int]:
        if self._tokenizer is None:
            return prompt + completion
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=False)
        return self._tokenizer.encode(text, add_special_tokens=False)
