"""The tools of a request, and the choice of tools for its answer."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Protocol

from pydantic import AfterValidator, Discriminator, Field, Tag, field_validator

from detjax.engine import FieldError
from detjax.server.http.field_types import MAX_TOOLS, Body

_NAME: Final = r"^[a-zA-Z0-9_-]{1,64}$"

type ToolName = Annotated[str, Field(pattern=_NAME)]


@dataclasses.dataclass(frozen=True)
class FunctionTool:
    """A function that an answer may call.

    Attributes:
        name: the name in calls.
        description: its purpose.
        parameters: the JSON schema of its arguments; None if it takes none.
        is_strict: True if every call must follow the schema.
    """

    name: str
    description: str | None
    parameters: Mapping[str, Any] | None
    is_strict: bool

    def for_template(self) -> dict[str, Any]:
        """Returns the tool in the form that chat templates expect."""
        fields = {"name": self.name, "description": self.description, "parameters": self.parameters}
        function = {name: value for name, value in fields.items() if value is not None}
        return {"type": "function", "function": function}


@dataclasses.dataclass(frozen=True)
class ToolUse:
    """The tools that an answer may or must call.

    Attributes:
        tools: all tools, for the chat template.
        is_required: True if the answer must consist of calls.
        allowed: names of the tools that it may call; None for all.
        at_most_one: True if it may have only one call.
    """

    tools: Sequence[FunctionTool]
    is_required: bool
    allowed: Sequence[str] | None
    at_most_one: bool

    @property
    def callable(self) -> list[FunctionTool]:
        """The tools that the answer may call."""
        return [tool for tool in self.tools if self.allowed is None or tool.name in self.allowed]


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

    def tool(self) -> FunctionTool:
        """The tool that the fields describe."""
        return FunctionTool(self.name, self.description, self.parameters, bool(self.strict))


class ChatTool(Body):
    type: Literal["function"] = Field(description="A function of the client.")
    function: FunctionFields = Field(description="The function.")

    @field_validator("type", mode="before")
    @classmethod
    def _check_type(cls, value: Any) -> Any:
        return checked_type(value)

    def tool(self) -> FunctionTool:
        """The tool that the fields describe."""
        return self.function.tool()


def checked_type(value: Any) -> Any:
    """Returns a tool's type; raises a ValueError if it is not "function"."""
    if value != "function":
        raise ValueError("accepted: 'function', because the server has no tools of its own")
    return value


def check_names[Tool: FunctionFields | ChatTool](tools: list[Tool]) -> list[Tool]:
    """Returns the tools; raises a ValueError if two have the same name."""
    names = [tool.tool().name for tool in tools]
    if len(set(names)) < len(names):
        raise ValueError("accepted: tools with different names")
    return tools


type ChatTools = Annotated[list[ChatTool], Field(max_length=MAX_TOOLS, fail_fast=True), AfterValidator(check_names)]


# --- choices ----------------------------------------------------------------------------------------------------------


class NamedFunction(Body):
    name: ToolName = Field(description="A tool's name.")


class NamedTool(Body):
    type: Literal["function"] = Field(description="The answer calls this function.")
    function: NamedFunction = Field(description="The tool.")

    @property
    def mode(self) -> str:
        """Always "required"."""
        return "required"

    @property
    def is_one(self) -> bool:
        """Always True."""
        return True

    @property
    def names(self) -> list[str]:
        """The tool's name."""
        return [self.function.name]


class AllowedTools(Body):
    mode: Literal["auto", "required"] = Field(description="Whether one of the tools must be called.")
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)] = Field(
        description="The tools that may be called."
    )


class AllowedToolsChoice(Body):
    type: Literal["allowed_tools"] = Field(description="Some of the tools may be called.")
    allowed_tools: AllowedTools = Field(description="The tools.")

    @property
    def is_one(self) -> bool:
        """Always False: several calls are allowed."""
        return False

    @property
    def mode(self) -> str:
        """The mode: "required" if one of the tools must be called, else "auto"."""
        return self.allowed_tools.mode

    @property
    def names(self) -> list[str]:
        """The tools' names."""
        return [tool.function.name for tool in self.allowed_tools.tools]


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


class Choice(Protocol):
    """A choice of tools that is an object."""

    @property
    def mode(self) -> str:
        """The mode: "required" if one of the tools must be called, else "auto"."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """The tools that may be called."""
        ...

    @property
    def is_one(self) -> bool:
        """True if only one call is allowed."""
        ...


def tool_use(tools: Sequence[FunctionTool], choice: str | Choice | None, *, parallel: bool | None) -> ToolUse | None:
    """Returns the tools that an answer may call, or None if it may not call any.

    Args:
        tools: the tools of the request.
        choice: "none", "auto", "required", or an object that names tools.
        parallel: False to allow only one call.

    Raises:
        ValueError: the choice names an unknown tool, or requires a call without tools.
    """
    mode, allowed, is_one = choice, None, False
    if choice is not None and not isinstance(choice, str):
        mode, allowed, is_one = choice.mode, choice.names, choice.is_one
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
