"""Bits of answers about images, and of pooled texts: alone, and in a batch.

    python -m benchmarks batch_bits --preset Kimi-K2.5 --layers 2 --out benchmarks/results/batch-bits-kimi-h100.json

With a model that takes images, an engine samples answers to prompts with one or two images of several sizes; with a
pooling model, it pools texts of several lengths. One engine has one slot, small chunks, which cut images, and no prefix
cache; another one has many slots, and gets everything at once, in both orders. Embeddings are pooled by each method.
The exit code is 1 if any bits differ, or if two different requests have equal bits, which is the control.

`--small` pools texts on a CPU in seconds.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Final, get_args

import numpy as np

from benchmarks import study as options
from benchmarks.study import Result, Run
from detjax.bench import presets
from detjax.bench.serve import digest
from detjax.engine import Engine, EngineConfig, Request, SamplingParams, classify, embed
from detjax.models import Decoder
from detjax.models.parts.pooling import Method, PoolingOptions

METHODS: Final[tuple[Method, ...]] = get_args(Method.__value__)

type Digests = list[str]
"""A digest of the answer to each request."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a run.

    Attributes:
        lengths: the number of tokens of each text to pool, or of the text after the images of each prompt.
        sides: the heights and widths of images, in pixels.
        answer: number of tokens of an answer about images.
        alone: the engine that runs requests one after the other.
        together: the engine that runs them at once.
    """

    lengths: tuple[int, ...] = (1, 7, 128, 129, 300, 900)
    sides: tuple[tuple[int, int], ...] = ((448, 448), (224, 672), (333, 517))
    answer: int = 64
    alone: EngineConfig = EngineConfig(  # noqa: RUF009 - it is frozen
        max_samples=1, token_budget=256, max_length=2048, num_pages=64, prefix_cache=False
    )
    together: EngineConfig = EngineConfig(  # noqa: RUF009 - it is frozen
        max_samples=16, token_budget=1024, max_length=2048, num_pages=256
    )


SMALL: Final = Sizes(
    (1, 7, 30),
    (),
    4,
    EngineConfig(max_samples=1, token_budget=8, max_length=64, num_pages=4, prefix_cache=False),
    EngineConfig(max_samples=4, token_budget=32, max_length=64, num_pages=8),
)


def study(run: Run, *, preset: options.Preset = "Qwen3-Embedding-8B", layers: options.Layers = None) -> Result:
    sizes = Sizes()
    if run.small:
        sizes, preset, layers = SMALL, "tiny", 1
    model = presets.decoder(preset, layers)
    if run.small:
        model.config = dataclasses.replace(model.config, pooling=PoolingOptions(architecture="Qwen3Model"))
    results = digests(model, sizes)
    content = {"preset": preset, "layers": layers, "sizes": dataclasses.asdict(sizes), "digests": results}
    return Result(content, problem(results))


def digests(model: Decoder, sizes: Sizes) -> dict[str, dict[str, Digests]]:
    """Returns digests by what is computed and by how: of answers about images, of scores, or of embeddings.

    Embeddings are pooled by each method, which sets the model's configuration.

    Raises:
        ValueError: the model neither pools nor takes images.
    """
    pooling = model.config.pooling
    if pooling is None:
        if model.config.image_token is None:
            raise ValueError(f"{model.config.architecture} neither pools nor takes images; choose another preset")
        return {"images": _compared(model, sizes, _prompts_with_images(model, sizes), _answers)}
    texts = _texts(sizes, model.config.vocab_size)
    if pooling.labels:
        return {"scores": _compared(model, sizes, texts, lambda engine, given: _hashes(classify(engine, given)))}
    results = {}
    for method in METHODS:
        model.config = dataclasses.replace(model.config, pooling=dataclasses.replace(pooling, method=method))
        results[method] = _compared(model, sizes, texts, lambda engine, given: _hashes(embed(engine, given)))
    return results


def problem(results: dict[str, dict[str, Digests]]) -> str:
    """Returns what is wrong with digests; empty: nothing."""
    for what, ways in results.items():
        if any(digests != ways["alone"] for digests in ways.values()):
            return f"{what}: bits differ between ways: {ways}"
        if len(set(ways["alone"])) < len(ways["alone"]):
            return f"{what}: different requests have equal bits: {ways['alone']}"
    return ""


def _compared[T](
    model: Decoder, sizes: Sizes, given: list[T], compute: Callable[[Engine, list[T]], Digests]
) -> dict[str, Digests]:
    with Engine(model, config=sizes.alone) as engine:
        ways = {"alone": [digest for one in given for digest in compute(engine, [one])]}
    with Engine(model, config=sizes.together) as engine:
        ways["together"] = compute(engine, given)
        ways["in reverse"] = compute(engine, given[::-1])[::-1]
    return ways


def _texts(sizes: Sizes, vocabulary: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(0, vocabulary, length).tolist() for length in sizes.lengths]


def _prompts_with_images(model: Decoder, sizes: Sizes) -> list[Request]:
    """Requests about one image each, or about two of them in either order, with the same text after images."""
    config, random = model.config, np.random.default_rng(0)
    assert config.image_token is not None
    images = [random.integers(0, 256, (*side, 3), np.uint8) for side in sizes.sides]
    shown = [*([image] for image in images), images[:2], images[1::-1]]
    text = [token for token in _texts(sizes, min(config.vocab_size, 10_000))[1] if token not in config.placeholders]
    params = SamplingParams(sizes.answer, temperature=0.8, seed=1, ignore_eos=True)
    return [Request([*[5, config.image_token] * len(one), *text], params, images=one) for one in shown]


def _answers(engine: Engine, requests: Sequence[Request]) -> Digests:
    return [digest([generation]) for generation in engine.generate(requests)]


def _hashes(rows: np.ndarray) -> Digests:
    return [hashlib.sha256(row.tobytes()).hexdigest() for row in rows]
