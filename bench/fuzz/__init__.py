"""Requests that are wrong in every way: `python -m bench.fuzz MODEL` (docs/serving.md)."""
