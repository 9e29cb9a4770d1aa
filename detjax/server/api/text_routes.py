"""/tokenize and /detokenize, in vLLM's format: the results of a server's tokenizer and chat template."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from detjax.engine import FieldError
from detjax.server.api.api_calls import ServedModel
from detjax.server.api.messages import Messages, shown_in
from detjax.server.http.field_types import MAX_TOKENS, Body, Token, Variables
from detjax.server.text.texts import TextRefused, TextTooLong

type Json = dict[str, Any]


class TokenizeRequest(Body):
    """The body of a request to /tokenize."""

    model: str | None = Field(default=None, description="A model name from /v1/models.")
    prompt: str | None = Field(default=None, description="A text. Give either prompt or messages.")
    messages: Messages | None = Field(default=None, description="A conversation for the chat template.")
    add_special_tokens: bool | None = Field(
        default=None,
        description="Add the tokenizer's special tokens. Default: true for a prompt, false for messages, whose chat "
        "template writes them.",
    )
    add_generation_prompt: bool | None = Field(
        default=None, description="End a conversation with the beginning of an answer. Default: true."
    )
    chat_template_kwargs: Variables | None = Field(
        default=None, description="Additional variables of the chat template."
    )
    return_token_strs: bool | None = Field(default=None, description="Also return the text of each token.")

    @model_validator(mode="after")
    def _check_combinations(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            given = "neither prompt nor messages is" if self.prompt is None else "prompt and messages are"
            raise ValueError(f"{given} given; accepted: one of them")
        if self.prompt is not None and (self.chat_template_kwargs or self.add_generation_prompt is not None):
            name = "chat_template_kwargs" if self.chat_template_kwargs else "add_generation_prompt"
            message = "a prompt is given with a field of the chat template; accepted: that field with messages"
            raise FieldError(message, name)
        return self

    def param_of(self, field: str) -> str:
        """Returns the body's name for a field."""
        return "messages" if field == "prompt" and self.messages is not None else field


class DetokenizeRequest(Body):
    """The body of a request to /detokenize."""

    model: str | None = Field(default=None, description="A model name from /v1/models.")
    tokens: Annotated[list[Token], Field(max_length=MAX_TOKENS, fail_fast=True)] = Field(description="Token ids.")

    def param_of(self, field: str) -> str:
        """Returns the body's name for a field."""
        return "tokens"


async def tokenized(body: TokenizeRequest, model: ServedModel) -> Json:
    """Returns the token ids of a text or a conversation, with iterators for long lists."""
    limit = max(MAX_TOKENS, model.engine.max_length)
    try:
        if body.messages is None:
            adds = body.add_special_tokens is not False
            (tokens,) = await model.texts.encode([body.prompt or ""], limit=limit, add_special_tokens=adds)
        elif not model.tokenizer.has_chat_template:
            raise FieldError("the model has no chat template; accepted: a prompt", "messages")
        elif any(shown_in(message.content) for message in body.messages):
            message = "messages have images; accepted: parts of type text. /v1/chat/completions reads images."
            raise FieldError(message, "messages")
        else:
            tokens = await model.texts.encode_chat(
                body.messages,
                body.chat_template_kwargs or {},
                limit=limit,
                add_generation_prompt=body.add_generation_prompt is not False,
                add_special_tokens=bool(body.add_special_tokens),
            )
    except TextRefused as error:
        raise FieldError(str(error), "prompt") from None
    except TextTooLong as error:
        raise FieldError(f"the text has {error.size}; accepted: up to {limit} tokens", "prompt") from None
    return {
        "count": len(tokens),
        "max_model_len": model.engine.max_length,
        "tokens": iter(tokens),
        "token_strs": map(model.token_texts.text, tokens) if body.return_token_strs else None,
    }


async def detokenized(body: DetokenizeRequest, model: ServedModel) -> Json:
    """Returns the text of token ids, including special tokens."""
    try:
        (text,) = await model.texts.decode([body.tokens], skip_special_tokens=False)
    except TextRefused as error:
        raise FieldError(str(error), "tokens") from None
    return {"prompt": text}
