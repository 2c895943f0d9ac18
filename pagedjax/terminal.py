"""What people see on stderr: progress bars, tables and short facts. stdout is for text and JSON alone."""

import contextlib
import io
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

Report = Callable[[str, int, int], None]  # what is being done, done so far, of how many


def console() -> Console:
    """On stderr as it is now, without rich's guesses of what a word means."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def note(text: str) -> None:
    """One line of facts on stderr, dim where stderr is a terminal."""
    console().print(text, style="dim", markup=False)


def show(*parts: RenderableType) -> None:
    """Tables and lines to stdout. Through print, so that a closed pipe is the caller's to handle: rich would exit by itself."""
    drawn = io.StringIO()
    page = Console(file=drawn, force_terminal=sys.stdout.isatty(), width=Console().width, highlight=False, soft_wrap=True)
    for part in parts:
        page.print(part)
    print(drawn.getvalue(), end="", flush=True)


def size(count: float) -> str:
    """Bytes for people: "512 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if count >= 10 or unit == "B" else f"{count:.1f} {unit}"


@contextlib.contextmanager
def progress(say: Callable[[str], None] | None = None) -> Iterator[Report]:
    """A function for the `progress` of LLM: a bar for each kind of work while it goes on, then one line with its time.

    "load" counts bytes; "compile 4x4" belongs to "compile". Without a terminal there are only the lines, and they go to `say` where
    it is given.
    """
    starts: dict[str, float] = {}
    tasks: dict[str, TaskID] = {}
    columns = (TextColumn("{task.description:<8}"), BarColumn(30), TextColumn("{task.fields[detail]}"), TimeElapsedColumn())
    with Progress(*columns, console=console(), transient=True, disable=say is not None or not sys.stderr.isatty()) as bars:
        tell = say or (lambda line: bars.console.print(line, style="dim"))

        def report(what: str, done: int, total: int) -> None:
            kind, _, part = what.partition(" ")
            if kind not in starts:
                starts[kind] = time.perf_counter()
                tasks[kind] = bars.add_task(kind, total=total, detail="")
            amount = f"{size(done)} of {size(total)}" if kind == "load" else f"{done} of {total} {part}"
            bars.update(tasks[kind], completed=done, total=total, detail=amount)
            if done >= total:
                bars.remove_task(tasks[kind])
                what_was = size(total) if kind == "load" else f"{total} programs"
                tell(f"{kind:<8} {what_was} in {time.perf_counter() - starts.pop(kind):.1f} s")

        yield report
