"""Conversations with the tools that their answers may call."""

import dataclasses
from collections.abc import Sequence
from typing import Final

from starlette.concurrency import run_in_threadpool

from detjax.engine import Constraint, FieldError, Generation
from detjax.engine.reasoning_budget import ReasoningBudget, ReasoningMarks, ReasoningTokens
from detjax.models.vision.images import VisualInput
from detjax.server.api.api_calls import TOO_LONG, ServedModel
from detjax.server.api.images import ShownPart, ShownVideo, read_images
from detjax.server.http.errors import ApiError
from detjax.server.http.field_types import MAX_TOKENS
from detjax.server.text.texts import Message as Turn
from detjax.server.text.texts import TextRefused, TextTooLong
from detjax.server.text.token_texts import Json
from detjax.server.tools.answers import Answer, AnswerReader
from detjax.server.tools.definitions import ToolUse
from detjax.server.tools.formats import why_no_tools
from detjax.server.tools.json_objects import HermesFormat

_ENDING: Final = 512
"""Tokens at the end of a prompt that may begin the answer's message."""


@dataclasses.dataclass(frozen=True)
class PromptForm:
    """The form of a conversation's prompt.

    Attributes:
        add_generation_prompt: the prompt ends with the beginning of a new message.
        continue_final_message: the prompt ends with the text of the last message, which the answer continues.
        most_tokens: number of last tokens that the prompt is cut to; None: it is not cut.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    most_tokens: int | None = None


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
        form: PromptForm | None = None,
    ) -> None:
        """A conversation whose messages are in the `field` of the body, and contain the images and videos `shown`.

        Raises:
            ValueError: the model has no chat template, or tools are given and its format of tool calls is unknown.
        """
        if not model.tokenizer.has_chat_template:
            raise ValueError("the model has no chat template; accepted: /v1/completions")
        self.tools = tools
        self._model, self._messages, self._variables, self._field = model, messages, variables, field
        self._shown, self._form = shown, form or PromptForm()
        self._format, self._reasoning = model.tool_format, model.reasoning_format
        self._ending = ""
        """The text of the prompt's end."""
        if tools is not None and self._format is None:
            raise ApiError(400, why_no_tools(model.tokenizer), param="tools")

    def constraint(self, form: Constraint | None) -> Constraint | None:
        """Compiles and returns the answer's constraint, given the constraint `form` of an answer without calls.

        Raises:
            ValueError: the constraint is not valid, or the format of tool calls cannot be combined with `form`.
        """
        engine = self._model.engine
        rules = "" if self._reasoning is None else self._reasoning.rules(self._ending)
        format_ = self._format or HermesFormat(self._model.tokenizer)  # any format will do without tools
        constraint = format_.constraint(self.tools, form, rules, self._ending)
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
        engine = self._model.engine
        if self._shown and not engine.takes_images:
            message = f"{self._has} images, but the model reads only text; accepted: text parts"
            raise ApiError(400, message, param=self._field)
        images: list[VisualInput] = []
        if any(isinstance(part, ShownVideo) for part in self._shown) and engine.video_texts(()) is not None:
            images = await self._images()
        tokens = await self._encoded(images)
        most = self._form.most_tokens
        if self._shown and most is not None:
            raise FieldError(
                f"truncate_prompt_tokens is given and {self._has} images; accepted: one of them, because a part of an "
                "image has no meaning",
                "truncate_prompt_tokens",
            )
        if most is not None:
            tokens = tokens[-most:]
        if self._shown and not images:
            images = await self._images()
        tokens = engine.with_image_tokens("the chat template's text", tokens, images)
        if len(tokens) >= engine.max_length:
            raise ApiError(
                400,
                f"{self._has} {len(tokens)} tokens, including {len(images)} images; accepted: up to "
                f"{engine.max_length - 1}, which leaves room for one more. Send fewer or smaller images.",
                param=self._field,
                code=TOO_LONG,
            )
        continues = self._form.continue_final_message
        ending = self._model.tokenizer.decode(tokens if continues else tokens[-_ENDING:], skip_special_tokens=False)
        self._ending = self._reasoning.continued(ending) if continues and self._reasoning is not None else ending
        return tokens, images

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Tokens that end an answer in the model's format, in addition to the checkpoint's."""
        return () if self._format is None else self._format.stop_tokens

    def reasoning_budget(self, tokens: int | None) -> ReasoningBudget | None:
        """Returns the limit on the answer's reasoning, given a maximum number of tokens or None, after `encode`.

        Raises:
            ValueError: the answers of the model have no reasoning, or its marks are not tokens.
        """
        if tokens is None or tokens < 0:
            return None
        if self._reasoning is None or not self._reasoning.end_tokens:
            problem = "has no marks of reasoning" if self._reasoning is None else "marks reasoning with plain text"
            raise FieldError(
                f"thinking_token_budget is {tokens}, and the model's chat template {problem}; accepted: null",
                "reasoning_budget",
            )
        marks = self._reasoning_marks()
        return None if marks is None else ReasoningBudget(tokens, marks)

    def _reasoning_marks(self) -> ReasoningMarks | None:
        """Returns the tokens around the answer's reasoning; None if it has none, or if the marks are plain text."""
        known, ending = self._reasoning, self._ending
        if known is None or not known.end_tokens or not known.may_reason(ending):
            return None
        return ReasoningMarks(known.end_tokens, known.begin_tokens, known.is_open(ending), known.spaces, known.repeats)

    @property
    def has_reasoning(self) -> bool:
        """True if answers of the model may have reasoning."""
        return self._reasoning is not None

    def reasoning_tokens(self) -> ReasoningTokens | None:
        """Returns a counter of the tokens of an answer's reasoning; None if it has none, or if its marks are text."""
        marks = self._reasoning_marks()
        return None if marks is None else ReasoningTokens(marks)

    @property
    def _has(self) -> str:
        """The field with its verb, as the beginning of a sentence."""
        return f"{self._field} has" if self._field == "input" else f"{self._field} have"

    async def _images(self) -> list[VisualInput]:
        """Returns the patches of the images and videos."""
        directory = self._model.image_directory
        return await run_in_threadpool(read_images, self._shown, self._model.engine, directory, self._field)

    async def _encoded(self, images: Sequence[VisualInput]) -> list[int]:
        """Returns the token ids, with one token per image; of a video only if the prompt has texts of its clips."""
        form = self._form
        most = self._model.engine.max_length - 1 if form.most_tokens is None else MAX_TOKENS
        tools = {} if self.tools is None else {"tools": [tool.for_template() for tool in self.tools.tools]}
        try:
            return await self._model.texts.encode_chat(
                self._messages,
                self._variables | tools,
                limit=most,
                add_generation_prompt=form.add_generation_prompt,
                continue_final_message=form.continue_final_message,
                videos=self._model.engine.video_texts(images) if images else None,
            )
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

    def reader(self, *, shows_special: bool = False) -> AnswerReader | None:
        """Returns a reader for one answer, or None if answers are all content; `shows_special`: see `AnswerReader`."""
        has_messages = self._format is not None and self._format.has_messages
        if self.tools is None and self._reasoning is None and not has_messages:
            return None
        return AnswerReader(
            self._model.tokenizer,
            self._format,
            self.tools,
            self._reasoning,
            self._ending,
            shows_special=shows_special,
        )

    def call_id(self, answer: str, choice: int, index: int, written: str | None) -> str:
        """Returns the id of a call: the one that the model has `written`, else the one of `ToolFormat.call_id`."""
        assert self._format is not None
        return written or self._format.call_id(answer, choice, index)

    async def read(self, generations: Sequence[Generation], *, shows_special: bool = False) -> list[Answer]:
        """Splits each answer into its parts, in a thread, since long answers take long."""
        completions = [completion for generation in generations for completion in generation.completions]

        def read_all() -> list[Answer]:
            answers = list[Answer]()
            for completion in completions:
                reader, text = self.reader(shows_special=shows_special), completion.text or ""
                answers.append(Answer(text, []) if reader is None else reader.read(completion.tokens, text))
            return answers

        return await run_in_threadpool(read_all)
