"""The pictures of docs/scheduling.md, from the JSON lines that bench.replay and bench.fairness printed:

    python -m bench.plots bench/results docs/img

Needs the extra `plots`. The same lines make the same bytes.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import StrMethodFormatter

Lines = dict[str, list[dict[str, Any]]]  # of each file, by its name
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#3b6fb6", "#e08a2e", "#3c9a5f", "#c4453c", "#8259a8", "#b9bdc4"
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "pagedjax",
    "svg.fonttype": "none",  # text stays text: a tenth of the size
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e8eb",
    "legend.frameon": False,
    "figure.facecolor": "white",
}
MODES = ("max", "pow2", "oracle", "paged")
POLICIES = {"first_come": BLUE, "longest_prefix": GREEN, "shortest_work": ORANGE, "priority": PURPLE, "deadline": RED}


def read(folder: Path) -> Lines:
    return {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in sorted(folder.glob("*.jsonl"))}


def legend(axis: Axes, ncols: int = 2) -> None:
    """Above the axes, where it covers nothing."""
    axis.legend(ncols=ncols, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=9)


def reserve(lines: Lines, axes: Sequence[Axes]) -> None:
    """Where the pool's slots go, and the batch, beside the paper."""
    said = {line["mode"]: line for line in lines["reserve"] if "mode" in line}
    share, batch = axes
    x, below = np.arange(len(MODES)), np.zeros(len(MODES))
    for name, color in (("tokens", BLUE), ("reserved", ORANGE), ("internal", RED), ("external", GREY)):
        heights = np.array([100 * said[mode][name] for mode in MODES])
        share.bar(x, heights, 0.6, bottom=below, color=color, label=name)
        below += heights
    share.plot(x, [100 * said[mode]["paper"][0] for mode in MODES], "D", color="black", mfc="white", label="tokens, paper")
    share.set(xticks=x, xticklabels=MODES, ylabel="% of the pool's slots", ylim=(0, 100))
    legend(share, 3)
    batch.bar(x, [said[mode]["running"] for mode in MODES], 0.6, color=BLUE, label="here")
    batch.plot(x, [said[mode]["paper"][1] for mode in MODES], "D", color="black", mfc="white", label="paper")
    batch.set(xticks=x, xticklabels=MODES, ylabel="requests that run at once")
    legend(batch)


def cache(lines: Lines, axes: Sequence[Axes]) -> None:
    """Hit rate against the size of the pool, for each policy."""
    for axis, trace in zip(axes, ("conversation", "synthetic"), strict=True):
        mine = [line for line in lines["cache"] if line["trace"] == trace]
        for policy, color in POLICIES.items():
            points = [(line["blocks"], 100 * line["hit_rate"]) for line in mine if line.get("policy") == policy]
            axis.plot(*zip(*points, strict=True), "o-", ms=4, lw=1.5, color=color, label=policy)
        (ideal,) = [100 * line["ideal"] for line in mine if "ideal" in line]
        axis.axhline(ideal, color="black", lw=1, ls="--", label="without a bound")
        axis.set(xscale="log", xlabel=f"blocks of 512 tokens in the pool, {trace} trace", ylim=(0, None))
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes[0].set_ylabel("% of the prompts' blocks found")
    handles, labels = axes[0].get_legend_handles_labels()
    plt.figlegend(handles, labels, loc="outside upper center", ncols=6, fontsize=9)


def steps_waited(axis: Axes, said: dict[str, Any], names: dict[str, str], whose: str) -> None:
    """How many of the requests waited no longer than that."""
    for (name, label), color, style in zip(names.items(), (GREEN, BLUE, RED), ("-", "--", "-"), strict=True):
        waits = np.sort(said["waits"][name])
        axis.step(waits, 100 * np.arange(1, len(waits) + 1) / len(waits), where="post", color=color, ls=style, label=label)
    axis.axvline(said["bound"], color="black", lw=1, ls=":", label=f"bound, {said['bound']:.0f} steps")
    axis.set(xscale="log", xlabel=f"steps to the first token {whose}", ylabel="% of the requests", xlim=(0.9, None), ylim=(0, 102))
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    legend(axis)


def waits(lines: Lines, axes: Sequence[Axes]) -> None:
    """Of a light tenant beside a heavy one, and of interactive requests in a flood."""
    by_name = {line["scenario"]: line for line in lines["fairness"]}
    tenants = {"alone": "alone", "tenants": "beside a heavy tenant", "first_come": "the same without tenants"}
    steps_waited(axes[0], by_name["tenants"], tenants, "of a light tenant")
    pools = {"idle": "alone", "pools": "in a flood of batch work", "one_pool": "the same in one pool"}
    steps_waited(axes[1], by_name["pools"], pools, "of interactive requests")


def overload(lines: Lines, axes: Sequence[Axes]) -> None:
    """Attainment and queue against the load, with and without admission control."""
    said = [line for line in lines["fairness"] if line["scenario"] == "overload" and "load" in line]
    for admission, color, label in ((True, BLUE, "with admission control"), (False, RED, "all are taken")):
        mine = [line for line in said if line["admission"] == admission]
        loads = [line["load"] for line in mine]
        axes[0].plot(loads, [100 * line["attained"] for line in mine], "o-", color=color, label=label)
        axes[1].plot(loads, [line["longest_queue"] for line in mine], "o-", color=color, label=label)
        if admission:
            axes[0].plot(
                loads, [100 * line["taken"] for line in mine], "s--", ms=4, color="#7d838c", label="% of all that are taken"
            )
    axes[0].axhline(90, color="black", lw=1, ls=":", label="90 %")
    axes[0].set(ylabel="% with the first token in time", ylim=(0, 104))
    axes[1].set(ylabel="longest queue, requests", yscale="symlog", ylim=(0, None))
    axes[1].yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    for axis in axes:
        axis.set_xlabel("arrivals over capacity")
        legend(axis)


PICTURES: dict[str, Callable[[Lines, Sequence[Axes]], None]] = {
    "reserve": reserve,
    "prefix-cache": cache,
    "waits": waits,
    "overload": overload,
}


def draw(lines: Lines, folder: Path, kind: str = "svg") -> list[Path]:
    """All pictures, as files of this kind."""
    matplotlib.use("agg")
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    with plt.rc_context(STYLE):
        for name, picture in PICTURES.items():
            figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
            picture(lines, axes)
            made.append(folder / f"{name}.{kind}")
            figure.savefig(made[-1], dpi=100, metadata={"Date": None} if kind == "svg" else None)
            plt.close(figure)
    return made


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.plots", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", type=Path, help="the folder of the .jsonl files")
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.add_argument("--kind", choices=["svg", "png"], default="svg")
    args = parser.parse_args(argv)
    for path in draw(read(args.lines), args.folder, args.kind):
        print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
