"""gRPC: messages to calls and replies to messages. What they mean is decided in serving/frontend.py."""
