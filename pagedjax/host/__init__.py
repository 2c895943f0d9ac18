"""Host side: requests, blocks, schedule. Plain Python and NumPy; never imports jax."""
