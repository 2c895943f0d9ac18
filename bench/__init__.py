"""Benchmarks. Each prints one JSON line; none is a test."""
