"""Digests of models: equal for equal functions of a request, and different for different ones."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from detjax import models
from detjax.models import Decoder, Tokenizer

FIXTURE = Path(__file__).parents[1] / "fixtures" / "qwen3"


def load(dtype: str = "bfloat16") -> tuple[Decoder, Tokenizer]:
    model, tokenizer = models.load(FIXTURE, dtype=dtype, progress=False)
    assert tokenizer is not None
    return model, tokenizer


def test_a_model_that_is_read_again_or_from_elsewhere_has_its_digest(tmp_path: Path) -> None:
    model, tokenizer = load()
    models.save(model, tmp_path / "copy", tokenizer=tokenizer)
    again, its_tokenizer = models.load(tmp_path / "copy", progress=False)
    assert models.digest(model, tokenizer) == models.digest(*load()) == models.digest(again, its_tokenizer)


def test_a_stored_digest_stays_valid() -> None:
    # Results are stored with digests. A digest depends only on the files, on any device.
    assert models.digest(*load()) == "8de2eab044da4c3c7213a172da2883e0022a6ef8a9280eb697617a6e3327ea4c"


@pytest.mark.parametrize("what", ["one bit", "dtype", "configuration", "end tokens", "tokenizer", "no tokenizer"])
def test_whatever_answers_follow_from_is_in_the_digest(what: str, tmp_path: Path) -> None:
    model, tokenizer = load()
    before = models.digest(model, tokenizer)
    if what == "one bit":
        state = nnx.state(model)
        leaves, tree = jax.tree.flatten(state)
        bits = jax.lax.bitcast_convert_type(leaves[-1], jnp.uint16)
        bits = bits.at[(-1,) * bits.ndim].set(bits[(-1,) * bits.ndim] ^ 1)
        leaves[-1] = jax.lax.bitcast_convert_type(bits, leaves[-1].dtype)
        nnx.update(model, jax.tree.unflatten(tree, leaves))
    elif what == "dtype":
        model, _ = load("float32")
    elif what == "configuration":
        model.config = dataclasses.replace(model.config, norm_eps=2e-6)
    elif what == "end tokens":
        assert model.generation_defaults is not None
        model.generation_defaults = dataclasses.replace(model.generation_defaults, eos_token_ids=(3,))
    elif what == "tokenizer":
        tokenizer = Tokenizer(tokenizer.files | {"chat_template.jinja": b"x"}, "elsewhere")
    assert models.digest(model, None if what == "no tokenizer" else tokenizer) != before
