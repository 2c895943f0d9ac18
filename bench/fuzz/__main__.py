"""Fuzzed requests over gRPC and HTTP: python -m bench.fuzz MODEL [--requests 100000] [--seed 0] [--json FILE]

Good requests of every endpoint and method are spoiled: wrong types, numbers beyond all bounds, NaN, nesting, surrogates, fields
that nobody knows, forms that do not compile, messages that are cut off, bytes at random. They go to the real servicers over a
loopback connection and to the real app, a part of them through a socket, with the real engine behind both. Every answer must be a
status of docs/serving.md in its shape, none may blame the server, nothing may be logged as an error, and now and then, and at
the end, a normal request must be answered as ever. Request N depends on the seed and N alone:
--first N --requests 1 sends it again.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence

from bench.fuzz.drive import OPTIONS, Report, fuzz
from pagedjax import LLM
from pagedjax.config import EngineConfig

SHOWN = 20


def show(report: Report) -> None:
    for transport, counts in sorted(report.counts.items()):
        print(f"{transport}: {counts.total()}")
        for label, count in counts.most_common():
            print(f"  {count:7d}  {label}")
    found = f"the server was found to work {report.checks} times; {len(report.wrong)} wrong"
    print(f"{report.total} requests in {report.seconds:.0f} s; {found}")
    for wrong in report.wrong[:SHOWN]:
        print(f"FAIL {wrong}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first request")
    parser.add_argument("--workers", type=int, default=8, help="requests at a time")
    parser.add_argument("--json", default="", help="a file for the report, too")
    parser.add_argument("--compile-cache", default=EngineConfig().compile_cache)
    args = parser.parse_args(argv)
    with LLM(args.model, compile_cache=args.compile_cache, **OPTIONS) as llm:
        report = asyncio.run(fuzz(llm, args.requests, args.seed, workers=args.workers, first=args.first))
    show(report)
    if args.json:
        line = {"model": os.path.basename(os.path.normpath(args.model)), "date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count()}
        line |= {"seed": args.seed, "requests": report.total, "seconds": round(report.seconds, 1), "checks": report.checks}
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(line | {"counts": report.counts, "wrong": report.wrong}, file, indent=1)
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
