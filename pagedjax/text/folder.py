"""The tokenizer of a Hugging Face folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from pagedjax.errors import UserError, check
from pagedjax.text.pieces import spelling_of
from pagedjax.text.sentencepiece_file import read_sentencepiece
from pagedjax.text.tokenizer import Tokenizer

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Opens the tokenizer of a folder: tokenizer.json, or a SentencePiece tokenizer.model, with tokenizer_config.json and the
    chat template files beside it. Never needs torch."""
    folder = Path(folder)
    check(folder.is_dir(), f"a tokenizer is read from a folder; got {str(folder)!r}, which is none")
    settings = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
    hf, settings = _open_vocabulary(folder, settings)
    _add_missing(hf, settings, folder)
    names = {name: _content(settings[name]) for name in SPECIAL_NAMES if settings.get(name)}
    bos_id, eos_id = (_id_of(hf, names, name, folder) for name in ("bos_token", "eos_token"))
    prefix, suffix = _around(hf)
    return Tokenizer(
        hf=hf,
        spelling=spelling_of(hf),
        bos_id=bos_id,
        eos_id=eos_id,
        prefix=_owned(prefix, bos_id, settings.get("add_bos_token"), "add_bos_token"),
        suffix=_owned(suffix, eos_id, settings.get("add_eos_token"), "add_eos_token"),
        special_ids=frozenset(i for i, token in hf.get_added_tokens_decoder().items() if token.special),
        special_tokens=names,
        templates=_read_templates(folder, settings),
    )


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} must be a readable JSON file; got {error}") from error
    check(isinstance(value, dict), f"{path} must hold a JSON object; got {type(value).__name__}")
    return value


def _open_vocabulary(folder: Path, settings: dict[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """The tokenizer of the first file that is there, and the settings with what that file adds to them."""
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(path)), settings
        except Exception as error:  # the package raises plain Exception
            raise UserError(f"{path} must be a file of the `tokenizers` package; got {error}") from error
    for name in ("tokenizer.model", "sentencepiece.bpe.model", "spiece.model"):
        if (folder / name).is_file():
            hf, found = read_sentencepiece(folder / name, legacy=settings.get("legacy") is not False)
            return hf, {**found, **settings}
    raise UserError(f"a tokenizer folder must hold tokenizer.json or a SentencePiece tokenizer.model; {folder} has neither")


def _add_missing(hf: tokenizers.Tokenizer, settings: Mapping[str, Any], folder: Path) -> None:
    """Adds the tokens that only tokenizer_config.json or added_tokens.json lists, in the order of their ids."""
    listed: dict[int, tokenizers.AddedToken] = {}
    for content, token_id in _read_json(folder / "added_tokens.json").items():
        listed[_token_id(token_id, folder)] = tokenizers.AddedToken(content, normalized=False)
    decoder = settings.get("added_tokens_decoder") or {}
    check(isinstance(decoder, dict), f"added_tokens_decoder of {folder} must be an object; got {decoder!r:.80}")
    for token_id, entry in decoder.items():
        check(isinstance(entry, dict), f"an added token of {folder} must be an object; got {entry!r:.80}")
        flags = {name: entry[name] for name in ("single_word", "lstrip", "rstrip", "normalized", "special") if name in entry}
        wrong = [name for name, value in flags.items() if not isinstance(value, bool)]
        check(not wrong, f"the flags of an added token of {folder} must be true or false; got {entry!r:.80}")
        listed[_token_id(token_id, folder)] = tokenizers.AddedToken(_content(entry), **flags)
    known = hf.get_added_tokens_decoder()
    for token_id, token in sorted(listed.items()):
        if token_id in known:
            continue
        add = hf.add_special_tokens if token.special else hf.add_tokens
        add([token])
        got = hf.token_to_id(token.content)
        check(got == token_id, f"added token {token.content!r} must have the next free id {got} in {folder}; got {token_id}")


def _token_id(value: Any, folder: Path) -> int:
    """An id, which JSON writes as a string where it is a key."""
    right = type(value) is int or (isinstance(value, str) and value.isascii() and value.isdigit())
    check(right and 0 <= int(value) < 2**32, f"the id of an added token of {folder} must be a whole number; got {value!r:.80}")
    return int(value)


def _content(token: Any) -> str:
    """The text of a special token, given as a string or as an object."""
    content = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(content, str):
        raise UserError(f"a special token must be a string or an object with a content; got {token!r:.80}")
    return content


def _id_of(hf: tokenizers.Tokenizer, names: Mapping[str, str], name: str, folder: Path) -> int | None:
    if name not in names:
        return None
    token_id = hf.token_to_id(names[name])
    check(token_id is not None, f"{name} must be a token of the vocabulary in {folder}; got {names[name]!r}")
    return token_id


def _around(hf: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids the post-processor puts before and after every text, found by trying it on one."""
    plain = hf.encode("a", add_special_tokens=False).ids
    full = hf.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return tuple(full[:start]), tuple(full[start + len(plain) :])
    raise UserError(f"a tokenizer's post-processor must only add tokens around a text; got {full} for {plain}")


def _owned(around: tuple[int, ...], token_id: int | None, wanted: bool | None, key: str) -> tuple[int, ...]:
    """What stands around a text when `add_bos_token` or `add_eos_token` says so; None: as the post-processor does."""
    if wanted is None:
        return around
    if not wanted:
        return tuple(i for i in around if i != token_id)
    if token_id is None:
        raise UserError(f"{key} needs {key[4:]} to be set; got none")
    return around if token_id in around else (*around, token_id)


def _read_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name: files come before tokenizer_config.json, as in transformers."""
    given = settings.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(given, str):
        templates["default"] = given
    elif isinstance(given, list):
        for entry in given:
            check(
                isinstance(entry, dict) and {"name", "template"} <= set(entry),
                f"a chat_template of {folder} must be an object with a name and a template; got {entry!r:.80}",
            )
            templates[entry["name"]] = entry["template"]
    elif isinstance(given, dict):
        templates |= given
    else:
        check(given is None, f"chat_template of {folder} must be a string, a list or an object; got {given!r:.80}")
    for name, source in templates.items():
        ok = isinstance(name, str) and isinstance(source, str)
        check(ok, f"the name and the text of a chat_template of {folder} must be strings; got {name!r:.80}: {source!r:.80}")
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    return templates | {name: _read_text(path) for name, path in files.items()}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} must be readable UTF-8 text; got {error}") from error
