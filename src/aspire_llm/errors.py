"""The one kind of error a user can cause."""


class UserError(ValueError):
    """Bad input: one line that names the value and what is allowed.

    The command line prints it and exits with code 2; the server answers 400. `parameter` is the option or field at fault.
    """

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter
