"""The one tokenizer type: text to ids and back, for every kind of checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tokenizers

from pagedjax.errors import UserError, check
from pagedjax.text import chat
from pagedjax.text.pieces import Spelling


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A vocabulary with everything needed to read and write text. Built by `load_tokenizer` and `tokenizer_from_gguf`.

    Exactly one owner of BOS: `prefix` are the ids a prompt of this model starts with (BOS, or nothing). `encode` puts them
    before the text; `encode_chat` puts them before the rendered template unless the template wrote them itself. `suffix` (EOS,
    for the few models that want it) ends plain prompts, never chats.
    """

    hf: tokenizers.Tokenizer
    spelling: Spelling
    bos_id: int | None
    eos_id: int | None
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    special_ids: frozenset[int] = frozenset()
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token, ...: variables of the template
    templates: Mapping[str, str] = field(default_factory=dict)  # chat templates by name

    @property
    def vocab_size(self) -> int:
        """One more than the highest id, added tokens included."""
        return 1 + max(self.hf.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def chat_template(self) -> str | None:
        return self.templates.get("default")

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of a text. Special tokens written in the text are recognised; `add_special` adds `prefix` and `suffix`."""
        check(isinstance(text, str), f"a prompt must be a string; got {type(text).__name__}")
        try:
            text.encode()  # the package's own error does not say what is wrong
        except UnicodeEncodeError as error:
            raise UserError(f"a prompt must be valid Unicode; got a lone surrogate at character {error.start}") from error
        (encoded,) = self.hf.encode_batch_fast([text], add_special_tokens=False)  # `encode` would hold the interpreter's lock
        ids = encoded.ids
        return [*self.prefix, *ids, *self.suffix] if add_special else ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids. Bytes that are no UTF-8 become U+FFFD, one for each maximal broken run; unknown ids are nothing.

        No clean-up of spaces around punctuation, ever: a text is what its tokens spell.
        """
        spelled = bytearray()
        first = True
        for token in ids:
            if skip_special and token in self.special_ids:
                continue
            piece = self.token_bytes(token, first=first)
            if piece is not None:
                spelled += piece
                first = False
        text = spelled.decode("utf-8", "replace")
        spaces = len(text) - len(text.lstrip(" "))
        return text[min(spaces, self.spelling.strip_left) :]

    def token_bytes(self, token: int, *, first: bool = False) -> bytes | None:
        """The bytes a token spells, special or not; None for an id outside the vocabulary.

        `first`: at the start of a text, where some vocabularies drop the space of a word.
        """
        piece = self.hf.id_to_token(token) if 0 <= token < 2**32 else None
        return None if piece is None else self.spelling.spell(piece, first=first)

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences that write the words: at the start of a line, and after a space (as vLLM: only where the space
        makes the first token another one without making the word longer)."""
        found: dict[tuple[int, ...], None] = {}
        newline = self.encode("\n", add_special=False)
        for word in words:
            bare = word.lstrip(" ")
            check(bare != "", f"bad_words must hold more than spaces; got {word!r}")
            plain = self.encode(bare, add_special=False)
            spaced = self.encode(" " + bare, add_special=False)
            inside = self.encode("\n" + bare, add_special=False)
            found[tuple(plain)] = None
            if len(spaced) == len(plain) and spaced[0] != plain[0]:
                found[tuple(spaced)] = None
            # a SentencePiece vocabulary puts a space before every text: only behind a newline does the word stand without one
            if inside[: len(newline)] == newline and len(inside) > len(newline):
                found[tuple(inside[len(newline) :])] = None
        return tuple(found)

    def render_chat(
        self,
        messages: Sequence[chat.Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text of a chat. `template`: the name of one of the model's templates; `variables` reach the template."""
        source = chat.pick_template(self.templates, template, has_tools=bool(tools))
        given = {**self.special_tokens, "documents": None, **variables}
        return chat.render(source, messages, {**given, "add_generation_prompt": add_generation_prompt, "tools": tools or None})

    def encode_chat(
        self,
        messages: Sequence[chat.Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        **variables: Any,
    ) -> list[int]:
        """The prompt ids of a chat: `prefix` once, whether or not the template writes it."""
        options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, "tools": tools, "template": template}
        ids = self.encode(self.render_chat(messages, **options, **variables), add_special=False)
        written = tuple(ids[: len(self.prefix)]) == self.prefix
        return ids if written else [*self.prefix, *ids]
