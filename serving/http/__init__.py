"""OpenAI's HTTP API, and the pages beside it, over one Frontend."""
