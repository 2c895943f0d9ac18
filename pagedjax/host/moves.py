"""What a plan in the making asks of the device beside its rows: blocks to be copied, and moved to host memory and back."""

from dataclasses import dataclass, field

from pagedjax.host.plan import Copy, Swap


@dataclass
class Moves:
    """In the order in which they were asked for."""

    copies: list[Copy] = field(default_factory=list)
    swap_out: list[Swap] = field(default_factory=list)
    swap_in: list[Swap] = field(default_factory=list)
    lent: list[int] = field(default_factory=list)  # places that swap_in reads, which must not be given out before it has
    fresh: list[int] | None = None  # blocks that were given out, where somebody wants to know

    def forget(self, blocks: set[int]) -> None:
        """Nobody holds these blocks any more: what was to be copied to them is not. Others may get them in the same plan, and their
        contents from host memory, which comes before copies."""
        self.copies = [copy for copy in self.copies if copy.target not in blocks]
