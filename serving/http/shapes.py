"""The bodies of answers: OpenAI's shapes for chat and completions, whole and in pieces.

All JSON is ASCII. Some clients split a stream at every line break that Unicode knows, and a text may hold any of them.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pagedjax.host.request import Usage
from serving.http.logprobs import joined

Kind = Literal["chat.completion", "text_completion"]
DONE = b"data: [DONE]\n\n"


def to_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def event(value: Any) -> bytes:
    """One server-sent event."""
    return f"data: {to_json(value)}\n\n".encode()


def named_event(name: str, value: Any) -> bytes:
    """One server-sent event that says what it is."""
    return f"event: {name}\n".encode() + event(value)


@dataclass(frozen=True)
class Count:
    """Tokens of a request, for the bill. A prompt counts once however many samples it has."""

    prompt: int = 0
    generated: int = 0
    cached: int | None = None  # of the prompt, found in the prefix cache; None: not known yet

    def body(self) -> dict[str, Any]:
        counts: dict[str, Any] = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
        }
        return counts if self.cached is None else {**counts, "prompt_tokens_details": {"cached_tokens": self.cached}}


def count(usages: Iterable[Collection[Usage]]) -> Count:
    """`usages`: of each prompt those of its samples. The sample that computed the prompt found least of it in the cache."""
    prompt = cached = generated = 0
    for samples in usages:
        prompt += max(usage.prompt for usage in samples)
        cached += min(usage.cached for usage in samples)
        generated += sum(usage.generated for usage in samples)
    return Count(prompt, generated, cached)


@dataclass(frozen=True)
class CallPiece:
    """A tool call, or what is new of one. The first piece of a call has its id and its name."""

    index: int
    arguments: str  # pieces joined are JSON
    id: str | None = None
    name: str | None = None

    def body(self) -> dict[str, Any]:
        known = {} if self.id is None else {"id": self.id, "type": "function"}
        name = {} if self.name is None else {"name": self.name}
        return {"index": self.index, **known, "function": {**name, "arguments": self.arguments}}


def joined_calls(pieces: Iterable[CallPiece]) -> list[dict[str, Any]]:
    """Whole calls, as a message has them."""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if piece.id is not None:
            calls.append({"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}})
        calls[piece.index]["function"]["arguments"] += piece.arguments
    return calls


@dataclass(frozen=True)
class Choice:
    """One sample, or the next piece of one."""

    index: int
    text: str
    finish: str | None = None
    stop: str | int | None = None
    logprobs: dict[str, Any] | None = None
    token_ids: list[int] | None = None  # where they were asked for
    prompt_token_ids: list[int] | None = None
    calls: tuple[CallPiece, ...] = ()  # of tools


def joined_choice(parts: Sequence[Choice], *, logprobs: dict[str, Any] | None) -> Choice:
    """All pieces of a sample as one. `logprobs`: what it has where none of its pieces brought any."""
    lists = [part.logprobs for part in parts if part.logprobs is not None]
    ids = [part.token_ids for part in parts if part.token_ids is not None]
    return replace(
        parts[-1],
        text="".join(part.text for part in parts),
        logprobs=joined(lists) if lists else logprobs,
        token_ids=[token for part in ids for token in part] if ids else None,
        prompt_token_ids=parts[0].prompt_token_ids,
        calls=tuple(call for part in parts for call in part.calls),
    )


class Bodies:
    """Makes the bodies of one answer, which share its head."""

    def __init__(self, kind: Kind, answer_id: str, model: str, created: int, *, usage: bool = False):
        """`usage`: the stream ends with an event for it, and every other event says that it has none."""
        self.kind, self._usage = kind, usage
        self._head = {"id": answer_id, "object": kind, "created": created, "model": model}
        chunk = self._head if kind == "text_completion" else {**self._head, "object": "chat.completion.chunk"}
        self._start = f"data: {to_json(chunk)[:-1]},"
        self._chat = kind == "chat.completion"

    def whole(self, choices: Iterable[Choice], usage: Count) -> dict[str, Any]:
        return {**self._head, "choices": [self._whole(choice) for choice in choices], "usage": usage.body()}

    def role(self, index: int) -> bytes:
        """The first event of a chat's choice."""
        delta = {"role": "assistant", "content": ""}
        return self._event(to_json({"index": index, "delta": delta, "logprobs": None, "finish_reason": None}), None)

    def piece(self, choice: Choice, usage: Count | None = None) -> bytes:
        if choice.finish is None and choice.logprobs is None and choice.token_ids is None and not choice.calls:  # nearly all
            text = json.dumps(choice.text)
            shown = f'"delta":{{"content":{text}}}' if self._chat else f'"text":{text}'
            return self._event(f'{{"index":{choice.index},{shown},"logprobs":null,"finish_reason":null}}', usage)
        shown = {"delta": _delta(choice)} if self._chat else {"text": choice.text}
        return self._event(to_json({"index": choice.index, **shown, **_end(choice)}), usage)

    def usage(self, usage: Count) -> bytes:
        """The event that closes a stream that was asked for it."""
        return self._event("", usage)

    def _event(self, choices: str, usage: Count | None) -> bytes:
        shown = "" if not self._usage else ',"usage":null' if usage is None else f',"usage":{to_json(usage.body())}'
        return f'{self._start}"choices":[{choices}]{shown}}}\n\n'.encode()

    def _whole(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls:
            message |= {"content": choice.text or None, "tool_calls": joined_calls(choice.calls)}
        return {"index": choice.index, **({"message": message} if self._chat else {"text": choice.text}), **_end(choice)}


def _delta(choice: Choice) -> dict[str, Any]:
    if not choice.calls:
        return {"content": choice.text}
    text = {"content": choice.text} if choice.text else {}
    return {**text, "tool_calls": [call.body() for call in choice.calls]}


def _end(choice: Choice) -> Mapping[str, Any]:
    body: dict[str, Any] = {"logprobs": choice.logprobs, "finish_reason": choice.finish, "stop_reason": choice.stop}
    for name in ("token_ids", "prompt_token_ids"):
        if getattr(choice, name) is not None:
            body[name] = getattr(choice, name)
    return body
