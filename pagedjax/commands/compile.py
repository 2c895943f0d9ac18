"""`pagedjax compile`: fills the persistent compilation cache and lists what each shape costs."""

from typing import Any

from rich.table import Table

from pagedjax import terminal
from pagedjax.commands.cache import entries
from pagedjax.commands.start import start
from pagedjax.errors import check


def run(command: Any) -> None:
    """`command` is cli.Compile. The table goes to stdout."""
    folder = command.engine.compile_cache
    check(folder != "", 'compile_cache must name a folder, or nothing would be kept; got ""')
    before = {path.name for path in entries(folder)}
    with start(command.model, command.engine) as llm:
        table = Table("bucket", "tokens", "rows", "seconds", "temporaries", "written in place")
        for bucket, compiled in sorted(llm.engine.executables.items()):
            sizes = terminal.size(compiled.temp_bytes), terminal.size(compiled.alias_bytes)
            kind = "decode" if bucket.is_decode else "mixed"
            table.add_row(kind, str(bucket.tokens), str(bucket.rows), f"{compiled.seconds:.2f}", *sizes)
        for column in table.columns[1:]:
            column.justify = "right"
        terminal.show(table)
        pool, blocks = llm.engine.pool_bytes, llm.engine.scheduler.pool.capacity
        terminal.show(f"pool: {pool} bytes ({terminal.size(pool)}), {blocks} blocks beside the scrap block")
        now = entries(folder)
        new = sum(path.name not in before for path in now)
        total = terminal.size(sum(path.stat().st_size for path in now))
        terminal.note(
            f"all programs in {llm.engine.compile_seconds:.1f} s; {folder} holds {len(now)} entries, {new} of them new, {total}"
        )
