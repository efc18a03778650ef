"""Draws the effect of REALM, from the results of two benches.

    python -m bench.overview --learning docs/figures/learning.json \\
        --real docs/figures/realm_gain.json --output docs/figures/overview.svg

Left, the invented world: recall@1 of facts that training never asks for, seed by seed,
before REALM's updates and after, beside the control whose retriever is frozen. Right,
Wikipedia text from a weak retriever: recall@5 and exact match with REALM and without.
"""

import argparse
import json
import pathlib
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

_SIZE_INCHES = (9.0, 3.2)
_REALM, _CONTROL = "#1a6fb4", "#8a8a8a"


def draw(learning: dict[str, Any], real: dict[str, Any]) -> Figure:
    """Returns both panels; `learning` and `real` are the results of the benches."""
    figure = Figure(_SIZE_INCHES, layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_world(left, learning)
    _draw_text(right, real)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    left.legend(fontsize=8, frameon=False, loc="lower right")
    right.legend(fontsize=8, frameon=False, loc="upper left", ncols=2)
    return figure


def _draw_world(axes: Axes, learning: dict[str, Any]) -> None:
    for name, colour, label in (
        ("realm", _REALM, "REALM, 360 updates"),
        ("control", _CONTROL, "control: retriever frozen, 40 updates"),
    ):
        for seed, known in enumerate(learning["by_seed"].values()):
            recalls = [
                100 * known[when]["recall_at_1"] for when in (f"{name}: before", name)
            ]
            axes.plot(
                (0, 1),
                recalls,
                color=colour,
                marker="o",
                markersize=4,
                linewidth=1.2,
                label="" if seed else label,
            )
    axes.set_xticks((0, 1), ("after the warm start", "after training"))
    axes.set_xlim(-0.25, 1.25)
    axes.set_ylim(0, 100)
    axes.set_ylabel("recall@1, %", fontsize=8)
    seeds = len(learning["by_seed"])
    axes.set_title(f"Invented facts, no labels, {seeds} seeds", fontsize=9)


def _draw_text(axes: Axes, real: dict[str, Any]) -> None:
    table = real["starts"]["weak"]["table"]
    rows = {
        "recall@5 before": "recall@5 before\nfine-tuning",
        "recall@5 after": "recall@5 after\nfine-tuning",
        "exact match": "exact match after\nfine-tuning",
    }
    for offset, (arm, colour, label) in enumerate(
        (
            ("control", _CONTROL, "control: without REALM"),
            ("realm", _REALM, "with REALM"),
        )
    ):
        values = [table[row][arm] for row in rows]
        means = [100 * value["mean"] for value in values]
        errors = [
            [100 * (value["mean"] - value["low"]) for value in values],
            [100 * (value["high"] - value["mean"]) for value in values],
        ]
        places = [place + 0.36 * offset - 0.18 for place in range(len(rows))]
        bars = axes.bar(places, means, 0.34, color=colour, label=label)
        axes.errorbar(places, means, errors, fmt="none", ecolor="0.2", capsize=3)
        axes.bar_label(bars, fmt="%.1f", label_type="center", color="white", fontsize=8)
    axes.set_xticks(range(len(rows)), list(rows.values()))
    axes.set_ylim(0, 120)  # Room for the legend.
    axes.set_yticks(range(0, 101, 20))
    axes.set_ylabel("%", fontsize=8)
    seeds = len(table["exact match"]["by_seed"])
    axes.set_title(f"Wikipedia text, a weak retriever, {seeds} seeds", fontsize=9)


def main() -> None:
    """Reads both files and writes the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learning", required=True, help="written by bench.learning")
    parser.add_argument("--real", required=True, help="written by bench.realm_gain")
    parser.add_argument("--output", required=True, help="SVG or PNG file to write")
    flags = parser.parse_args()
    learning, real = (
        json.loads(pathlib.Path(path).read_text())
        for path in (flags.learning, flags.real)
    )
    draw(learning, real).savefig(flags.output)


if __name__ == "__main__":
    main()
