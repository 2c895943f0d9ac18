"""The table of errors: what it says, that documents repeat it, and that what is ours keeps its words to itself."""

import re
from pathlib import Path
from typing import get_args

import grpc
import pytest

from pagedjax.errors import EngineStopped, QueueFull, UserError
from serving.errors import ANSWERS, Code, Refusal, refusal

DOCS = Path(__file__).parents[2] / "docs" / "serving.md"


def test_the_documents_table_is_the_codes() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (\d+) \| (?:([\d.]+) s)? \| .+ \|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    told = {code: (name, int(http), float(retry) if retry else None) for code, name, http, retry in rows}
    assert told == {code: (a.grpc, a.http, a.retry) for code, a in ANSWERS.items()}
    assert set(ANSWERS) == set(get_args(Code)) and all(a.grpc in grpc.StatusCode.__members__ for a in ANSWERS.values())


@pytest.mark.parametrize(
    ("error", "code", "said", "retry"),
    [
        (UserError("n must be positive; got 0"), "invalid_argument", "n must be positive; got 0", None),
        (QueueFull("full", 2.5), "queue_full", "full", 2.5),
        (QueueFull("full"), "queue_full", "full", 1.0),
        (EngineStopped("OSError: secret"), "engine_failed", "the engine stopped after an error", None),
        (KeyError("secret"), "internal", "an error of the server's own (KeyError); its log has more", None),
        (Refusal("draining", "no"), "draining", "no", 1.0),
    ],
)
def test_any_error_has_a_code(error: Exception, code: str, said: str, retry: float | None) -> None:
    told = refusal(error)
    assert (told.code, told.retry_after) == (code, retry) and told.message.startswith(said) and "secret" not in told.message
    assert (told.grpc, told.http) == (ANSWERS[code].grpc, ANSWERS[code].http)
