"""The text of a failure in a result."""

MAX_CHARACTERS = 400
"""Maximum number of characters of a message."""


def reason(failure: Exception) -> str:
    """Returns a failure's type and the first line of its message, followed by the failures of a group."""
    lines = str(failure).strip().splitlines() or [""]
    text = f"{type(failure).__name__}: {lines[0][:MAX_CHARACTERS]}"
    grouped = failure.exceptions if isinstance(failure, ExceptionGroup) else ()
    return text + (f" [{'; '.join(map(reason, grouped))}]" if grouped else "")
