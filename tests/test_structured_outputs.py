"""Outputs of a given form from the real engine: masks reach the step, and nothing else changes."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagedjax import LLM, SamplingParams, StructuredOutputsParams, UserError

MODEL = Path(__file__).parent / "golden" / "stories260K"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Tim", "Lily"]}, "age": {"type": "integer", "minimum": 3, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
COLOURS = ("red", "green", "blue")
TAG = {
    "type": "sequence",
    "elements": [
        {"type": "tag", "begin": "<", "content": {"type": "regex", "pattern": "[a-z]{1,5}"}, "end": ">"},
        {"type": "or", "elements": [{"type": "const_string", "value": colour} for colour in ("red", "blue")]},
        {"type": "any_text"},
        {"type": "const_string", "value": "!"},
    ],
}


def engine(**options) -> LLM:
    return LLM(MODEL, max_model_len=128, max_num_seqs=8, max_num_batched_tokens=64, block_size=16, **options)


@pytest.fixture(scope="module")
def llm(compile_cache: str) -> Iterator[LLM]:
    with engine(compile_cache=compile_cache) as llm:
        yield llm


def params(temperature: float = 0.0, max_tokens: int = 60, n: int = 1, seed: int | None = 7, **form) -> SamplingParams:
    form = {"structured_outputs": StructuredOutputsParams(**form)} if form else {}
    return SamplingParams(temperature=temperature, max_tokens=max_tokens, n=n, seed=seed, **form)


def test_outputs_have_the_form(llm: LLM):
    """Nine requests at once, some of them free: each has its own form, and the free ones say what they say alone."""
    prompt = "Once upon a time, there was a little"
    wanted = [
        params(choice=COLOURS),
        params(temperature=1.0, regex=r"[0-9]{3}-[a-f]{2}"),
        params(),
        params(temperature=1.0, json=SCHEMA),
        params(json=SCHEMA),
        params(temperature=1.0),
        params(temperature=1.0, grammar='start: "a" ("b" | start) "d"', max_tokens=100),
        params(temperature=1.5, json_object=True, max_tokens=12),
        params(temperature=1.0, structural_tag={"format": TAG}),
    ]
    outputs = [o.outputs[0] for o in llm.generate([prompt] * len(wanted), wanted)]
    texts = [output.text for output in outputs]
    assert texts[0] in COLOURS and re.fullmatch(r"[0-9]{3}-[a-f]{2}", texts[1])
    for text in texts[3:5]:
        value = json.loads(text)
        assert value["name"] in ("Tim", "Lily") and 3 <= value["age"] <= 9
    assert re.fullmatch("a+bd+", texts[6]) and texts[6].count("a") == texts[6].count("d")
    assert texts[7].lstrip().startswith("{")
    assert re.fullmatch("<[a-z]{1,5}>(red|blue)[^!]*!?", texts[8], re.DOTALL)
    assert [o.finish_reason for o in outputs[:2]] == ["stop"] * 2
    for i in (2, 5):
        alone = llm.generate([prompt], [wanted[i]])[0].outputs[0]
        assert texts[i] == alone.text and not alone.text.startswith("{")


def test_each_sample_follows_its_own_text(llm: LLM):
    (output,) = llm.generate(["I like"], [params(temperature=2.0, n=8, choice=COLOURS)])
    texts = [o.text for o in output.outputs]
    assert set(texts) <= set(COLOURS) and len(set(texts)) > 1


def test_the_same_tokens_however_steps_are_made(llm: LLM, compile_cache: str):
    wanted = [params(temperature=1.0, seed=i, json=SCHEMA) for i in range(6)] + [params(temperature=1.0, seed=9)]
    prompts = [f"{i} days ago" for i in range(len(wanted))]
    expected = [o.outputs[0].token_ids for o in llm.generate(prompts, wanted)]
    with engine(**{"schedule.decode_steps": 8}, compile_cache=compile_cache) as other:
        assert [o.outputs[0].token_ids for o in other.generate(prompts, wanted)] == expected
    shape = llm.engine.state.kv.shape
    block_bytes = 4 * shape[0] * math.prod(shape[2:])
    with engine(
        **{"cache.kv_memory": 15 * block_bytes, "schedule.async_steps": 0}, debug=True, compile_cache=compile_cache
    ) as other:
        assert [o.outputs[0].token_ids for o in other.generate(prompts, wanted)] == expected
        assert other.engine.scheduler.stats.preemptions > 0


def test_the_form_is_over_before_max_tokens_or_is_cut(llm: LLM):
    done, cut = llm.generate(["a", "a"], [params(regex="[0-9]{5}"), params(regex="[0-9]{50}", max_tokens=5)])
    assert done.outputs[0].finish_reason == "stop" and done.outputs[0].stop_reason is None
    assert cut.outputs[0].finish_reason == "length" and len(cut.outputs[0].token_ids) == 5


def test_a_mask_that_leaves_nothing_ends_the_sequence(llm: LLM):
    """The digits may be written, what follows them may not."""
    assert llm.tokenizer is not None
    digits = tuple(t for t in range(512) if (llm.tokenizer.token_bytes(t) or b"x").isdigit())
    limited = SamplingParams(
        temperature=0, max_tokens=20, allowed_token_ids=digits, structured_outputs=StructuredOutputsParams(regex="[0-9]{3}[a-z]")
    )
    (output,) = llm.generate(["a"], [limited])
    assert output.outputs[0].finish_reason == "constraint" and re.fullmatch("[0-9]{3}", output.outputs[0].text)
    # min_tokens forbids the only token that is left, the end: nothing can be sampled
    late = SamplingParams(
        temperature=0, max_tokens=20, min_tokens=10, structured_outputs=StructuredOutputsParams(regex="[0-9]{3}(  )?")
    )
    (output,) = llm.generate(["a"], [late])
    assert output.outputs[0].finish_reason in ("constraint", "stop") and re.fullmatch("[0-9]{3}(  )?", output.outputs[0].text)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: StructuredOutputsParams(), "structured_outputs must have exactly one of json, .*; got none"),
        (lambda: StructuredOutputsParams(regex="a", json_object=True), "exactly one of .*; got regex, json_object"),
        (lambda: StructuredOutputsParams(choice=()), r"structured_outputs.choice must hold texts that are not empty; got \(\)"),
        (lambda: StructuredOutputsParams(choice="red"), "structured_outputs.choice must be a list of texts; got 'red'"),
        (lambda: StructuredOutputsParams(regex="a\ud800"), "structured_outputs.regex must be valid Unicode; got "),
        (
            lambda: StructuredOutputsParams(choice=("a", "\ud800")),
            "structured_outputs.choice must hold texts of valid Unicode; got ",
        ),
        (lambda: StructuredOutputsParams(regex=3), "structured_outputs.regex must be a string; got 3"),  # type: ignore[arg-type]
        (lambda: StructuredOutputsParams(json=[1]), "structured_outputs.json must be a JSON schema"),  # type: ignore[arg-type]
        (lambda: SamplingParams(structured_outputs="x"), "structured_outputs must be a StructuredOutputsParams; got str"),  # type: ignore[arg-type]
        (
            lambda: SamplingParams(beam_width=2, structured_outputs=StructuredOutputsParams(regex="a")),
            "beam search .* cannot honour structured_outputs=",
        ),
    ],
)
def test_what_is_refused(make, match: str):
    with pytest.raises(UserError, match=match):
        make()


def test_what_the_model_cannot_do_is_refused(llm: LLM):
    with pytest.raises(UserError, match="structured_outputs.regex must be one that compiles"):
        llm.generate(["a"], [params(regex="([")])
    with pytest.raises(UserError, match="structured_outputs must not go with ignore_eos"):
        llm.generate(["a"], [SamplingParams(ignore_eos=True, structured_outputs=StructuredOutputsParams(regex="a"))])
