"""How often a value fell where: what a metric needs to know of many of them."""

from bisect import bisect_left


class Histogram:
    """Counts of values by the first edge that is not below them; the last count is of those above all edges."""

    def __init__(self, edges: tuple[float, ...]):
        """`edges`: ascending."""
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.total = 0.0  # the values added up

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.edges, value)] += times
        self.total += value * times
