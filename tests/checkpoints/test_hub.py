"""Hub ids, without a network: the local cache is used, and what cannot be had is one sentence."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from checkpoints import open_checkpoint
from pagedjax.errors import UserError

STORIES = Path(__file__).parents[1] / "golden" / "stories260K"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_a_model_in_the_cache_is_opened(cache):
    folder = cache / "models--someone--stories"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (snapshot / name).symlink_to(STORIES / name)
    checkpoint = open_checkpoint("someone/stories")
    assert checkpoint.source == snapshot and checkpoint.config.num_layers == 5


def test_a_model_that_cannot_be_had_is_one_sentence(cache):
    with pytest.raises(
        UserError, match="someone/absent must be a local folder or a model that the hub has and lets you read; got .*"
    ) as caught:
        open_checkpoint("someone/absent")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["nothing", "a/b/c", "../x", "-a/b", "", "folder/absent.gguf"])
def test_what_is_no_id_is_not_asked_for(name, cache):
    with pytest.raises(UserError, match="a model .*"):
        open_checkpoint(name)
