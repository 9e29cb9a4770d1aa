"""The items of an answer of /v1/responses, reasoning, messages and calls, and the events of their growth."""

from collections.abc import Callable, Iterator, Sequence

from detjax.server.text.token_texts import Json
from detjax.server.tools.parts import Arguments, CallBegins, Content, Part, Reasoning


class OutputItems:
    """Makes items and events from the parts of an answer.

    A stream sends the events, and a whole answer has the items of the same parts, so both are equal. The caller adds
    sequence numbers to events.

    Attributes:
        items: the completed items.
    """

    def __init__(self, name: str, call_id: Callable[[int, str | None], str]) -> None:
        """No items yet; `name` makes their ids unique, `call_id` makes the ids of calls by index and written id."""
        self.items: list[Json] = []
        self._name, self._call_id = name, call_id
        self._open: Json | None = None
        """The current item, without its text, which is added at its end."""
        self._text: list[str] = []

    @property
    def in_message(self) -> bool:
        """True if the current item is a message."""
        return self._open is not None and self._open["type"] == "message"

    def add(self, part: Part, logprobs: Sequence[Json] = ()) -> Iterator[Json]:
        """Yields the events of a part; `logprobs` belong to its tokens, if it is content."""
        match part:
            case Content(text):
                if self._open is None or self._open["type"] != "message":
                    yield from self._begin_message()
                self._text.append(text)
                yield self._event("response.output_text.delta", content_index=0, delta=text, logprobs=[*logprobs])
            case Reasoning(text):
                if self._open is None or self._open["type"] != "reasoning":
                    yield from self._begin({"type": "reasoning", "summary": [], "content": []}, "rs")
                self._text.append(text)
                yield self._event("response.reasoning_text.delta", content_index=0, delta=text)
            case CallBegins(index, name, id_):
                yield from self._end("completed")
                call_id = self._call_id(index, id_)
                call = {"type": "function_call", "call_id": call_id, "name": name, "arguments": ""}
                self._open = {"id": f"fc_{self._name}_{len(self.items)}", "status": "in_progress"} | call
                yield self._event("response.output_item.added", item=self._open)
            case Arguments(_, text):
                self._text.append(text)
                yield self._event("response.function_call_arguments.delta", delta=text)

    def finish(self, status: str) -> Iterator[Json]:
        """Yields the events at the answer's end; its last item, an empty message if it has none, gets `status`."""
        if self._open is None and not self.items:
            yield from self._begin_message()
        yield from self._end(status)

    def _begin_message(self) -> Iterator[Json]:
        yield from self._begin({"type": "message", "role": "assistant", "content": []}, "msg")

    def _begin(self, item: Json, prefix: str) -> Iterator[Json]:
        """Begins an item with one part of text."""
        yield from self._end("completed")
        self._open = {"id": f"{prefix}_{self._name}_{len(self.items)}", "status": "in_progress"} | item
        yield self._event("response.output_item.added", item=self._open)
        yield self._event("response.content_part.added", content_index=0, part=_part(self._open, ""))

    def _end(self, status: str) -> Iterator[Json]:
        """Ends the current item, if any."""
        if self._open is None:
            return
        text = "".join(self._text)
        if self._open["type"] == "message":
            yield self._event("response.output_text.done", content_index=0, text=text, logprobs=[])
        elif self._open["type"] == "reasoning":
            yield self._event("response.reasoning_text.done", content_index=0, text=text)
        if "content" in self._open:
            part = _part(self._open, text)
            yield self._event("response.content_part.done", content_index=0, part=part)
            self._open = self._open | {"content": [part]}
        else:
            done = {"name": self._open["name"], "arguments": text}
            yield self._event("response.function_call_arguments.done", **done)
            self._open = self._open | {"arguments": text}
        item = self._open | {"status": status}
        yield {"type": "response.output_item.done", "output_index": len(self.items), "item": item}
        self.items.append(item)
        self._open, self._text = None, []

    def _event(self, kind: str, **fields: object) -> Json:
        assert self._open is not None
        place: Json = {"type": kind, "output_index": len(self.items)}
        return place | ({} if "item" in fields else {"item_id": self._open["id"]}) | fields


def _part(item: Json, text: str) -> Json:
    """Returns the part of an item that has its text."""
    if item["type"] == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
