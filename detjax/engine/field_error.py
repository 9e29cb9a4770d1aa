"""The error of one field of a request."""


class FieldError(ValueError):
    """A field has a value that is not accepted.

    Attributes:
        field: its name. Of an engine's errors it is a field of `Request` or `SamplingParams`; a server translates it to
            what its client calls it.
    """

    def __init__(self, message: str, field: str = "") -> None:
        """The error of a field; the message stands alone."""
        super().__init__(message)
        self.field = field
