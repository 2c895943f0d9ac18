"""The picture of what bench/kernels.py measured: python -m bench.kernel_plot REPORT.json PICTURE.svg. Needs the extra `plots`."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot as plt

from bench.plots import STYLE


def draw(report: dict[str, Any], path: Path) -> None:
    """For each case the share of the measured read bandwidth that each implementation reaches, as bars; SVG or PNG by the name."""
    matplotlib.use("agg")
    rows = [row for row in report["rows"] if row["gb_s"] is not None]
    cases = list(dict.fromkeys((row["op"], row["case"]) for row in rows))
    names = list(dict.fromkeys(row["by"] for row in rows))
    height = 0.8 / max(1, len(names))
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(9, 1 + 0.55 * len(cases)), layout="constrained")
        for number, name in enumerate(names):
            mine = {(row["op"], row["case"]): 100 * row["gb_s"] / report["device"]["read"] for row in rows if row["by"] == name}
            places = [i + (number - (len(names) - 1) / 2) * height for i, case in enumerate(cases) if case in mine]
            axis.barh(places, [mine[case] for case in cases if case in mine], height, label=name)
        axis.set_yticks(range(len(cases)), [f"{op}\n{case}" for op, case in cases], fontsize=7)
        axis.invert_yaxis()
        axis.set_xlabel(f"% of the read bandwidth measured on {report['device']['name']}, {report['device']['read']:.0f} GB/s")
        axis.legend(fontsize=8)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
