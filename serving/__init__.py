"""The server: one Frontend over the engine, and servicers that speak gRPC and HTTP above it."""
