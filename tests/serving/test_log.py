"""What of the libraries' words comes into the server's log, and as what."""

import contextlib
import io
import json
import logging

from serving.log import GRPC, setup


def test_a_client_that_went_away_is_no_error() -> None:
    """gRPC's own words about a stream that was reset while the answer was sent; other errors of its keep level and traceback."""
    root, lines = logging.getLogger(), io.StringIO()
    handlers = list(root.handlers)
    try:
        with contextlib.redirect_stderr(lines):
            setup("json")
            for words in (
                "ExecuteBatchError raised in core by servicer method [%s]",
                "Unexpected [X] raised by servicer method [%s]",
            ):
                try:
                    raise RuntimeError("why")
                except RuntimeError:
                    GRPC.exception(words, "/pagedjax.v1.Inference/Generate")
        gone, other = [json.loads(line) for line in lines.getvalue().splitlines()]
    finally:
        root.handlers[:] = handlers
        logging.captureWarnings(False)
    assert gone["level"] == "info" and "exception" not in gone
    assert gone["message"] == "a client went away while it was answered by [/pagedjax.v1.Inference/Generate]"
    assert other["level"] == "error" and "RuntimeError: why" in other["exception"]
