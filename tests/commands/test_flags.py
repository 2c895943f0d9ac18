"""Flags made from the dataclasses of the configuration."""

import dataclasses

import pytest

from pagedjax.cli import ChatFlags, Generate, parse
from pagedjax.config import EngineConfig, with_options
from pagedjax.errors import UserError
from pagedjax.flags import comments, engine_config, parse_ids, parse_size, sampling_params
from pagedjax.host.request import SamplingParams


def parsed(*args: str) -> Generate:
    return parse(["generate", "m", *args])


def test_no_flags_are_the_defaults():
    assert engine_config(parsed().engine) == EngineConfig()
    assert sampling_params(parsed().sampling, SamplingParams()) == SamplingParams(max_tokens=256)


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ("--max-model-len 64", {"max_model_len": 64}),
        ("--max-num-seqs 2 --max-num-batched-tokens 8", {"max_num_seqs": 2, "max_num_batched_tokens": 8}),
        ("--tensor-parallel-size 2", {"tensor_parallel_size": 2}),
        ("-tp 2", {"sharding.model": 2}),
        ("--block-size 32 --dtype bfloat16 --seed 3", {"block_size": 32, "dtype": "bfloat16", "seed": 3}),
        ("--kv-cache-memory-bytes 1000", {"kv_cache_memory_bytes": 1000}),
        ("--kv-memory 1.5GiB", {"cache.kv_memory": 3 << 29}),
        ("--swap-memory 2MiB", {"cache.swap_memory": 2 << 20}),
        ("--kv-cache-dtype bfloat16", {"cache.kv_dtype": "bfloat16"}),
        ("--decode-rows 1 4 --prefill-tokens 32", {"buckets.decode_rows": (1, 4), "buckets.prefill_tokens": (32,)}),
        ("--async-steps 0 --decode-steps 4", {"schedule.async_steps": 0, "schedule.decode_steps": 4}),
        ("--max-queued 9", {"schedule.max_queued": 9}),
    ],
)
def test_engine_flags(args: str, options: dict):
    assert engine_config(parsed(*args.split()).engine) == with_options(EngineConfig(), options)


def test_sampling_flags_override_the_models_defaults():
    models = SamplingParams(temperature=0.6, top_p=0.9, top_k=20)
    given = ["--temperature", "0", "--stop", "a", "b", "--logit-bias", "5", "1.5", "6", "-2", "--ignore-eos", "--max-tokens", "7"]
    flags = parsed(*given).sampling
    wanted = dataclasses.replace(
        models, temperature=0, stop=("a", "b"), logit_bias={5: 1.5, 6: -2.0}, ignore_eos=True, max_tokens=7
    )
    assert sampling_params(flags, models) == wanted


def test_every_field_has_a_flag():
    names = {f.name for f in dataclasses.fields(SamplingParams)}
    assert {f.name for f in dataclasses.fields(parsed().sampling)} == names - {"seed", "structured_outputs"}
    assert {f.name for f in dataclasses.fields(ChatFlags)} == names - {
        "seed",
        "structured_outputs",
        "n",
        "logprobs",
        "prompt_logprobs",
    }


def test_comments_are_the_help():
    assert comments(EngineConfig)["seed"] == "Seeds of requests that bring none are drawn from it"


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("512MiB", 512 << 20), ("4 gib", 4 << 30), ("2G", 2 << 30), ("1.5kB", 1500), ("7b", 7)]
)
def test_parse_size(text: str, size: int):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1 mile", "1e9"])
def test_parse_size_refuses(text: str):
    with pytest.raises(UserError, match="a size must be a number with B, KiB, MiB, GiB, KB, MB or GB behind it"):
        parse_size(text)


def test_parse_ids():
    assert parse_ids("1, 2,3") == (1, 2, 3)
    with pytest.raises(UserError, match="token ids must be integers with commas between them; got '1,,2'"):
        parse_ids("1,,2")
