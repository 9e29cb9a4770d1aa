"""An error in one field of a request."""


class FieldError(ValueError):
    """A field has a value that is not accepted.

    Attributes:
        field: its name. The engine names fields of `Request` and `SamplingParams`; a server translates them to the
            names of its API.
    """

    def __init__(self, message: str, field: str = "") -> None:
        """An error whose message is complete without the field's name."""
        super().__init__(message)
        self.field = field
