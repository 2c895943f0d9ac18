"""Traces: what is stored, what is read, what becomes of it, and what is refused."""

import gzip
import lzma
from collections import Counter
from pathlib import Path

import pytest

from bench.traces import AZURE, MOONCAKE, ideal_hit_rate
from pagedjax.errors import UserError
from pagedjax.traces import HASH_BLOCK, Traced, arrivals, read_trace

AZURE_LINES = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 23:59:59.9799600,4808,10\n2023-11-17 00:00:00.0319601,3180,8"
MOONCAKE_LINES = (
    '{"timestamp": 500, "input_length": 600, "output_length": 3, "hash_ids": [7, 8]}\n'
    '{"timestamp": 0, "input_length": 1024, "output_length": 4, "hash_ids": [7, 9]}\n'
)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_azure(tmp_path: Path) -> None:
    first, second = read_trace(write(tmp_path / "a.csv", AZURE_LINES))
    assert first == Traced(0, 4808, 10)
    assert (second.prompt, second.output) == (3180, 8) and second.at == pytest.approx(0.0520001, abs=1e-9)


def test_mooncake_is_put_in_order_of_time(tmp_path: Path) -> None:
    made = read_trace(write(tmp_path / "a.jsonl", MOONCAKE_LINES))
    assert made == (Traced(0, 1024, 4, (7, 9)), Traced(0.5, 600, 3, (7, 8)))


def test_compressed(tmp_path: Path) -> None:
    plain = read_trace(write(tmp_path / "a.csv", AZURE_LINES))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(AZURE_LINES.encode()))
    (tmp_path / "a.csv.xz").write_bytes(lzma.compress(AZURE_LINES.encode()))
    assert plain == read_trace(tmp_path / "a.csv.gz") == read_trace(tmp_path / "a.csv.xz")


def test_prompts_are_alike_where_their_hashes_are(tmp_path: Path) -> None:
    one, two = (a.request.prompt for a in arrivals(read_trace(write(tmp_path / "a.jsonl", MOONCAKE_LINES))))
    assert (len(one), len(two)) == (1024, 600)
    assert one[:HASH_BLOCK] == two[:HASH_BLOCK] and one[HASH_BLOCK] != two[HASH_BLOCK]
    assert len(set(one)) == 2


def test_prompts_without_hashes_differ_from_their_first_token() -> None:
    made = [a.request.prompt for a in arrivals([Traced(0, 3, 1), Traced(1, 3, 1), Traced(2, 600, 1, (0, 1))])]
    assert [len(prompt) for prompt in made] == [3, 3, 600]
    assert len({prompt[0] for prompt in made}) == 3


def test_speed_limit_and_scale() -> None:
    trace = [Traced(0, 100, 10), Traced(8, 200, 1), Traced(9, 1, 1)]
    made = list(arrivals(trace, speed=4, limit=2, scale=0.25))
    assert [(a.at, len(a.request.prompt), a.request.params.max_tokens) for a in made] == [(0, 25, 2), (2, 50, 1)]


@pytest.mark.parametrize("name", ["speed", "limit", "scale"])
def test_wrong_options(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} must be positive; got 0"):
        next(arrivals([Traced(0, 1, 1)], **{name: 0}))


def test_hashed_prompts_are_not_scaled() -> None:
    with pytest.raises(UserError, match="scale must be 1 for a trace with hash ids; got 2"):
        next(arrivals([Traced(0, 1, 1, (0,))], scale=2))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "", r"a trace must be a \.csv or \.jsonl file, or one of them with \.gz or \.xz; got .*a\.txt"),
        ("a.csv.xz", "no xz", "a trace must be readable; got .*: Input format not supported"),
        ("a.csv.gz", "no gzip", "a trace must be readable; got .*: Not a gzipped file"),
        ("a.csv", "TIMESTAMP,Tokens\n", r"the columns ContextTokens, GeneratedTokens, TIMESTAMP; got \['TIMESTAMP', 'Tokens'\]"),
        ("a.csv", AZURE_LINES + "\nyesterday,1,1", r"a\.csv:4 must be a time and two numbers of tokens; Invalid isoformat"),
        ("a.csv", AZURE_LINES + "\n2023-11-16 18:17:03.0,1", r"a\.csv:4 must be a time and two numbers of tokens"),
        ("a.csv", AZURE_LINES + "\n2023-11-16 18:17:03.0,0,1", "an output of at least one token; got Traced.*prompt=0"),
        ("a.csv", AZURE_LINES.splitlines()[0], "must hold at least one request; got none"),
        ("a.jsonl", MOONCAKE_LINES + "[]", r"a\.jsonl:3 must be an object with timestamp, input_length and output_length"),
        ("a.jsonl", '{"timestamp": 0, "output_length": 1}', r"a\.jsonl:1 must be an object.*KeyError\('input_length'\)"),
        ("a.jsonl", '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [3]}', "for each 512 tokens of 513"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_trace(write(tmp_path / name, text))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a trace must be readable; got .*none\.csv: No such file or directory"):
        read_trace(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("name", "requests", "prompt", "output"), [("code", 8819, 2047.85, 27.88), ("conv", 19366, 1154.70, 211.13)]
)
def test_what_is_stored_of_azure(name: str, requests: int, prompt: float, output: float) -> None:
    """Means as published with the trace; an hour, less a little."""
    made = read_trace(AZURE[name])
    assert len(made) == requests and 3400 < made[-1].at < 3600
    assert sum(r.prompt for r in made) / requests == pytest.approx(prompt, abs=0.01)
    assert sum(r.output for r in made) / requests == pytest.approx(output, abs=0.01)


@pytest.mark.parametrize(("name", "requests", "share"), [("conversation", 12031, 0.366), ("synthetic", 3993, 0.640)])
def test_what_is_stored_of_mooncake(name: str, requests: int, share: float) -> None:
    made = read_trace(MOONCAKE[name])
    assert len(made) == requests
    assert ideal_hit_rate(made) == pytest.approx(share, abs=0.0005)
    parents = Counter(len(set(p)) for p in _parents(made).values())
    assert set(parents) == {1}, "an id stands for a prefix: the same id always comes after the same one"


def _parents(trace: tuple[Traced, ...]) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for request in trace:
        for before, block in zip((-1, *request.hashes), request.hashes, strict=False):
            found.setdefault(block, set()).add(before)
    return found
