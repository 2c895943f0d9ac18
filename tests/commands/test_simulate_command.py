"""`pagedjax simulate`, through main()."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pagedjax.cli import main

Run = Callable[..., tuple[int, str, str]]
LINES = [
    {"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 4500, "input_length": 1536, "output_length": 4, "hash_ids": [0, 1, 3]},
    {"timestamp": 4500, "input_length": 20, "output_length": 9},
]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES), encoding="utf-8")
    return str(path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*args: str) -> tuple[int, str, str]:
        code = main(["simulate", *args])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def a_second(tmp_path: Path) -> list[str]:
    """Every step takes one."""
    path = tmp_path / "step_time.json"
    path.write_text('{"per_pass": 1}', encoding="utf-8")
    return ["--step-time", str(path), "--decode-steps", "1", "--async-steps", "0"]


def test_json(run: Run, trace: str, a_second: list[str]) -> None:
    """One step for a prompt of 1030 tokens, four for the rest of its output; then two prompts in one step, the longer of which
    finds 1024 tokens."""
    code, out, err = run("--trace", trace, "--json", *a_second)
    said = json.loads(out)
    assert code == 0 and "14.0 s of traffic in" in err and '"per_pass": 1' in err
    assert said["requests"] == {"finished": 3, "refused": 0, "ended": {"length": 3}}
    assert (said["seconds"], said["steps"]["count"]) == (14, 14)


def test_ways_to_reserve_and_the_queue(run: Run, trace: str, a_second: list[str]) -> None:
    """A run for the longest sequence leaves room for one at a time; by work the short prompt goes first."""
    small = ("--num-blocks", "40", "--max-model-len", "2000", "--no-prefix-caching")
    waits = {}
    for reserve in ("paged", "max"):
        code, out, _ = run("--trace", trace, "--json", "--reserve", reserve, *small, *a_second)
        assert code == 0
        waits[reserve] = json.loads(out)["queued"]["max"]
    assert waits["paged"] < waits["max"]
    one = ("--max-num-seqs", "1", "--num-blocks", "60")
    firsts = [
        json.loads(run("--trace", trace, "--json", "--policy", policy, *one, *a_second)[1])["queued"]["mean"]
        for policy in ("first_come", "shortest_work")
    ]
    assert firsts == pytest.approx([5 / 3, 10 / 3])  # one of three waits: the short one 5 steps, or the long one 10
    with pytest.raises(SystemExit) as ended:
        run("--trace", trace, "--policy", "fair")
    assert ended.value.code == 2


def test_text(run: Run, trace: str, a_second: list[str]) -> None:
    code, out, _ = run("--trace", trace, *a_second)
    words = [line.replace("│", " ").split() for line in out.splitlines()]
    assert code == 0
    assert ["requests", "3", "finished,", "0", "refused"] in words
    assert ["prompt", "tokens", "cached", f"{1024 / (1030 + 1536 + 20):.1%}"] in words
    (first,) = [line for line in words if line[:4] == ["until", "its", "first", "token"]]
    assert first[4:] == ["1.333", "1.5", "1.5", "1.5", "1.5"]


def test_what_the_flags_do(run: Run, trace: str, a_second: list[str]) -> None:
    def seconds(*args: str) -> float:
        code, out, _ = run("--trace", trace, "--json", *a_second, *args)
        assert code == 0
        return json.loads(out)["seconds"]

    whole = seconds()
    assert seconds("--limit", "1") == 5
    assert seconds("--max-num-batched-tokens", "300") > whole
    assert seconds("--max-num-seqs", "1") > whole
    assert seconds("--no-prefix-caching", "--max-num-batched-tokens", "1040") > seconds("--max-num-batched-tokens", "1040")
    assert seconds("--num-blocks", "25") > whole
    code, out, _ = run("--trace", trace, "--json", "--decode-rows", "256", "--prefill-tokens", "4096")
    wide = json.loads(out)["steps"]
    assert code == 0 and wide["busy"] > json.loads(run("--trace", trace, "--json")[1])["steps"]["busy"]


def test_speed_and_scale(run: Run, tmp_path: Path, a_second: list[str]) -> None:
    path = tmp_path / "a.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.5,40,2\n2023-11-16 18:16:06.5,40,2")
    ends = {
        options: json.loads(run("--trace", str(path), "--json", *a_second, *options)[1])["seconds"]
        for options in ((), ("--speed", "2"), ("--scale", "4"))
    }
    assert list(ends.values()) == [22, 12, 28]


def test_refusals_are_shown(run: Run, trace: str) -> None:
    code, out, _ = run("--trace", trace, "--num-blocks", "20")
    text = " ".join(out.split())
    assert code == 0 and "2 finished, 1 refused" in text
    assert "UserError, as the first was told: request 1: prompt and output need 25 blocks of 64 tokens; the pool has 20" in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--trace", "none.csv"], "a trace must be readable; got none.csv: No such file or directory"),
        (["--limit", "0"], "limit must be positive; got 0"),
        (["--speed", "0"], "speed must be positive; got 0.0"),
        (["--scale", "0"], "scale must be positive; got 0.0"),
        (["--scale", "2"], "scale must be 1 for a trace with hash ids; got 2.0"),
        (["--num-blocks", "0"], "num_blocks must be at least 1; got 0"),
        (["--block-size", "0"], "block_size must be at least 1; got 0"),
        (["--block-size", "48"], "block_size must be a power of two (or 0: chosen by device); got 48"),
        (["--async-steps", "2"], "async_steps must be 0 or 1; got 2"),
        (["--step-time", "none.json"], "a step time must be a readable file; got none.json: No such file or directory"),
        (["--decode-rows", "8"], "the largest of decode_rows must be at least max_num_seqs 256; got 8"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(run: Run, trace: str, args: list[str], message: str) -> None:
    code, out, err = run(*([] if "--trace" in args else ["--trace", trace]), *args)
    assert (code, out) == (2, "") and err == f"pagedjax: error: {message}\n"


def test_it_does_not_load_jax(trace: str) -> None:
    code = f"import sys; from pagedjax.cli import main; main(['simulate', '--trace', {trace!r}]); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
