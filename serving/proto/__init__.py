"""The protocol pagedjax.v1, and the Python code that protoc makes of it (make protos)."""
