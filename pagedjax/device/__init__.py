"""Device side: pure functions of arrays."""
