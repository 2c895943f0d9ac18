"""What all requests together came to, as gateways ask for it."""

import time
from collections import deque

from serving.events import Advanced, Ended, Event

WINDOW = 10.0  # seconds that the throughput is a mean of


class Totals:
    """An observer. Prompt tokens count when their request ends."""

    def __init__(self):
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self._seconds: deque[tuple[int, int]] = deque()  # (second, tokens in it)

    def observe(self, event: Event) -> None:
        if isinstance(event, Advanced):
            self.generated_tokens += event.tokens
            second = int(time.monotonic())
            if self._seconds and self._seconds[-1][0] == second:
                self._seconds[-1] = (second, self._seconds[-1][1] + event.tokens)
            else:
                self._seconds.append((second, event.tokens))
            self._forget(second)
        elif isinstance(event, Ended):
            self.prompt_tokens += sum(usage.prompt for usage in event.usages)
            self.cached_tokens += sum(usage.cached for usage in event.usages)

    def tokens_per_second(self) -> float:
        """Generated, on average over the last seconds; 0 after a while without any."""
        self._forget(int(time.monotonic()))
        return sum(tokens for _, tokens in self._seconds) / WINDOW

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that was in the prefix cache; 0 before there were any."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - WINDOW:
            self._seconds.popleft()
