"""`generate`: a batch of prompts of any lengths, each with its own sampling parameters."""

from collections.abc import Sequence as Seq
from typing import Final

from rich.console import Console
from rich.progress import Progress

from detjax.contract import PORTABLE_ROWS
from detjax.engine.batch import BatchShapes
from detjax.engine.config import EngineConfig
from detjax.engine.drafts.loading import load_guesser
from detjax.engine.drafts.speculative_config import SpeculativeConfig
from detjax.engine.model_runner import bytes_of_page
from detjax.engine.request import Generation, Request
from detjax.engine.request_reader import RequestReader
from detjax.engine.sampling_params import SamplingParams
from detjax.engine.sampling_variant import SamplingVariant
from detjax.engine.scheduler import pages_needed
from detjax.engine.sequence import Sequence
from detjax.engine.step_loop import StepLoop, StepLoopConfig
from detjax.models import Decoder, Tokenizer
from detjax.models.vision.prompt_images import GivenImage
from detjax.operands.options import KVQuantization

PREFILL_CHUNK: Final = 128
"""Default tokens of a prefill chunk. It is a schedule: all values give the same bits."""


def generate(  # noqa: PLR0913
    model: Decoder,
    prompts: Seq[str | Seq[int]],
    sampling: SamplingParams | Seq[SamplingParams] | None = None,
    *,
    images: Seq[Seq[GivenImage]] | None = None,
    tokenizer: Tokenizer | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    kv_cache_dtype: KVQuantization | None = None,
    speculative: SpeculativeConfig | None = None,
    progress: bool = False,
) -> list[Generation]:
    """Returns a generation per prompt. Each has the same bits as if it were generated alone.

    Args:
        model: the decoder.
        prompts: texts or lists of token ids, of any lengths.
        sampling: parameters for all prompts, or one per prompt. Default: greedy.
        images: the images and videos of each prompt; see `Request.images`. Default: none.
        tokenizer: needed for texts and stop strings.
        prefill_chunk: maximum tokens of a prompt in one step. It changes no bits.
        kv_cache_dtype: "int8", "fp8_e4m3" or "q4_0" quantize keys and values in the cache (`ops.quantize_kv`). This
            changes the numbers; they still depend on nothing but the prompt. Default: the model's dtype.
        speculative: guess tokens and verify several of them in one step, which changes no bits. Default: no guesses.
        progress: show a progress bar on stderr.

    Raises:
        ValueError: a prompt is empty, holds ids outside the vocabulary, is too long for the model together with the
            tokens to generate, or is text without a tokenizer; its images do not match it or the model; the numbers of
            prompts, parameters and images differ; or `kv_cache_dtype` is unknown or does not support the model's head
            size.

    Example:
        >>> import detjax, detjax.demo
        >>> model, tokenizer = detjax.models.load(detjax.demo.CHECKPOINT, progress=False)
        >>> params = detjax.SamplingParams(max_tokens=8, temperature=0.8, seed=7)
        >>> (alone,) = detjax.generate(model, ["ROMEO:"], params, tokenizer=tokenizer)
        >>> together = detjax.generate(model, ["JULIET:", "ROMEO:"], params, tokenizer=tokenizer)
        >>> together[1] == alone
        True
        >>> len(alone.completions[0].logprobs)
        8
    """
    if isinstance(prompts, str):
        raise ValueError("generate: prompts is one string; accepted: a list of prompts. Put it in a list.")
    if prefill_chunk < 1:
        raise ValueError(f"generate: prefill_chunk is {prefill_chunk}; accepted: at least 1")
    if kv_cache_dtype is not None:
        try:
            bytes_of_page(model, kv_cache_dtype)
        except ValueError as error:
            raise ValueError(f"generate: {error}") from error
    params = _one_per_prompt(sampling, len(prompts))
    if images is not None and len(images) != len(prompts):
        raise ValueError(
            f"generate: {len(prompts)} prompts and {len(images)} lists of images; accepted: a list for each prompt"
        )
    limits = EngineConfig(max_length=model.config.max_positions, top_logprobs=model.config.vocab_size)
    reader = RequestReader(model, tokenizer, limits)
    requests = [
        reader.samples_of(f"generate: prompt {index}", Request(prompt, row, images=visuals), is_streamed=False)
        for index, (prompt, row, visuals) in enumerate(zip(prompts, params, images or [()] * len(prompts), strict=True))
    ]
    sequences = [sequence for request in requests for sequence in request]
    if sequences:
        decodes_guesses = not model.has_slots
        config = _config(sequences, prefill_chunk, kv_cache_dtype, speculative, decodes_guesses=decodes_guesses)
        guesser = None if speculative is None else load_guesser(speculative, model, tokenizer)
        _run(StepLoop.for_model(model, config, guesser=guesser), sequences, progress)
    return [
        Generation(first.prompt, tuple(sequence.completion() for sequence in (first, *others)), first.scored_prompt())
        for first, *others in requests
    ]


def _one_per_prompt(sampling: SamplingParams | Seq[SamplingParams] | None, prompts: int) -> list[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * prompts
    if len(sampling) != prompts:
        raise ValueError(
            f"generate: {prompts} prompts and {len(sampling)} sampling parameters; accepted: one, or as many as prompts"
        )
    return list(sampling)


def _run(loop: StepLoop, sequences: list[Sequence], progress: bool) -> None:
    """Generates until all sequences have ended."""
    loop.compute_images(sequences)
    for sequence in sequences:
        loop.submit(sequence)
    total = sum(sequence.params.max_tokens for sequence in sequences)
    with Progress(console=Console(stderr=True), disable=not progress) as bars:
        bar = bars.add_task(f"generating {len(sequences)} samples", total=total)
        while not loop.is_idle:
            bars.advance(bar, len(loop.step()))
        bars.update(bar, completed=total)


def _config(
    sequences: list[Sequence],
    prefill_chunk: int,
    kv_cache_dtype: KVQuantization | None,
    speculative: SpeculativeConfig | None = None,
    *,
    decodes_guesses: bool = False,
) -> StepLoopConfig:
    """Returns the sizes of a loop in which all sequences run at once.

    Sizes are rounded up so that calls of similar size share programs: at most two for the layers, one for sampling, and
    one for prompt logprobs.
    """
    slots = _power_of_two(len(sequences))
    longest = max(len(sequence.prompt) for sequence in sequences)
    pages = [pages_needed(sequence) for sequence in sequences]
    chunk = min(prefill_chunk, max(_power_of_two(longest), PORTABLE_ROWS))
    drafts = 0 if speculative is None else speculative.num_speculative_tokens
    return StepLoopConfig(
        shapes=BatchShapes.for_chunks(slots, chunk, mixes=drafts > 0, drafts=drafts, decodes_guesses=decodes_guesses),
        num_pages=min(slots * max(pages), _power_of_two(sum(pages))),
        pages_per_sequence=max(pages),
        variants=(SamplingVariant.needed_by([sequence.params for sequence in sequences]),),
        kv_cache_dtype=kv_cache_dtype,
        speculative=speculative,
    )


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
