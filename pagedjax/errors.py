"""Errors a user can mend. The command line prints them as one sentence and exits with code 2."""


class UserError(ValueError):
    """Bad input: names the thing, the rule and the value."""


class QueueFull(UserError):
    """The waiting queue is at its bound; the request was not taken. `retry_after`: seconds until it may be, where that is known."""

    def __init__(self, message: str, retry_after: float | None = None):
        super().__init__(message)
        self.retry_after = retry_after


class EngineStopped(RuntimeError):
    """The engine's thread has ended, by an error or because it was closed: what was asked of it will not be answered."""


def is_unicode(text: str) -> bool:
    """Whether it can be written: JSON may bring half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check(ok: bool, message: str) -> None:
    """Raises UserError(message) unless ok."""
    if not ok:
        raise UserError(message)
