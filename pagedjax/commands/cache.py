"""What the persistent compilation cache holds."""

from pathlib import Path


def entries(folder: str) -> list[Path]:
    """The compiled programs in it; none where there is no such folder."""
    path = Path(folder).expanduser()
    return [file for file in path.iterdir() if file.name.endswith(("-cache", "-program"))] if path.is_dir() else []
