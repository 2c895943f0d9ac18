"""Eight chat prompts answered at once from one paged cache, with what it took.

python -m examples.demo .models/SmolLM2-135M-Instruct.Q4_1.gguf
"""

import argparse
import asyncio
import contextlib
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pagedjax import LLM, SamplingParams, UserError, terminal
from pagedjax.host.request import Usage
from pagedjax.stream import Stream

QUESTIONS = (
    "What is the capital of France? Answer in one sentence.",
    "Why is the sky blue?",
    "Write a haiku about autumn leaves.",
    "Name three fruits that are yellow.",
    "Explain what a Python list comprehension is, with one example.",
    "What is 12 plus 30?",
    "Give me a short packing list for a day at the beach.",
    "Translate into Spanish: Good morning, my friend.",
)
# Few shapes, so that the first start is short; eight lanes are what eight prompts need.
OPTIONS = {
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "buckets.decode_rows": (4, 8),
    "buckets.prefill_tokens": (256,),
}
console = Console(highlight=False)


@dataclass
class Answer:
    """One question and what has come of its answer."""

    question: str
    stream: Stream
    text: str = ""
    tokens: int = 0
    usage: Usage | None = None


@dataclass
class Watch:
    """What is read from the engine's counters whenever something comes."""

    llm: LLM
    wasted: list[float] = field(default_factory=list)  # share of the held slots that hold no token

    def look(self) -> None:
        stats = self.llm.engine.scheduler.stats
        if stats.slots_held:
            self.wasted.append(stats.waste / stats.slots_held)


def accepted(result: Stream | Exception) -> Stream:
    """The stream of a request that the engine took; the error of one that it refused is raised."""
    if isinstance(result, Exception):
        raise result
    return result


async def read(answer: Answer, watch: Watch) -> None:
    async for delta in answer.stream:
        answer.text += delta.text
        answer.tokens += len(delta.tokens)
        answer.usage = delta.usage or answer.usage
        watch.look()
    if not console.is_terminal:
        console.print(f"Q: {answer.question}\nA: {answer.text.strip()}\n", markup=False, soft_wrap=True)


async def read_all(answers: Sequence[Answer], watch: Watch) -> None:
    await asyncio.gather(*(read(answer, watch) for answer in answers))


@dataclass(frozen=True)
class Board:
    """All answers as far as they are: drawn anew ten times a second."""

    answers: Sequence[Answer]

    def __rich__(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(width=2, justify="right", style="cyan")
        table.add_column(ratio=1)
        for i, answer in enumerate(self.answers, 1):
            table.add_row("✓" if answer.usage else str(i), Group(self.line(answer.question, "bold"), self.tail(answer)))
        return table

    def line(self, text: str, style: str) -> Text:
        return Text(text, style=style, no_wrap=True, overflow="ellipsis")

    def tail(self, answer: Answer) -> Text:
        """The end of the answer in one line."""
        room = max(20, console.width - 20)
        flat = " ".join(answer.text.split())
        shown = flat if len(flat) <= room else "…" + flat[-room + 1 :]
        return self.line(f"{shown}  [{answer.tokens} tokens]", "green" if answer.usage else "")


@contextlib.contextmanager
def shown(answers: Sequence[Answer]) -> Iterator[None]:
    """Draws the board while answers come; afterwards they stand there in full. Without a terminal `read` prints them."""
    if not console.is_terminal:
        yield
        return
    with Live(Board(answers), console=console, refresh_per_second=10, transient=True, vertical_overflow="crop"):
        yield
    for answer in answers:
        console.print(answer.question, style="bold", markup=False)
        console.print(answer.text.strip(), "", markup=False)


def figures(llm: LLM, answers: Sequence[Answer], watch: Watch, seconds: float) -> Table:
    engine, stats = llm.engine, llm.engine.scheduler.stats
    waits = [a.stream.first_token - a.stream.submitted for a in answers if a.stream.first_token is not None]
    tokens = sum(a.tokens for a in answers)
    size, pool, padding = engine.config.cache.block_size, engine.scheduler.pool, engine.padding
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    table = Table(title=f"{len(answers)} answers, {tokens} tokens in {seconds:.1f} s", title_justify="left", show_header=False)
    table.add_column(style="dim")
    for name, value in (
        ("tokens per second", f"{tokens / seconds:.1f}"),
        ("time to first token", f"{sum(waits) / len(waits):.2f} s mean, {max(waits):.2f} s longest"),
        ("blocks used", f"{stats.peak_blocks} of {pool.capacity} at most, {size} tokens each"),
        ("block waste", f"{sum(watch.wasted) / len(watch.wasted):.1%} of held slots; at most {stats.worst_waste} in one sequence"),
        ("padding", f"{padding.padding / max(1, padding.computed + padding.padding):.1%} of computed tokens"),
        ("load time", f"{engine.load_seconds:.1f} s"),
        ("compile time", f"{engine.compile_seconds:.1f} s for {len(engine.executables)} shapes"),
        ("compilations after start", str(engine.compilations_after_start)),
        ("peak memory", terminal.size(peak)),
    ):
        table.add_row(name, value)
    return table


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Answer eight chat prompts at once.")
    parser.add_argument("model", help="a model that can chat: a folder, a hub id or a GGUF file")
    parser.add_argument("--max-tokens", type=int, default=96, help="of each answer")
    given = parser.parse_args(args)
    try:
        with terminal.progress() as report:
            llm = LLM(given.model, progress=report, **OPTIONS)
        with llm:
            params = SamplingParams(max_tokens=given.max_tokens, temperature=0)
            requests = [llm.request(llm.chat_prompt([{"role": "user", "content": text}]), params) for text in QUESTIONS]
            begin = time.perf_counter()
            results = llm.loop.submit_all(requests)
            answers = [Answer(text, accepted(result)) for text, result in zip(QUESTIONS, results, strict=True)]
            watch = Watch(llm)
            with shown(answers):
                asyncio.run(read_all(answers, watch))
            console.print(figures(llm, answers, watch, time.perf_counter() - begin))
    except UserError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
