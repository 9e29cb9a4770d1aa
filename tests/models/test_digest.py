"""Digests of models: equal for equal functions of a request, and different for different ones."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from detjax import models
from detjax.models import Decoder, GenerationDefaults, Tokenizer
from detjax.models.checkpoint.digest import _description as description_of
from detjax.models.vision.images import ImageOptions

FIXTURE = Path(__file__).parents[1] / "fixtures" / "qwen3"


def load(dtype: str = "bfloat16") -> tuple[Decoder, Tokenizer]:
    model, tokenizer = models.load(FIXTURE, dtype=dtype, progress=False)
    assert tokenizer is not None
    return model, tokenizer


def small_model() -> Decoder:
    """A model of a few numbers, with the configuration of the fixture."""
    model = load()[0]
    model.config = dataclasses.replace(model.config)
    model.layers, model.embedding.weight = nnx.List([]), nnx.Param(jnp.zeros((2, 3)))
    return model


def test_a_model_that_is_read_again_or_from_elsewhere_has_its_digest(tmp_path: Path) -> None:
    model, tokenizer = load()
    models.save(model, tmp_path / "copy", tokenizer=tokenizer)
    again, its_tokenizer = models.load(tmp_path / "copy", progress=False)
    assert models.digest(model, tokenizer) == models.digest(*load()) == models.digest(again, its_tokenizer)


def test_a_stored_digest_stays_valid() -> None:
    # Results are stored with digests. A digest depends only on the files, on any device.
    assert models.digest(*load()) == "8de2eab044da4c3c7213a172da2883e0022a6ef8a9280eb697617a6e3327ea4c"


@pytest.mark.parametrize(
    "what",
    ["one bit", "swapped", "dtype", "configuration", "end tokens", "images", "videos", "tokenizer", "no tokenizer"],
)
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
    elif what == "swapped":  # two weights of one shape
        first, second = (layer.attention.qkv for layer in model.layers)
        first[...], second[...] = second[...], first[...]
    elif what == "dtype":
        model, _ = load("float32")
    elif what == "configuration":
        model.config = dataclasses.replace(model.config, norm_eps=2e-6)
    elif what == "end tokens":
        assert model.generation_defaults is not None
        model.generation_defaults = dataclasses.replace(model.generation_defaults, eos_token_ids=(3,))
    elif what == "images":
        model.image_options = ImageOptions()
    elif what == "videos":
        model.video_options = ImageOptions()
    elif what == "tokenizer":
        tokenizer = Tokenizer(tokenizer.files | {"chat_template.jinja": b"x"}, "elsewhere")
    assert models.digest(model, None if what == "no tokenizer" else tokenizer) != before


def test_options_of_images_and_of_videos_have_different_digests() -> None:
    model, _ = load()
    digests = set()
    for images, videos in ((1, 2), (2, 1), (1, None)):
        model.image_options = ImageOptions(min_pixels=images)
        model.video_options = None if videos is None else ImageOptions(min_pixels=videos)
        digests.add(models.digest(model))
    assert len(digests) == 3


def test_every_setting_is_in_the_digest_and_none_that_is_the_default() -> None:
    """Fields with a default came later: a model whose field has it keeps the digest that it had before."""
    model = small_model()
    before = {models.digest(model)}
    for field in dataclasses.fields(model.config):
        changed = small_model()
        value = getattr(model.config, field.name)
        other = not value if isinstance(value, bool) else f"{value}!"
        object.__setattr__(changed.config, field.name, other)
        digest = models.digest(changed)
        assert digest not in before, field.name
        before.add(digest)
    for field in dataclasses.fields(GenerationDefaults):
        changed = small_model()
        changed.generation_defaults = GenerationDefaults()
        object.__setattr__(changed.generation_defaults, field.name, "other")
        digest = models.digest(changed)
        assert digest not in before, field.name
        before.add(digest)
    text = description_of(model.config)
    assert "experts" not in text and "norm_eps" in text


def test_names_and_contents_of_a_tokenizers_files_are_in_the_digest() -> None:
    model, tokenizer = small_model(), load()[1]
    names = ("chat_template.jinja", "additional_chat_templates/tool_use.jinja")
    digests = {
        models.digest(model, Tokenizer(tokenizer.files | {name: content}, "elsewhere"))
        for name in names
        for content in (b"a", b"b")
    }
    assert len(digests) == 4
    turned = dict(reversed(tokenizer.files.items()))
    assert models.digest(model, Tokenizer(turned, "elsewhere")) == models.digest(model, tokenizer)
