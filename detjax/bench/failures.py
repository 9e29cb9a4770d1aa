"""How a failure is written into a result."""

MAX_CHARACTERS = 400
"""Characters of a message that are kept."""


def reason(failure: Exception) -> str:
    """The kind of a failure and the first line of its message, followed by those of the failures that it groups."""
    lines = str(failure).strip().splitlines() or [""]
    text = f"{type(failure).__name__}: {lines[0][:MAX_CHARACTERS]}"
    grouped = failure.exceptions if isinstance(failure, ExceptionGroup) else ()
    return text + (f" [{'; '.join(map(reason, grouped))}]" if grouped else "")
