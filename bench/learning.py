"""Tests whether REALM learns, how reliably, and how it fails, over several seeds.

    python -m bench.learning --seeds 3 --output docs/figures/learning.json

For each seed: the warm start, REALM, and the control whose retriever is frozen; for the
first --collapse_seeds of them also the recipe that collapses (no LayerNorm on the
embeddings, a higher rate, a refresh every 50 steps, kernels that start at 0.02). Writes
one JSON file, and with --reports a report of the first seed's runs.
"""

import argparse
import dataclasses
import datetime
import shutil
import tempfile
import time

import numpy as np

from bench.command import write_figures
from bench.invented_world import (
    Recipe,
    WorldConfig,
    make_world,
    measure,
    run_pretrain,
    run_warm_start,
)
from bench.machine import machine
from realm_jax.evaluation.report import write_report
from realm_jax.evaluation.report_data import CorpusInfo, ReportData, RunInfo
from realm_jax.metrics.curves import find_curve, health, read_curves
from realm_jax.metrics.retrieval import bootstrap_interval


def recipes(seed: int, steps: int, with_collapse: bool) -> dict[str, Recipe]:
    """Returns the recipes; each starts from a warm start of its own embedding."""
    good = Recipe(seed=seed, pretrain_steps=steps)
    compared = {
        "realm": good,
        "control": dataclasses.replace(good, frozen=("retriever",), pretrain_steps=40),
    }
    if with_collapse:
        compared["collapse"] = dataclasses.replace(
            good,
            layer_norm=False,
            learning_rate=5e-4,
            refresh_period=50,
            # From 0.08 this recipe does not collapse: recall@1 went from 0.45 to 0.72.
            initializer_range=0.02,
        )
    return compared


def run_seed(
    folder: str, seed: int, steps: int, with_collapse: bool
) -> dict[str, dict[str, float]]:
    """Runs every recipe on a world of this seed; returns what each knows at the end."""
    world = make_world(folder, WorldConfig(seed=seed))
    known: dict[str, dict[str, float]] = {}
    for name, recipe in recipes(seed, steps, with_collapse).items():
        start = f"{folder}/warm_start_{'norm' if recipe.layer_norm else 'no_norm'}"
        began = time.monotonic()
        # A warm start that is already done returns at once.
        run_warm_start(world, recipe, start)
        warm = dataclasses.asdict(measure(world, recipe, start))
        run_pretrain(world, recipe, f"{folder}/{name}", start)
        known[f"{name}: before"] = warm
        known[name] = dataclasses.asdict(measure(world, recipe, f"{folder}/{name}"))
        utility = find_curve(
            read_curves([f"{folder}/{name}"]), "pretrain", "retrieval_utility"
        )
        known[name]["last_retrieval_utility"] = utility.values[-1]
        print(
            f"seed {seed} {name}: recall@1 {warm['recall_at_1']:.2f} -> "
            f"{known[name]['recall_at_1']:.2f}, utility {utility.values[-1]:+.2f}, "
            f"{time.monotonic() - began:.0f} s",
            flush=True,
        )
    return known


def summarise(by_seed: dict[int, dict[str, dict[str, float]]]) -> dict:
    """Returns means over the seeds of each recipe, with 95 % bootstrap intervals."""
    first = next(iter(by_seed.values()))

    def over_seeds(name: str, metric: str) -> dict[str, float]:
        values = [known[name][metric] for known in by_seed.values() if name in known]
        return dataclasses.asdict(bootstrap_interval(np.array(values)))

    return {
        name: {metric: over_seeds(name, metric) for metric in metrics}
        for name, metrics in first.items()
    }


def write_reports(folder: str, output: str) -> None:
    """Writes a report of each run in a folder, to show health and collapse."""
    for name in ("realm", "collapse"):
        curves = read_curves([f"{folder}/{name}"])
        run = RunInfo(
            title=f"Invented world: {name}",
            finished=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
            corpus=CorpusInfo("invented", 300, 600, "-"),
            parameters={},
            settings={},
            machine=machine(),
            versions={},
        )
        write_report(ReportData(run=run, curves=curves), f"{output}/{name}")
        print(name, [finding.text for finding in health(curves)])


def main() -> None:
    """Runs the bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=Recipe().pretrain_steps)
    parser.add_argument("--collapse_seeds", type=int, default=1)
    parser.add_argument("--output", required=True, help="JSON file to write")
    parser.add_argument("--reports", default="", help="folder for reports")
    flags = parser.parse_args()
    by_seed = {}
    for seed in range(flags.seeds):
        folder = tempfile.mkdtemp(prefix="invented-world-")
        by_seed[seed] = run_seed(folder, seed, flags.steps, seed < flags.collapse_seeds)
        result = {
            "command": f"python -m bench.learning --seeds {flags.seeds} "
            f"--steps {flags.steps} --collapse_seeds {flags.collapse_seeds}",
            "machine": machine(),
            "summary": summarise(by_seed),
            "by_seed": by_seed,
        }
        write_figures(flags.output, result)
        if seed == 0 and flags.reports:
            write_reports(folder, flags.reports)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
