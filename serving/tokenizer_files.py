"""The files of a tokenizer as one zip, for gateways that tokenize themselves."""

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from pagedjax.errors import check
from pagedjax.llm import LLM

WANTED = ("tokenizer*.json", "config.json", "generation_config.json", "special_tokens_map.json", "added_tokens.json") + (
    *("vocab.*", "merges.txt", "*.model", "*.tiktoken", "*.jinja", "chat_template.json"),
)
CHUNK = 64 * 1024  # bytes
DATE = (1980, 1, 1, 0, 0, 0)  # of all entries: the same files give the same zip


def archive(llm: LLM) -> bytes:
    """The zip of a model's tokenizer files, or of files made from a GGUF file's vocabulary. UserError where there are none."""
    source = llm.tokenizer_source
    files = _of_folder(source) if isinstance(source, Path) else _made(llm)
    check(bool(files), "the model has no tokenizer: prompts are token ids, and so are answers")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as made:
        for name, data in sorted(files.items()):
            made.writestr(zipfile.ZipInfo(name, DATE), data, zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def chunks(data: bytes) -> Iterator[tuple[bytes, str]]:
    """(piece, "") and with the last piece the SHA-256 of the whole."""
    starts = range(0, len(data), CHUNK)
    for start in starts:
        yield data[start : start + CHUNK], hashlib.sha256(data).hexdigest() if start == starts[-1] else ""


def _of_folder(folder: Path) -> dict[str, bytes]:
    found = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file() and any(fnmatch(p.name, w) for w in WANTED)}
    return found if any(name.startswith("tokenizer.") for name in found) else {}


def _made(llm: LLM) -> dict[str, bytes]:
    tokenizer = llm.tokenizer
    if tokenizer is None:
        return {}
    config = {
        **tokenizer.special_tokens,
        "chat_template": tokenizer.chat_template,
        "add_bos_token": tokenizer.bos_id in tokenizer.prefix,
    }
    known = {name: value for name, value in config.items() if value is not None}
    return {"tokenizer.json": tokenizer.hf.to_str().encode(), "tokenizer_config.json": json.dumps(known).encode()}
