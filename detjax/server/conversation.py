"""Conversations that an answer continues, with the tools that it may call."""

from collections.abc import Sequence

from starlette.concurrency import run_in_threadpool

from detjax.engine import Constraint, Generation
from detjax.server.api_calls import TOO_LONG, ServedModel
from detjax.server.errors import ApiError
from detjax.server.texts import Message as Turn
from detjax.server.texts import TextTooLong
from detjax.server.token_texts import Json
from detjax.server.tool_answers import Answer, AnswerReader
from detjax.server.tool_formats import ToolFormat, why_no_tools
from detjax.server.tools import ToolUse


class Conversation:
    """What an answer continues: messages, tools and variables of the chat template.

    Attributes:
        tools: what the answer may call; None: nothing.
    """

    def __init__(
        self, model: ServedModel, messages: Sequence[Turn], variables: Json, tools: ToolUse | None, field: str
    ) -> None:
        """A conversation with a model.

        Args:
            model: answers.
            messages: the conversation so far.
            variables: further variables of the chat template.
            tools: what the answer may call; None: nothing.
            field: the field of the body that holds the messages.

        Raises:
            ValueError: the model has no chat template, or none with a known format of tool calls.
        """
        if not model.tokenizer.has_chat_template:
            raise ValueError("the model has no chat template; accepted: /v1/completions")
        self.tools = tools
        self._model, self._messages, self._variables, self._field = model, messages, variables, field
        self._format: ToolFormat | None = None
        if tools is not None:
            self._format = model.tool_format
            if self._format is None:
                raise ApiError(400, why_no_tools(model.tokenizer), param="tools")

    def constraint(self, form: Constraint | None) -> Constraint | None:
        """Returns what the answer has to be, given what it has to be where it calls no tool.

        Raises:
            ValueError: nothing can be both.
        """
        if self.tools is None or self._format is None:
            return form
        return self._format.constraint(self.tools, form)

    def compile(self, constraint: Constraint) -> None:
        """Compiles a constraint, which takes a while.

        Raises:
            ValueError: it is not valid.
        """
        try:
            self._model.engine.compile_constraint(constraint)
        except ValueError as error:
            if self.tools is None:
                raise
            raise ValueError(
                f"the answer cannot be kept to the parameters of tools or to response_format: {error}"
            ) from None

    async def encode(self) -> list[int]:
        """Returns the token ids of the conversation.

        Raises:
            ValueError: the chat template refuses the messages.
            ApiError: they have more tokens than fit.
        """
        most = self._model.engine.max_length - 1
        tools = {} if self.tools is None else {"tools": [tool.for_template() for tool in self.tools.tools]}
        try:
            return await self._model.texts.encode_chat(self._messages, self._variables | tools, limit=most)
        except TextTooLong as error:
            named = f"{self._field} has" if self._field == "input" else f"{self._field} have"
            raise ApiError(
                400,
                f"{named} {error.size}; accepted: up to {most} tokens, which leaves room for one more. Shorten the "
                "messages.",
                param=self._field,
                code=TOO_LONG,
            ) from None

    def reader(self) -> AnswerReader | None:
        """Returns a reader of one answer, or None if answers are content only."""
        if self.tools is None or self._format is None:
            return None
        return AnswerReader(self._model.tokenizer, self._format, at_most_one=self.tools.at_most_one)

    def call_id(self, answer: str, choice: int, index: int) -> str:
        """Returns the id of a call; see `ToolFormat.call_id`."""
        assert self._format is not None
        return self._format.call_id(answer, choice, index)

    async def read(self, generations: Sequence[Generation]) -> list[Answer]:
        """Returns what each answer says and calls. It takes long for long answers."""
        completions = [completion for generation in generations for completion in generation.completions]
        if self._format is None:
            return [Answer(completion.text or "", []) for completion in completions]

        def read_all() -> list[Answer]:
            readers = (self.reader() for _ in completions)
            pairs = zip(readers, completions, strict=True)
            return [reader.read(one.tokens, one.text or "") for reader, one in pairs if reader is not None]

        return await run_in_threadpool(read_all)
