"""Small models and the drafters of their tokens: the demo's checkpoint, and random models with other layers."""

import dataclasses
import functools
import random
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, Final

import jax.numpy as jnp
from flax import nnx

from detjax import demo
from detjax.engine import Sequence, SpeculativeConfig
from detjax.engine.drafts.drafter import Drafter
from detjax.engine.drafts.loading import Guesser
from detjax.models import Decoder, DecoderConfig, Draft, Tokenizer, load, load_draft
from detjax.models.drafts.eagle3 import Eagle3Head, Eagle3Options
from detjax.models.drafts.next_token import QwenNextTokenHead, layer_config

MOST: Final = 7
"""Maximum number of guesses of a draft."""
NAMES: Final = "demo", "windows", "linear"
_SHAPE: Final[Mapping[str, Any]] = {
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 300,
}
_WINDOWS: Final[Mapping[str, Any]] = _SHAPE | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "layer_types": ["sliding_attention", "full_attention"],
    "num_hidden_layers": 2,
    "query_pre_attn_scalar": 16,
    "rope_local_base_freq": 100.0,
    "rope_theta": 10000.0,
    "sliding_window": 29,
}
_LINEAR: Final[Mapping[str, Any]] = _SHAPE | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "decoder_sparse_step": 1,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 64,
    "mlp_only_layers": [0, 1],
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "shared_expert_intermediate_size": 16,
}
_DRAFT: Final[Mapping[str, Any]] = _SHAPE | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "rope_theta": 10000.0,
}

type Guesses = Callable[[random.Random, list[int]], list[int]]
"""Changes right guesses."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, its tokenizer, and the smaller models and heads that guess its tokens, by kind; None: prompt lookup."""

    decoder: Decoder
    tokenizer: Tokenizer | None
    guessers: Mapping[str, Guesser]


@functools.cache
def model(name: str) -> Model:
    """Returns one of the models `NAMES`."""
    if name == "demo":
        decoder, tokenizer = load(demo.CHECKPOINT, progress=False)
        smaller, _ = load(demo.DRAFT_MODEL, progress=False)
        guessers = {"draft_model": smaller, "itself": decoder, "eagle3": load_draft(demo.EAGLE3, decoder)}
        return Model(decoder, tokenizer, {"ngram": None, **guessers})
    decoder = _random(_WINDOWS if name == "windows" else _LINEAR)
    guessers = {"ngram": None, "draft_model": _random(_DRAFT), "eagle3": _random_eagle3(decoder)}
    if name == "windows":
        return Model(decoder, None, guessers | {"itself": decoder})
    shape = layer_config(decoder.config, is_sparse=False)
    head = QwenNextTokenHead(shape, rngs=nnx.Rngs(2), dtype=decoder.dtype)
    return Model(decoder, None, guessers | {"mtp": Draft(decoder, head)})


def _random(raw: Mapping[str, Any]) -> Decoder:
    config = DecoderConfig.from_hugging_face(raw, "a random model")
    return Decoder(config, rngs=nnx.Rngs(1), dtype=jnp.bfloat16)


def _random_eagle3(target: Decoder) -> Draft:
    """Returns a head with its own table of logits, over the residual streams that enter both layers."""
    width, vocabulary = target.config.hidden_size, target.config.vocab_size
    options = Eagle3Options(
        config=DecoderConfig.from_hugging_face(_DRAFT, "a random head"),
        depths=(0, 1),
        target_width=width,
        draft_vocab_size=vocabulary,
        has_embedding=False,
        has_lm_head=True,
        has_input_norm=False,
        adds_normalized=False,
    )
    return Draft(target, Eagle3Head(options, rngs=nnx.Rngs(3), dtype=target.dtype))


def speculative(kind: str, guesser: Guesser) -> SpeculativeConfig:
    """Returns the settings of a kind of guesses; the guesser is already loaded."""
    if guesser is None:
        return SpeculativeConfig(method="ngram", num_speculative_tokens=MOST)
    method: Any = guesser.head.METHOD if isinstance(guesser, Draft) else "draft_model"
    return SpeculativeConfig(method=method, model=kind, num_speculative_tokens=MOST)


class Adversary(Drafter):
    """Guesses known answers after a change, to right tokens, wrong ones, or numbers beyond the vocabulary."""

    def __init__(self, plain: Iterable[Sequence], change: Guesses, seed: str) -> None:
        """An adversary that knows the answers `plain`."""
        self._answers = {_identity(one): one.generated for one in plain}
        self._change, self._numbers = change, random.Random(seed)

    def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """Returns changed answers, which 5 continues after their ends."""
        guesses = {}
        for one, most in wanted.items():
            known = self._answers[_identity(one)][len(one.generated) :][:most]
            guesses[one] = self._change(self._numbers, [*known, *[5] * (most - len(known))])
        return guesses


def _identity(sample: Sequence) -> tuple[tuple[int, ...], int, int]:
    return sample.prompt, sample.params.seed, sample.index


def _mixed(numbers: random.Random, right: list[int]) -> list[int]:
    """Returns a few right guesses, and wrong ones after them."""
    count = numbers.randint(0, len(right))
    return [*right[:count], *(numbers.choice([token ^ 1, 3, -1, 10**6]) for token in right[count:])]


ADVERSARIES: Final[Mapping[str, Guesses]] = {
    "right": lambda numbers, right: right,
    "mixed": _mixed,
    "wrong": lambda numbers, right: [token ^ 1 for token in right],
}


def kinds(name: str) -> Seq[str]:
    """Returns all kinds of guesses for a model."""
    return *model(name).guessers, *ADVERSARIES
