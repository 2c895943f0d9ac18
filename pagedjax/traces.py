"""Recorded traffic: when requests came, how long they were, and which prompts began alike.

Two formats are read, plain or compressed with gzip or xz. `.csv` has the columns TIMESTAMP, ContextTokens and GeneratedTokens (the
Azure LLM inference traces). `.jsonl` has timestamp (ms), input_length and output_length on each line, and may have hash_ids: one id
for each 512 tokens of the prompt, equal where the prompts are equal up to there (the Mooncake traces). No trace has texts: prompts
are made up, from one token id for each hash id, or one of its own for a prompt without.
"""

import csv
import gzip
import json
import lzma
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from functools import cache
from itertools import chain, islice, repeat
from pathlib import Path
from typing import IO, Any, NamedTuple

from pagedjax.errors import UserError, check
from pagedjax.host.request import Request, SamplingParams
from pagedjax.simulate import STOP, Arrival

HASH_BLOCK = 512  # tokens that a hash id stands for
FIRST_TOKEN = STOP + 1  # of the made up prompts
OWN_TOKENS = 1 << 30  # token ids from here are of prompts without hash ids
OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}


class Traced(NamedTuple):
    """A request of a trace: seconds since the first, and tokens."""

    at: float
    prompt: int
    output: int
    hashes: tuple[int, ...] = ()  # of the prompt's 512-token blocks, the last one may be shorter


def read_trace(path: str | Path) -> tuple[Traced, ...]:
    """All requests of a trace, in order of time. UserError for what is not one."""
    path = Path(path).expanduser()
    kind = next((suffix for suffix in reversed(path.suffixes) if suffix not in OPENERS), "")
    check(kind in (".csv", ".jsonl"), f"a trace must be a .csv or .jsonl file, or one of them with .gz or .xz; got {path}")
    try:
        with OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
            made = list(_azure(file, path) if kind == ".csv" else _mooncake(file, path))
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UserError(f"a trace must be readable; got {path}: {reason}") from error
    check(len(made) > 0, f"a trace must hold at least one request; got none in {path}")
    wrong = next((r for r in made if r.prompt < 1 or r.output < 1), None)
    check(wrong is None, f"a traced request must have a prompt and an output of at least one token; got {wrong} in {path}")
    made.sort(key=lambda r: r.at)  # stable
    return tuple(r._replace(at=r.at - made[0].at) for r in made)


def arrivals(trace: Iterable[Traced], *, speed: float = 1.0, limit: int | None = None, scale: float = 1.0) -> Iterator[Arrival]:
    """The first `limit` requests of a trace, made one by one as they come: `speed` times as fast as recorded, with prompts and
    outputs `scale` times as long (at least one token). Lengths can be scaled only where prompts have no hash ids."""
    check(speed > 0, f"speed must be positive; got {speed}")
    check(limit is None or limit > 0, f"limit must be positive; got {limit}")
    check(scale > 0, f"scale must be positive; got {scale}")
    for number, traced in enumerate(islice(trace, limit)):
        check(scale == 1 or not traced.hashes, f"scale must be 1 for a trace with hash ids; got {scale}")
        prompt, output = scaled(traced.prompt, scale), scaled(traced.output, scale)
        tokens = hashed_prompt(traced.hashes, prompt) if traced.hashes else (OWN_TOKENS + number,) * prompt
        yield Arrival(traced.at / speed, Request(str(number), tokens, params_of(output)))


def scaled(tokens: int, scale: float) -> int:
    return max(1, round(tokens * scale))


def hashed_prompt(hashes: Sequence[int], length: int, block: int = HASH_BLOCK) -> tuple[int, ...]:
    """A prompt of `length` tokens: `block` times the same token for each hash id. Prompts are equal where their ids are."""
    whole = chain.from_iterable(repeat(FIRST_TOKEN + h, block) for h in hashes)
    return tuple(islice(whole, length))


@cache
def params_of(output: int) -> SamplingParams:
    return SamplingParams(max_tokens=output, temperature=0)


def _azure(file: IO[str], path: Path) -> Iterator[Traced]:
    reader = csv.DictReader(file)
    columns = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
    check(
        columns <= set(reader.fieldnames or ()),
        f"{path} must have the columns {', '.join(sorted(columns))}; got {reader.fieldnames}",
    )
    first: datetime | None = None
    for row in reader:
        try:
            whole, _, fraction = row["TIMESTAMP"].partition(".")
            time = datetime.fromisoformat(whole)
            first = first or time
            seconds = (time - first).total_seconds() + float(f"0.{fraction or 0}")  # datetime itself has no 100 ns
            yield Traced(seconds, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        except (AttributeError, TypeError, ValueError) as error:
            raise UserError(f"{path}:{reader.line_num} must be a time and two numbers of tokens; {error}") from error


def _mooncake(file: IO[str], path: Path) -> Iterator[Traced]:
    for number, line in enumerate(file, 1):
        try:
            value = json.loads(line)
            hashes = tuple(map(int, value.get("hash_ids", ())))
            made = Traced(float(value["timestamp"]) / 1e3, int(value["input_length"]), int(value["output_length"]), hashes)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path}:{number} must be an object with timestamp, input_length and output_length; {error!r}"
            ) from error
        fit = not hashes or len(hashes) == -(-made.prompt // HASH_BLOCK)
        check(fit, f"{path}:{number} must have a hash id for each {HASH_BLOCK} tokens of {made.prompt}; got {len(hashes)}")
        yield made
