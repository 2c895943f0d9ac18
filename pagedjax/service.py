"""From the configuration to the scheduler: its sizes, its pool, and the rules it goes by."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pagedjax.config import EngineConfig, QueueConfig
from pagedjax.errors import UserError, check
from pagedjax.host.block_pool import BlockPool
from pagedjax.host.entrance import ServiceRules
from pagedjax.host.policy import PolicyOptions
from pagedjax.host.pools import PoolShares
from pagedjax.host.reserve import BuddyPool
from pagedjax.host.scheduler import Scheduler
from pagedjax.host.tenants import TenantLimits


def make_scheduler(
    config: EngineConfig,
    num_blocks: int,
    *,
    windows: tuple[int | None, ...] = (None,),
    host_blocks: int = 0,
    swap_seconds: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Scheduler:
    """The scheduler of a configuration without zeros, with num_blocks in the pool, the scrap one included; the rest as in
    Scheduler."""
    cache, schedule = config.cache, config.schedule
    return Scheduler(
        BlockPool(num_blocks) if cache.reserve == "paged" else BuddyPool(num_blocks),
        block_size=cache.block_size,
        max_model_len=schedule.max_model_len,
        num_lanes=schedule.max_num_seqs,
        token_budget=schedule.max_num_batched_tokens,
        max_queued=schedule.max_queued,
        decode_steps=schedule.decode_steps,
        prefix_caching=cache.prefix_caching,
        windows=windows,
        reserve=cache.reserve,
        host_blocks=host_blocks,
        preemption=schedule.preemption,
        service=service_rules(config.queue),
        swap_seconds=swap_seconds,
        debug=config.debug,
        clock=clock,
    )


def service_rules(config: QueueConfig) -> ServiceRules:
    """UserError for a file of tenants that cannot be read, or says what it may not."""
    tenants = read_tenants(config.tenants) if config.tenants else {}
    return ServiceRules(
        policy=config.policy,
        options=PolicyOptions(aging=config.aging),
        shares=PoolShares(batch=config.batch_share),
        tenants={name: limits for name, limits in tenants.items() if name != "*"},
        other_tenants=tenants.get("*", TenantLimits()),
        max_queued_tokens=config.max_queued_tokens or None,
        max_first_token=config.max_first_token or None,
        token_seconds=config.token_seconds or None,
    )


def read_tenants(file: str) -> dict[str, TenantLimits]:
    """{tenant: limits} of a JSON object of objects; "*" stands for all that are not named."""
    path = Path(file).expanduser()
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UserError(f"tenants must be a file of JSON; got {file}: {reason}") from error
    check(
        isinstance(value, dict) and all(isinstance(limits, dict) for limits in value.values()),
        f"tenants must be an object that has an object for each tenant; got {value!r:.80} in {file}",
    )
    fields = TenantLimits.__dataclass_fields__
    for name, limits in value.items():
        unknown = sorted(set(limits) - set(fields))
        check(not unknown, f"tenant {name!r} may have {', '.join(fields)}; got {', '.join(unknown)} in {file}")
        wrong = [key for key, given in limits.items() if isinstance(given, bool) or not isinstance(given, int | float)]
        check(not wrong, f"tenant {name!r} must have numbers; got {wrong} in {file}")
        whole = [key for key, given in limits.items() if key != "weight" and given != int(given)]
        check(not whole, f"tenant {name!r} must have whole numbers beside its weight; got {whole} in {file}")
    return {
        name: TenantLimits(**{key: given if key == "weight" else int(given) for key, given in limits.items()})
        for name, limits in value.items()
    }
