"""The items of an answer of /v1/responses, messages and calls, and the events of their growth."""

from collections.abc import Callable, Iterator, Sequence

from detjax.server.text.token_texts import Json
from detjax.server.tools.call_readers import Arguments, CallBegins, Content, Part


class OutputItems:
    """Makes items and events from the parts of an answer.

    A stream sends the events, and a whole answer has the items of the same parts, so both are equal. The caller adds
    sequence numbers to events.

    Attributes:
        items: the completed items.
    """

    def __init__(self, name: str, call_id: Callable[[int], str]) -> None:
        """No items yet; `name` makes their ids unique, `call_id` makes the ids of calls."""
        self.items: list[Json] = []
        self._name, self._call_id = name, call_id
        self._open: Json | None = None
        """The current item, without its text, which is added at its end."""
        self._text: list[str] = []

    def add(self, part: Part, logprobs: Sequence[Json] = ()) -> Iterator[Json]:
        """Yields the events of a part; `logprobs` belong to its tokens, if it is content."""
        match part:
            case Content(text):
                if self._open is None or self._open["type"] != "message":
                    yield from self._begin_message()
                self._text.append(text)
                yield self._event("response.output_text.delta", content_index=0, delta=text, logprobs=[*logprobs])
            case CallBegins(index, name):
                yield from self._end("completed")
                call = {"type": "function_call", "call_id": self._call_id(index), "name": name, "arguments": ""}
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
        yield from self._end("completed")
        name = f"msg_{self._name}_{len(self.items)}"
        self._open = {"id": name, "status": "in_progress", "type": "message", "role": "assistant", "content": []}
        yield self._event("response.output_item.added", item=self._open)
        yield self._event("response.content_part.added", content_index=0, part=_text_part(""))

    def _end(self, status: str) -> Iterator[Json]:
        """Ends the current item, if any."""
        if self._open is None:
            return
        text = "".join(self._text)
        if self._open["type"] == "message":
            yield self._event("response.output_text.done", content_index=0, text=text, logprobs=[])
            yield self._event("response.content_part.done", content_index=0, part=_text_part(text))
            self._open = self._open | {"content": [_text_part(text)]}
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


def _text_part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
