"""Starts a model for a command, with progress bars and one line that says what was decided."""

from collections.abc import Callable
from typing import Any

from pagedjax import terminal
from pagedjax.flags import engine_config
from pagedjax.llm import LLM


def start(model: str, flags: Any, *, say: Callable[[str], None] | None = None) -> LLM:
    """`flags` are parsed engine flags; `say` takes the lines that otherwise go to the terminal. UserError for whatever is wrong
    with the model or the flags."""
    config = engine_config(flags)
    with terminal.progress(say) as report:
        llm = LLM(model, config=config, progress=report)
    (say or terminal.note)(facts(llm))
    return llm


def facts(llm: LLM) -> str:
    """What the engine decided at start, for one line."""
    engine = llm.engine
    config, device = engine.config, engine.mesh.devices.flat[0]
    schedule, pool, groups = config.schedule, engine.scheduler.pool, engine.model.layer_groups.count
    return (
        f"{engine.model.architecture} in {config.dtype} on {engine.mesh.size} {device.platform}, context {schedule.max_model_len}, "
        f"{schedule.max_num_seqs} lanes, {schedule.max_num_batched_tokens} tokens a step, "
        f"pool of {terminal.size(engine.pool_bytes)}: {pool.capacity} blocks of {config.cache.block_size} tokens"
        + (f" of one of {groups} layer groups" if groups > 1 else "")
    )
