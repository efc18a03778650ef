"""Draws the metrics that a chain's stages logged, for docs/results.md.

python -m bench.curves runs/quickstart --output docs/figures/quickstart.svg
"""

import argparse
import pathlib

from matplotlib.figure import Figure

from realm_jax.metrics.curves import Curve, find_curve, measured, read_curves

# Stage, metrics, and the label of the vertical axis.
PANELS = (
    (
        "warm_start",
        ("reader_loss_own", "reader_loss_null", "reader_loss_retrieved"),
        "warm start: reader's loss,\nnats a wordpiece",
    ),
    (
        "pretrain",
        ("retrieval_utility", "held_out_utility"),
        "REALM: retrieval utility,\nnats",
    ),
    ("finetune", ("reader_loss",), "fine-tuning: reader's loss,\nnats a question"),
)
_SIZE_INCHES = (10.0, 3.0)


def draw(curves: tuple[Curve, ...]) -> Figure:
    """Returns a figure with one panel per stage; values are not smoothed."""
    figure = Figure(_SIZE_INCHES, layout="constrained")
    for axes, (stage, metrics, title) in zip(
        figure.subplots(1, len(PANELS)), PANELS, strict=True
    ):
        for metric in metrics:
            curve = measured(find_curve(curves, stage, metric))
            if curve.steps:
                mark = "o" if len(curve.steps) < 5 else ""
                axes.plot(
                    curve.steps, curve.values, label=metric, marker=mark, linewidth=1.2
                )
        axes.set_ylabel(title, fontsize=8)
        axes.set_xlabel("updates", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.legend(fontsize=7, frameon=False)
        axes.axhline(0.0, color="0.7", linewidth=0.8)
    return figure


def main() -> None:
    """Reads the folders of a chain and writes the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", help="folder of the chain, such as runs/quickstart")
    parser.add_argument("--output", required=True, help="SVG or PNG file to write")
    flags = parser.parse_args()
    stages = (stage for stage, *_ in PANELS)
    curves = read_curves([f"{flags.root}/{stage}" for stage in stages])
    pathlib.Path(flags.output).parent.mkdir(parents=True, exist_ok=True)
    draw(curves).savefig(flags.output)


if __name__ == "__main__":
    main()
