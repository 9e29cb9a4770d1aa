"""Validates requests and turns them into sequences: prompts, images and constraints."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from detjax.engine import sequence as sequences
from detjax.engine.config import EngineConfig
from detjax.engine.constraint import Constraint
from detjax.engine.constraints import ModelConstraints
from detjax.engine.field_error import FieldError
from detjax.engine.page_pool import prefix_root
from detjax.engine.pooling import needs_all_rows
from detjax.engine.request import Request
from detjax.engine.sampling_params import SamplingParams
from detjax.engine.validation import check_arrays, encode_prompt, end_tokens, given_tokens
from detjax.models import Adapter, Decoder, ModelMetadata, Tokenizer
from detjax.models.parts.pooling import PoolingOptions
from detjax.models.text.video_texts import VideoTexts
from detjax.models.vision.frame_sampling import FrameSampling
from detjax.models.vision.images import VisualInput
from detjax.models.vision.prompt_images import (
    GivenImage,
    ImageReader,
    PromptImages,
    places,
    token_grid,
    video_texts,
    with_image_tokens,
)


class RequestReader:
    """Validates and tokenizes an engine's requests. It needs no weights, so processes without the model can use it."""

    def __init__(self, model: Decoder | ModelMetadata, tokenizer: Tokenizer | None, config: EngineConfig) -> None:
        """A reader for an engine with these resolved settings. Texts, stop strings and constraints need the
        tokenizer."""
        self._config = config
        self._model_config, self._defaults, self._tokenizer = model.config, model.generation_defaults, tokenizer
        self._image_reader = ImageReader(model.config, model.image_options, model.video_options)
        self._constraints = ModelConstraints(model.config, model.generation_defaults, tokenizer)
        self._adapters: dict[str, Adapter] = {}

    @property
    def config(self) -> EngineConfig:
        """The engine's settings, with all defaults filled in."""
        return self._config

    @property
    def max_length(self) -> int:
        """Maximum tokens of a sample, including its prompt."""
        assert self._config.max_length is not None
        return self._config.max_length

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, if the engine has one."""
        return self._tokenizer

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The adapters that requests may name. A request keeps the one that had its name when it was submitted."""
        return MappingProxyType(dict(self._adapters))

    def _adapter(self, name: str, adapter: str | Adapter | None) -> Adapter | None:
        """Returns the adapter of a request. One that was loaded, and is not any more, still serves."""
        if not isinstance(adapter, str):
            return adapter
        known = self._adapters.get(adapter)
        if known is None:
            accepted = ", ".join(map(repr, self._adapters)) or "no adapter is loaded"
            raise FieldError(f"{name}: adapter is {adapter!r}; accepted: None, {accepted}", "model")
        return known

    @property
    def pooling(self) -> PoolingOptions | None:
        """The results of a model that pools; None: the model generates."""
        return self._model_config.pooling

    @property
    def takes_images(self) -> bool:
        """True if the model has a vision tower."""
        return self._model_config.vision is not None

    @property
    def frame_sampling(self) -> FrameSampling:
        """The checkpoint's selection of video frames."""
        return self._image_reader.sampling

    def image_patches(self, name: str, image: GivenImage) -> list[VisualInput]:
        """Returns the patches of an image or a video; `Request.images` accepts them too. This may take a second.

        Args:
            name: its name in error messages.
            image: see `Request.images`.

        Raises:
            ValueError: the model does not accept it.
        """
        return self._image_reader.patches(name, [image])

    def image_tokens(self, images: Sequence[VisualInput]) -> int:
        """Returns the number of tokens that stand for images and videos."""
        vision = self._model_config.vision
        return 0 if vision is None else sum(token_grid(image, vision).size for image in places(images))

    def video_texts(self, images: Sequence[VisualInput]) -> VideoTexts | None:
        """Returns the texts of videos in a prompt that a chat template writes; None if it writes tokens for them."""
        return video_texts(self._model_config, images)

    def with_image_tokens(self, name: str, prompt: Sequence[int], images: Sequence[VisualInput]) -> list[int]:
        """Returns a prompt with all tokens of its images, and with frame times if the model's prompts state them.

        Args:
            name: the prompt's name in error messages.
            prompt: token ids.
            images: the images in the order of the prompt.

        Raises:
            ValueError: the image tokens in the prompt do not match the images.
        """
        return list(with_image_tokens(name, self._model_config, prompt, images, self._tokenizer))

    def compile_constraint(self, constraint: Constraint) -> None:
        """Compiles a constraint in advance, so that requests with it start without delay. This may take a second.

        Raises:
            ValueError: the constraint is not valid, or the model does not support constraints.
        """
        self._constraints.compile(constraint)

    def samples_of(self, name: str, request: Request, *, is_streamed: bool) -> list[sequences.Sequence]:
        """Returns the samples of a request, before they are scheduled; `is_streamed` decodes the text at every token.

        Raises:
            ValueError: the engine cannot serve it. The message begins with `name`.
        """
        if request.pooling is not None or self._model_config.pooling is not None:
            return self._pooled_samples(name, request, is_streamed=is_streamed)
        params, top = request.sampling, self._config.top_logprobs
        images = self._image_reader.patches(name, request.images)
        prompt = encode_prompt(name, self._model_config, request.prompt, params, self._tokenizer, images)
        if len(prompt) + params.max_tokens > self.max_length:
            raise FieldError(
                f"{name} has {len(prompt)} tokens and asks for {params.max_tokens} more; accepted: {self.max_length} "
                "in all, the engine's max_length. Lower the request's max_tokens, cut the prompt, or raise the "
                "engine's max_length.",
                "prompt" if len(prompt) >= self.max_length else "max_tokens",
            )
        if params.top_logprobs > top:
            raise FieldError(
                f"{name}: top_logprobs is {params.top_logprobs}; accepted: up to {top}, the engine's top_logprobs",
                "top_logprobs",
            )
        ends = end_tokens(self._defaults, params)
        check_arrays(name, params, ends)
        generated = given_tokens(name, self._model_config, params, request.generated)
        adapter = self._adapter(name, request.adapter)
        context = sequences.RequestContext(
            end_tokens=ends,
            tokenizer=self._tokenizer,
            is_streamed=is_streamed,
            prefix_root=prefix_root(request.cache_salt, None if adapter is None else adapter.digest),
            adapter=adapter,
            client=request.client,
            constraint=self._constraints.compile(params.constraint),
            rules=self._constraints.rules(params, ends),
            images=PromptImages(images, prompt, self._model_config) if images else None,
            drafts=request.speculative,
        )
        try:
            return sequences.samples(prompt, params, context, generated)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    def _pooled_samples(self, name: str, request: Request, *, is_streamed: bool) -> list[sequences.Sequence]:
        """Returns the sequence of a request to a model that pools."""
        options, given = self._model_config.pooling, request.pooling
        if given is None or options is None:
            does, wants = ("generates", "pooling") if options is None else ("pools", "completions")
            accepted = "requests without pooling" if options is None else "requests with pooling"
            raise FieldError(f"{name} asks for {wants} and the model {does}; accepted: {accepted}", "pooling")
        if is_streamed:
            raise FieldError(f"{name} is streamed and the model pools; accepted: whole answers", "stream")
        if request.adapter is not None:
            raise FieldError(f"{name}: adapter is {request.adapter!r}, and the model pools; accepted: None", "model")
        pooling, params = given.resolved(name, self._model_config), SamplingParams(max_tokens=1)
        images = self._image_reader.patches(name, request.images)
        prompt = encode_prompt(
            name, self._model_config, request.prompt, params, self._tokenizer, images, generates=False
        )
        if len(prompt) > self.max_length:
            raise FieldError(
                f"{name} has {len(prompt)} tokens; accepted: up to {self.max_length}, the engine's max_length", "prompt"
            )
        context = sequences.RequestContext(
            prefix_root=prefix_root(request.cache_salt),
            client=request.client,
            images=PromptImages(images, prompt, self._model_config) if images else None,
            pooling=pooling,
            reads_all_rows=needs_all_rows(pooling, options),
        )
        return [sequences.Sequence(prompt, params, context=context)]
