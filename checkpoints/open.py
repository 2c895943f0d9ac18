"""Opens a checkpoint of any kind."""

import re
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from checkpoints.checkpoint import Checkpoint
from checkpoints.gguf import open_gguf
from checkpoints.hf import open_hf
from checkpoints.store import CARD, open_store
from pagedjax.errors import UserError, check

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
UNWANTED = ["original/*", "consolidated*"]  # the same weights once more, in other layouts


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Opens what `source` is: a folder written by `convert` (pagedjax.json), a Hugging Face folder (config.json), a GGUF file, or
    the hub id "organisation/name" of a model. Reads headers only. UserError says what is wrong with it."""
    path = Path(source).expanduser()
    if path.is_dir():
        if (path / CARD).is_file():
            return open_store(path)
        check((path / "config.json").is_file(), f"a model folder must hold config.json or {CARD}; {path} does not")
        return open_hf(path)
    if path.is_file():
        check(path.suffix == ".gguf", f"a model file must end in .gguf; got {path}")
        return open_gguf(path)
    check(
        isinstance(source, str) and HUB_ID.fullmatch(source) is not None and path.suffix != ".gguf",
        f"a model must be a folder, a .gguf file or a hub id (organisation/name); {source} does not exist",
    )
    return open_hf(fetch(str(source)))


def fetch(hub_id: str) -> Path:
    """The folder of a model on the hub, from the local cache where it is complete there."""
    try:
        return Path(snapshot_download(hub_id, cache_dir=constants.HF_HUB_CACHE, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{hub_id} must be a local folder or a model that the hub has and lets you read; got {reason}") from error
