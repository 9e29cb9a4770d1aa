"""The tools of a request, and the choice of tools for its answer."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, field_validator

from detjax.engine import FieldError
from detjax.server.http.field_types import MAX_TOOLS, Body

_NAME: Final = r"^[a-zA-Z0-9_-]{1,64}$"

type ToolName = Annotated[str, Field(pattern=_NAME)]


# --- tools ------------------------------------------------------------------------------------------------------------


class FunctionFields(Body):
    """A function in the format of chats and responses."""

    name: ToolName = Field(description="The tool's name in calls.")
    description: str | None = Field(default=None, description="Its purpose, for the chat template.")
    parameters: dict[str, Any] | None = Field(
        default=None, description="The JSON schema of its arguments, an object. Default: no arguments."
    )
    strict: bool | None = Field(default=None, description="Enforce the schema even if calls are optional.")

    @field_validator("parameters")
    @classmethod
    def _check_parameters(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value and value.get("type", "object") != "object":
            raise ValueError("accepted: a JSON schema of type 'object'")
        return value

    def for_template(self) -> dict[str, Any]:
        """Returns the tool in the form that chat templates expect."""
        fields = {"name": self.name, "description": self.description, "parameters": self.parameters}
        function = {name: value for name, value in fields.items() if value is not None}
        return {"type": "function", "function": function}


def _check_type(value: Any) -> Any:
    if value != "function":
        raise ValueError("accepted: 'function', because the server has no tools of its own")
    return value


FunctionType = Annotated[Literal["function"], BeforeValidator(_check_type)]


class ChatTool(Body):
    type: FunctionType = Field(description="A function of the client.")
    function: FunctionFields = Field(description="The function.")


def check_names[Tool: FunctionFields | ChatTool](tools: list[Tool]) -> list[Tool]:
    """Returns the tools; raises a ValueError if two have the same name."""
    names = {tool.name if isinstance(tool, FunctionFields) else tool.function.name for tool in tools}
    if len(names) < len(tools):
        raise ValueError("accepted: tools with different names")
    return tools


type ChatTools = Annotated[list[ChatTool], Field(max_length=MAX_TOOLS, fail_fast=True), AfterValidator(check_names)]


# --- choices ----------------------------------------------------------------------------------------------------------


class Choice(NamedTuple):
    """A choice of tools.

    Attributes:
        mode: "required" if one of the tools must be called, else "auto".
        names: the tools that may be called.
        is_one: True if only one call is allowed.
    """

    mode: str
    names: Sequence[str]
    is_one: bool


class ChoiceFields(Body, abc.ABC):
    """An object that chooses tools."""

    @abc.abstractmethod
    def choice(self) -> Choice:
        """Returns the choice."""


class NamedFunction(Body):
    name: ToolName = Field(description="A tool's name.")


class NamedTool(ChoiceFields):
    type: Literal["function"] = Field(description="The answer calls this function.")
    function: NamedFunction = Field(description="The tool.")

    def choice(self) -> Choice:
        return Choice("required", [self.function.name], is_one=True)


class AllowedTools(Body):
    mode: Literal["auto", "required"] = Field(description="Whether one of the tools must be called.")
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)] = Field(
        description="The tools that may be called."
    )


class AllowedToolsChoice(ChoiceFields):
    type: Literal["allowed_tools"] = Field(description="Some of the tools may be called.")
    allowed_tools: AllowedTools = Field(description="The tools.")

    def choice(self) -> Choice:
        allowed = self.allowed_tools
        return Choice(allowed.mode, [tool.function.name for tool in allowed.tools], is_one=False)


def kind_of_choice(value: Any) -> str | None:
    """Returns the type tag to validate a choice of tools as."""
    if isinstance(value, dict):
        return {"function": "<function>", "allowed_tools": "<allowed>"}.get(str(value.get("type")))
    return "<mode>" if value in ("none", "auto", "required") else None


type Mode = Annotated[Literal["none", "auto", "required"], Tag("<mode>")]
_ACCEPTED: Final = "accepted: 'none', 'auto', 'required', an object of type function, or one of type allowed_tools"
CHOICE: Final = Discriminator(kind_of_choice, custom_error_type="tool_choice_type", custom_error_message=_ACCEPTED)
type ChatToolChoice = Annotated[
    Mode | Annotated[NamedTool, Tag("<function>")] | Annotated[AllowedToolsChoice, Tag("<allowed>")], CHOICE
]


@dataclasses.dataclass(frozen=True)
class ToolUse:
    """The tools that an answer may or must call.

    Attributes:
        tools: all tools, for the chat template.
        is_required: True if the answer must consist of calls.
        allowed: names of the tools that it may call; None for all.
        at_most_one: True if it may have only one call.
    """

    tools: Sequence[FunctionFields]
    is_required: bool
    allowed: Sequence[str] | None
    at_most_one: bool

    @property
    def callable(self) -> list[FunctionFields]:
        """The tools that the answer may call."""
        return [tool for tool in self.tools if self.allowed is None or tool.name in self.allowed]


def tool_use(
    tools: Sequence[FunctionFields], choice: str | ChoiceFields | None, *, parallel: bool | None
) -> ToolUse | None:
    """Returns the tools that an answer may call, or None if it may not call any.

    Raises a ValueError if the choice names an unknown tool, or requires a call without tools.
    """
    mode, allowed, is_one = choice.choice() if isinstance(choice, ChoiceFields) else (choice, None, False)
    known = {tool.name for tool in tools}
    for name in allowed or ():
        if name not in known:
            names = ", ".join(repr(tool.name) for tool in tools[:8]) or "no name, because the request has no tools"
            raise FieldError(f"tool_choice names {name!r}; accepted: {names}", "tool_choice")
    if mode == "required" and not tools:
        message = "tool_choice is 'required' and the request has no tools; accepted: 'required' with tools"
        raise FieldError(message, "tool_choice")
    if not tools or mode == "none":
        return None
    return ToolUse(tools, mode == "required", allowed, parallel is False or is_one)
