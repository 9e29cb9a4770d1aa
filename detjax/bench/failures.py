"""The text of a failure in a result."""


def reason(failure: Exception) -> str:
    """Returns a failure's type and up to 400 characters of its message's first line, then the failures of a group."""
    lines = str(failure).strip().splitlines() or [""]
    text = f"{type(failure).__name__}: {lines[0][:400]}"
    grouped = failure.exceptions if isinstance(failure, ExceptionGroup) else ()
    return text + (f" [{'; '.join(map(reason, grouped))}]" if grouped else "")
