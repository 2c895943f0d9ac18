"""`pagedjax convert`: any model to an Orbax folder."""

from typing import Any

from checkpoints.convert import convert
from pagedjax import terminal


def run(command: Any) -> None:
    """`command` is cli.Convert. Prints the folder on stdout."""
    with terminal.progress() as report:
        made = convert(
            command.source, command.destination, dtype=command.dtype, progress=lambda done, total: report("load", done, total)
        )
    terminal.note(f"{made.config.architecture}, {made.weights_dtype}")
    print(made.source)
