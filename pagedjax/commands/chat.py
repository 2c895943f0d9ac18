"""`pagedjax chat`: a conversation in the terminal."""

import contextlib
import sys
from typing import Any

from pagedjax import terminal
from pagedjax.commands.start import start
from pagedjax.errors import UserError
from pagedjax.flags import sampling_params
from pagedjax.host.request import SamplingParams
from pagedjax.llm import LLM
from pagedjax.stream import Stream

with contextlib.suppress(ImportError):  # not on every platform; gives input() a line editor with a history
    import readline  # noqa: F401

COMMANDS = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"
PROMPT = "\n› "


def run(command: Any) -> None:
    """`command` is cli.Chat. Without a terminal each line of stdin is a message, and the first error ends it."""
    sampling_params(command.sampling, SamplingParams())  # a wrong flag is said before the model is loaded
    with start(command.model, command.engine) as llm:
        params = sampling_params(command.sampling, llm.get_default_sampling_params())
        system = [{"role": "system", "content": command.system}] if command.system else []
        messages = list(system)
        llm.chat_prompt([*messages, {"role": "user", "content": "Hello"}])  # a model that cannot chat says so now
        person = sys.stdin.isatty()
        if person:
            terminal.note(COMMANDS)
        while (line := read_line(person=person)) is not None:
            if line == "/exit":
                break
            if line == "/reset":
                messages = list(system)
                terminal.note("a new conversation")
            elif line in ("/help", "/?"):
                terminal.note(COMMANDS)
            elif line:
                messages = turn(llm, params, messages, line, person=person)


def read_line(*, person: bool) -> str | None:
    """The next message, stripped; None at the end. Ctrl-C empties the line."""
    try:
        return input(PROMPT if person else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        if not person:
            raise
        return ""


def turn(llm: LLM, params: SamplingParams, messages: list[dict[str, str]], text: str, *, person: bool) -> list[dict[str, str]]:
    """The conversation with this message and its answer, which is printed as it comes; unchanged where it cannot be answered."""
    asked = [*messages, {"role": "user", "content": text}]
    try:
        stream = llm.stream(llm.chat_prompt(asked), params)
    except UserError as error:
        if not person:
            raise
        terminal.note(f"{error} (/reset starts anew)")
        return messages
    return [*asked, {"role": "assistant", "content": print_answer(stream)}]


def print_answer(stream: Stream) -> str:
    """The answer, which may be cut short by Ctrl-C."""
    pieces: list[str] = []
    try:
        for delta in stream:
            pieces.append(delta.text)
            print(delta.text, end="", flush=True)
    except KeyboardInterrupt:
        stream.cancel()
        terminal.note(" [stopped]")
    print(flush=True)
    return "".join(pieces)
