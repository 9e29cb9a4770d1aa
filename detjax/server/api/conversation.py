"""Conversations with the tools that their answers may call."""

from collections.abc import Sequence

from starlette.concurrency import run_in_threadpool

from detjax.engine import Constraint, FieldError, Generation
from detjax.models.vision.images import VisualInput
from detjax.server.api.api_calls import TOO_LONG, ServedModel
from detjax.server.api.images import ShownPart, read_images
from detjax.server.http.errors import ApiError
from detjax.server.text.texts import Message as Turn
from detjax.server.text.texts import TextRefused, TextTooLong
from detjax.server.text.token_texts import Json
from detjax.server.tools.answers import Answer, AnswerReader
from detjax.server.tools.definitions import ToolUse
from detjax.server.tools.formats import ToolFormat, why_no_tools


class Conversation:
    """The input of an answer: messages, tools and variables of the chat template.

    Attributes:
        tools: the tools that the answer may call, or None.
    """

    def __init__(
        self,
        model: ServedModel,
        messages: Sequence[Turn],
        variables: Json,
        tools: ToolUse | None,
        field: str,
        shown: Sequence[ShownPart] = (),
    ) -> None:
        """A conversation whose messages are in the `field` of the body, and contain the images and videos `shown`.

        Raises:
            ValueError: the model has no chat template, or tools are given and its format of tool calls is unknown.
        """
        if not model.tokenizer.has_chat_template:
            raise ValueError("the model has no chat template; accepted: /v1/completions")
        self.tools = tools
        self._model, self._messages, self._variables, self._field = model, messages, variables, field
        self._shown = shown
        self._format: ToolFormat | None = None
        if tools is not None:
            self._format = model.tool_format
            if self._format is None:
                raise ApiError(400, why_no_tools(model.tokenizer), param="tools")

    def constraint(self, form: Constraint | None) -> Constraint | None:
        """Compiles and returns the answer's constraint, given the constraint `form` of an answer without calls.

        Raises:
            ValueError: the constraint is not valid, or the format of tool calls cannot be combined with `form`.
        """
        engine, constraint = self._model.engine, form
        if self.tools is not None and self._format is not None:
            constraint = self._format.constraint(self.tools, form)
        if constraint is None:
            return None
        try:
            engine.compile_constraint(constraint)
        except ValueError as error:
            if self.tools is None:
                raise
            if form is not None:
                engine.compile_constraint(form)  # raises its own error if it is invalid
            for number, tool in enumerate(self.tools.tools):
                try:
                    engine.compile_constraint(Constraint.json_schema(tool.parameters or {}))
                except ValueError as fault:
                    message = f"the parameters of tool {number}, {tool.name!r}, cannot constrain the answer: {fault}"
                    raise FieldError(message, "tools") from None
            message = f"the parameters of all tools together cannot constrain the answer: {error}"
            raise FieldError(message, "tools") from None
        return constraint

    async def encode(self) -> tuple[list[int], list[VisualInput]]:
        """Returns the token ids of the conversation, and the patches of its images."""
        engine, tokens = self._model.engine, await self._encoded()
        if self._shown and not engine.takes_images:
            message = f"{self._has} images, but the model reads only text; accepted: text parts"
            raise ApiError(400, message, param=self._field)
        images: list[VisualInput] = []
        if self._shown:
            directory = self._model.image_directory
            images = await run_in_threadpool(read_images, self._shown, engine, directory, self._field)
        tokens = engine.with_image_tokens("the chat template's text", tokens, images)
        if len(tokens) >= engine.max_length:
            raise ApiError(
                400,
                f"{self._has} {len(tokens)} tokens, including {len(images)} images; accepted: up to "
                f"{engine.max_length - 1}, which leaves room for one more. Send fewer or smaller images.",
                param=self._field,
                code=TOO_LONG,
            )
        return tokens, images

    @property
    def _has(self) -> str:
        """The field with its verb, as the beginning of a sentence."""
        return f"{self._field} has" if self._field == "input" else f"{self._field} have"

    async def _encoded(self) -> list[int]:
        """Returns the token ids, with one token per image."""
        most = self._model.engine.max_length - 1
        tools = {} if self.tools is None else {"tools": [tool.for_template() for tool in self.tools.tools]}
        try:
            return await self._model.texts.encode_chat(self._messages, self._variables | tools, limit=most)
        except TextRefused as error:
            raise FieldError(str(error), "prompt") from None
        except TextTooLong as error:
            raise ApiError(
                400,
                f"{self._has} {error.size}; accepted: up to {most} tokens, which leaves room for one more. Shorten the "
                "messages.",
                param=self._field,
                code=TOO_LONG,
            ) from None

    def reader(self) -> AnswerReader | None:
        """Returns a reader for one answer, or None if answers have no calls."""
        if self.tools is None or self._format is None:
            return None
        return AnswerReader(self._model.tokenizer, self._format, at_most_one=self.tools.at_most_one)

    def call_id(self, answer: str, choice: int, index: int) -> str:
        """Returns the id of a call; see `ToolFormat.call_id`."""
        assert self._format is not None
        return self._format.call_id(answer, choice, index)

    async def read(self, generations: Sequence[Generation]) -> list[Answer]:
        """Splits each answer into content and calls, in a thread, since long answers take long."""
        completions = [completion for generation in generations for completion in generation.completions]
        if self._format is None:
            return [Answer(completion.text or "", []) for completion in completions]

        def read_all() -> list[Answer]:
            readers = (self.reader() for _ in completions)
            pairs = zip(readers, completions, strict=True)
            return [reader.read(one.tokens, one.text or "") for reader, one in pairs if reader is not None]

        return await run_in_threadpool(read_all)
