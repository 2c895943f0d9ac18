"""Errors a user can mend. The command line prints them as one sentence and exits with code 2."""


class UserError(ValueError):
    """Bad input: names the thing, the rule and the value."""


class QueueFull(UserError):
    """The waiting queue is at its bound; the request was not taken."""


def check(ok: bool, message: str) -> None:
    """Raises UserError(message) unless ok."""
    if not ok:
        raise UserError(message)
