"""Models of the Hugging Face hub."""

from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from pagedjax.errors import UserError

WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
UNWANTED = ["original/*", "consolidated*"]  # the same weights once more, in other layouts


def fetch(hub_id: str) -> Path:
    """The folder of a model on the hub, from the local cache where it is complete there."""
    try:
        return Path(snapshot_download(hub_id, cache_dir=constants.HF_HUB_CACHE, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{hub_id} must be a local folder or a model that the hub has and lets you read; got {reason}") from error
