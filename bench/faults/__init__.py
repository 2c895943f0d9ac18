"""A server under too much load, with clients that misbehave: `python -m bench.faults MODEL` (docs/serving.md)."""
