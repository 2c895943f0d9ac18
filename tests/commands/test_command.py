"""The `pagedjax` command, through its main()."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from pagedjax.cli import main
from pagedjax.commands import doctor
from pallas_kernels import OPS
from pallas_kernels.common.dispatch import choose

STORIES = Path(__file__).parents[1] / "golden" / "stories260K"
# The shapes of conftest's engines, so that the compile cache of the run has them.
SHAPES = [
    *("--max-model-len", "128", "--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--block-size", "16"),
    *("--decode-rows", "4", "--prefill-tokens", "32", "--kv-memory", "2MiB"),
]
GREEDY = ["--temperature", "0", "--max-tokens", "12"]
ONCE = " a time, there was a little girl named Lily"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], compile_cache: str) -> Run:
    """Runs a command on small shapes; (exit code, stdout, stderr)."""

    def call(name: str, *args: str, shapes: list[str] = SHAPES) -> tuple[int, str, str]:
        engine = [*shapes, "--compile-cache", compile_cache] if name not in ("convert",) else []
        code = main([name, *engine, *args])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_generate_prints_texts_in_order_and_nothing_else_on_stdout(run: Run, tmp_path: Path):
    lines = tmp_path / "lines.jsonl"
    lines.write_text('"The dog"\n\n[1, 403, 407]\n{"prompt": "Once upon"}\n', encoding="utf-8")
    code, out, err = run("generate", str(STORIES), "--prompt", "Once upon", "--prompt-file", str(lines), *GREEDY)
    assert code == 0
    first, dog, *same = out.splitlines()
    assert first == ONCE and same == [ONCE, ONCE]
    assert dog != ONCE and dog
    assert "4 of 4: Once upon" in err and "48 out in" in err and "compile" in err


def test_generate_json(run: Run):
    args = ("--prompt", "Once upon", "--prompt-ids", "1,403", "--json", "--logprobs", "2", "--prompt-logprobs", "0")
    code, out, _ = run("generate", str(STORIES), *args, *GREEDY)
    assert code == 0
    first, second = [json.loads(line) for line in out.splitlines()]
    assert (first["prompt"], first["prompt_token_ids"], first["text"]) == ("Once upon", [1, 403, 407], ONCE)
    assert (first["finish_reason"], first["stop_reason"]) == ("length", None)
    assert first["usage"].pop("waited") >= 0
    assert first["usage"] == {"prompt": 3, "cached": 0, "generated": 12, "recomputed": 0}
    assert [p["token"] for p in first["logprobs"]] == first["token_ids"]
    assert all(p["rank"] == 1 and len(p["top"]) == 2 and p["top"][0]["logprob"] == p["logprob"] for p in first["logprobs"])
    assert [p["token"] for p in first["prompt_logprobs"]] == [403, 407]
    assert second["prompt"] is None and second["prompt_token_ids"] == [1, 403]


def test_generate_samples(run: Run):
    args = ("--prompt", "The", "--n", "3", "--max-tokens", "8", "--seed", "7", "--temperature", "1.5", "--ignore-eos")
    code, out, _ = run("generate", str(STORIES), "--json", *args)
    samples = json.loads(out)["outputs"]
    assert code == 0 and [s["index"] for s in samples] == [0, 1, 2]
    assert len({tuple(s["token_ids"]) for s in samples}) > 1
    _, text, _ = run("generate", str(STORIES), "--no-stream", *args)
    assert text == "".join(s["text"] + "\n" for s in samples)  # the same seed, the same samples


def corrupt_folder(folder: Path) -> Path:
    shutil.copytree(STORIES, folder)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    return folder


def changed_config(folder: Path, **changes: Any) -> Path:
    shutil.copytree(STORIES, folder)
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(settings | changes), encoding="utf-8")
    return folder


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


S, P = str(STORIES), ("--prompt", "Once")
WRONG: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "no prompt": (lambda tmp: [S], "at least one --prompt"),
    "no such file": (lambda tmp: [S, "--prompt-file", str(tmp / "none.txt")], r"a prompt file must be readable .*No such file"),
    "not text": (lambda tmp: [S, "--prompt-file", str(write(tmp / "x.txt", b"\xff\xfe"))], "a prompt file must be readable UTF-8"),
    "not JSON": (lambda tmp: [S, "--prompt-file", str(write(tmp / "x.jsonl", b'"a"\nb\n'))], r"x\.jsonl:2 must be JSON"),
    "wrong JSON": (lambda tmp: [S, "--prompt-file", str(write(tmp / "x.jsonl", b"[1.5]\n"))], r"x\.jsonl:1 must be a text"),
    "ids": (lambda tmp: [S, "--prompt-ids", "1,two"], "token ids must be integers with commas between them; got '1,two'"),
    "size": (lambda tmp: [S, *P, "--kv-memory", "much"], "a size must be a number with B, KiB"),
    "temperature": (lambda tmp: [S, *P, "--temperature", "-1"], r"temperature must be 0 or more, and finite; got -1\.0"),
    "logprobs": (lambda tmp: [S, *P, "--logprobs", "1"], "--logprobs and --prompt-logprobs must go with --json"),
    "no model": (lambda tmp: [str(tmp / "none"), *P], "a model must be a folder, a .gguf file or a hub id"),
    "corrupt": (lambda tmp: [str(corrupt_folder(tmp / "m")), *P], r"model\.safetensors"),
    "architecture": (lambda tmp: [str(changed_config(tmp / "m", architectures=["FooForCausalLM"], model_type="foo")), *P], "foo"),
    "shape": (lambda tmp: [str(changed_config(tmp / "m", intermediate_size=180)), *P], r"shape \(180, 64\).*got \(172, 64\)"),
    "gguf": (lambda tmp: [str(write(tmp / "m.gguf", b"GGUF\x03\0\0\0rest")), *P], r"m\.gguf"),
    "vocabulary": (lambda tmp: [S, "--prompt-ids", "1,600"], "the prompt must be token ids below 512; got 600"),
    "too long": (lambda tmp: [S, "--prompt-ids", ",".join(["5"] * 128)], "must be shorter than max_model_len 128; got 128 tokens"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_sentence_and_exit_code_2(run: Run, tmp_path: Path, case: str):
    make, message = WRONG[case]
    code, out, err = run("generate", *make(tmp_path))
    assert (code, out) == (2, "")
    last = err.splitlines()[-1]
    assert last.startswith("pagedjax: error: ") and err.count("error:") == 1
    with pytest.raises(ValueError, match=message):
        raise ValueError(last)


def test_flags_that_cannot_be_honoured(run: Run):
    code, _, err = run("generate", S, *P, "--kv-memory", "20KiB")
    assert code == 2 and "kv_memory must hold at least 2 blocks (one is scrap) of 20480 bytes; got 20480 bytes" in err
    code, _, err = run("generate", S, *P, shapes=["--max-model-len", "4096"])
    assert code == 2 and "max_model_len must be at most the model's 512 positions; got 4096" in err


@pytest.mark.parametrize(
    "args", [["generate", S, *P, "--max-new-tokens", "3"], ["chat", S, "--n", "2"], ["generate"], ["serve"], []], ids=str
)
def test_unknown_or_missing_arguments(args: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        main(args)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and not out and err


def test_chat(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "m"
    shutil.copytree(STORIES, folder)
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once upon\nmore\n/reset\n\nOnce upon\n/exit\nnever read\n"))
    code, out, err = run("chat", str(folder), "--temperature", "0", "--max-tokens", "5")
    answers = out.splitlines()
    assert code == 0 and len(answers) == 3
    assert answers[0] == answers[2] != answers[1]  # the second answer has seen the first turn, the third has not
    assert "a new conversation" in err


def test_chat_needs_a_template(run: Run):
    code, out, err = run("chat", S)
    assert code == 2 and not out and "chat template" in err.splitlines()[-1]


def test_compile_lists_the_buckets(run: Run):
    code, out, err = run("compile", S)
    assert code == 0
    cells = [line.replace("│", " ").split() for line in out.splitlines()]
    assert [row[:3] for row in cells if row and row[0] in ("decode", "mixed")] == [["decode", "4", "4"], ["mixed", "32", "4"]]
    assert "entries" in err
    block = 5 * 2 * 4 * 16 * 8 * 4  # layers, keys and values, heads, tokens, width, bytes
    size, blocks = re.search(r"^pool: (\d+) bytes \(\d+ KiB\), (\d+) blocks beside the scrap block$", out, re.MULTILINE).groups()
    assert int(size) == block * (int(blocks) + 1) <= 2 << 20
    assert re.search(rf"pool of \d+ KiB: {blocks} blocks of 16 tokens", err)


def test_compile_without_a_cache_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["compile", S, "--compile-cache", ""]) == 2
    assert "compile_cache must name a folder" in capsys.readouterr().err


def test_convert(run: Run, tmp_path: Path):
    code, out, _ = run("convert", S, str(tmp_path / "made"), "--dtype", "float32")
    assert code == 0 and out.strip() == str(tmp_path / "made")
    code, text, _ = run("generate", out.strip(), "--prompt", "Once upon", *GREEDY)
    assert code == 0 and text == ONCE + "\n"
    code, _, err = run("convert", S, str(tmp_path / "made"))
    assert code == 2 and "the folder to write must not exist" in err


def test_doctor_says_what_the_ops_do(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor"]) == 0
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    for op in OPS:
        assert [op.name, choose(op, op.typical, "cpu").name] in [row[:2] for row in words]
    assert ["jax", jax.__version__] in words
    assert any(row[:2] == ["cpu", "0"] for row in words)


def test_doctor_where_free_memory_is_not_known(monkeypatch: pytest.MonkeyPatch):
    """macOS has no SC_AVPHYS_PAGES."""
    names = {name: number for name, number in os.sysconf_names.items() if name != "SC_AVPHYS_PAGES"}
    (host,) = [text for name, text in doctor.devices() if name == "host"]
    assert re.fullmatch(r"\d+ cores, [\d.]+ GiB memory, [\d.]+ [MG]iB of it free", host)
    monkeypatch.setattr(os, "sysconf_names", names)
    (host,) = [text for name, text in doctor.devices() if name == "host"]
    assert re.fullmatch(r"\d+ cores, [\d.]+ GiB memory", host)


def test_help_says_what_cannot_be_seen(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    text = " ".join(re.sub(r"\x1b\[[\d;]*m|[│╭╰─╮╯]", "", capsys.readouterr().out).split())
    assert "without the model's chat template" in text
    assert "a start with the same seed gives the same texts" in text
    assert "How tokens are chosen. The defaults" in text and "pyright" not in text


def test_interrupted(monkeypatch: pytest.MonkeyPatch):
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupt)
    assert main(["doctor"]) == 130


def test_in_a_process_of_its_own(tmp_path: Path):
    python = [sys.executable, "-m", "pagedjax"]
    failed = subprocess.run([*python, "generate", str(tmp_path / "none"), *P], capture_output=True, text=True, check=False)
    assert failed.returncode == 2 and failed.stdout == ""
    assert failed.stderr.startswith("pagedjax: error: a model must be") and failed.stderr.count("\n") == 1
    with subprocess.Popen([*python, "doctor"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as unread:
        assert unread.stdout is not None and unread.stderr is not None
        unread.stdout.close()
        assert (unread.stderr.read(), unread.wait()) == (b"", 141)


def test_help_does_not_load_jax():
    code = "import sys, pagedjax.cli; sys.exit(any(name in sys.modules for name in ('jax', 'transformers', 'orbax')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
