"""Reads and writes adapt.json: what `realm adapt` has measured and exported.

It carries its crc32c: another `realm adapt` of the folder repeats what it says.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from realm_jax.evaluation import adaptation
from realm_jax.evaluation.comparisons import BM25, Comparison
from realm_jax.evaluation.provenance import time_of
from realm_jax.manifests import require_fields, seal, unseal
from realm_jax.metrics.retrieval import Interval
from realm_jax.stages import PRETRAIN, WARM_START, StageSpec
from realm_jax.storage import open_store

NAME = "adapt.json"

# What REALM must not make worse: of the first probe that was measured. The first metric
# of a probe is the one that is printed.
_METRICS = {
    adaptation.QUERIES: ("nDCG@10", "MRR@10"),
    adaptation.SENTENCES: ("recall@5",),
}
_FIELDS = {"of": dict, "exported": str, "measured": dict, "cost": dict}
_GIB = 1 << 30


def decide(measured: Mapping[str, Comparison]) -> StageSpec:
    """Returns the stage whose retriever is to be used.

    That of REALM, unless it has made the encoder worse by the whole interval of a
    metric, or nothing could be measured. Where there are queries, they decide.
    """
    for probe, metrics in _METRICS.items():
        if probe in measured:
            for metric in metrics:
                gain = measured[probe].find_change(
                    adaptation.BEFORE, adaptation.AFTER, metric
                )
                assert gain is not None
                if gain.high < 0.0:
                    return WARM_START
            return PRETRAIN
    return WARM_START


def make_report(
    measured: Mapping[str, Comparison], folder: str, of: Mapping[str, Any], **cost: Any
) -> dict[str, Any]:
    """Returns the content of adapt.json.

    `measured` is what `adaptation.measure` returns, `of` what the report depends on:
    where it differs another is made. `cost` are the `seconds` of measuring, and the
    `bytes` of the largest process.
    """
    for stage in (WARM_START, PRETRAIN):
        if time := time_of(f"{folder}/{stage.name}", stage.name):
            cost[stage.name] = {"updates": time.steps, "seconds": time.seconds}
    return {
        "of": dict(of),
        "exported": decide(measured).name,
        "measured": {
            name: dataclasses.asdict(comparison)
            for name, comparison in measured.items()
        },
        "cost": cost,
    }


def read_report(folder: str) -> dict[str, Any] | None:
    """Returns the adapt.json of a chain; None if there is none, or it is damaged."""
    store = open_store(folder)
    if not store.exists(NAME):
        return None
    try:
        report = unseal(store.read(NAME), required=False)
        require_fields(report, _FIELDS)
    except ValueError:
        return None
    return report


def write_report(folder: str, report: Mapping[str, Any]) -> None:
    """Writes adapt.json of a chain."""
    open_store(folder).write(NAME, seal(report, is_sorted=False))


def summary(report: Mapping[str, Any], folder: str, export: str) -> list[str]:
    """Returns three lines: what was gained, what it cost, and what was exported."""
    gained = [_gained(*entry) for entry in report["measured"].items()]
    kept = report["exported"] == PRETRAIN.name
    what = "the retriever after REALM" if kept else "the encoder as it was"
    why = ""
    if not kept:
        why = f", for {_losses(report['measured']) or 'nothing was measured'}"
    run = folder if kept else f"{folder}/{WARM_START.name}"
    unknown = "not known, for no article that was held out has two blocks"
    return [
        f"gained: {'; '.join(gained) or unknown}",
        f"cost: {', '.join(_costs(report['cost']))}",
        f'export: {export} is {what}{why}; try realm search {run} "your query"',
    ]


def _gained(probe: str, comparison: Mapping[str, Any]) -> str:
    metric = _METRICS[probe][0]
    rows = {
        row["label"]: Interval(**row["metrics"][metric])
        for row in (*comparison["baselines"], *comparison["rows"])
    }
    gain = _change(comparison, metric)
    before, after, bm25 = (
        f"{100 * rows[label].mean:.1f}"
        for label in (adaptation.BEFORE, adaptation.AFTER, BM25)
    )
    # Version 0.1 has not measured it.
    fused = rows.get(adaptation.FUSED)
    beside = f", both fused {100 * fused.mean:.1f}" if fused else ""
    return (
        f"{metric} of {gain.count:,} {probe} {before} -> {after} "
        f"({_points(gain)}; BM25 {bm25}{beside})"
    )


def _losses(measured: Mapping[str, Any]) -> str:
    """Returns what decided that REALM made the encoder worse, "" if nothing did."""
    probe = next((probe for probe in _METRICS if probe in measured), None)
    if probe is None:
        return ""
    lost = [
        f"{metric} {_points(change)}"
        for metric in _METRICS[probe]
        if (change := _change(measured[probe], metric)).high < 0.0
    ]
    return f"REALM made it worse: {', '.join(lost)} of the {probe}"


def _change(comparison: Mapping[str, Any], metric: str) -> Interval:
    [change] = [
        Interval(**difference["interval"])
        for difference in comparison["differences"]
        if difference["metric"] == metric
    ]
    return change


def _points(gain: Interval) -> str:
    """Returns a difference in percentage points, with its 95 % interval."""
    mean, low, high = (100 * value for value in (gain.mean, gain.low, gain.high))
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def _costs(cost: Mapping[str, Any]) -> Iterator[str]:
    for name, title in ((WARM_START.name, "warm start"), (PRETRAIN.name, "REALM")):
        if name in cost:
            updates, seconds = cost[name]["updates"], cost[name]["seconds"]
            yield f"{title} {updates:,} updates in {seconds / 60:.1f} min"
    yield f"measuring {cost['seconds'] / 60:.1f} min"
    yield f"{cost['bytes'] / _GIB:.1f} GiB in the largest process"


def table_rows(folder: str, fingerprint: str) -> Iterator[tuple[str, str, str]]:
    """Yields the rows of a model card: of which texts, which retriever, the figures.

    There are none for a chain that `realm adapt` has not made, or of another corpus.
    """
    report = read_report(folder)
    if report is None or report["of"].get("corpus") != fingerprint:
        return
    for probe, comparison in report["measured"].items():
        for row in (*comparison["baselines"], *comparison["rows"]):
            figures = [
                f"{metric} {100 * value['mean']:.1f} "
                f"[{100 * value['low']:.1f}, {100 * value['high']:.1f}]"
                for metric, value in row["metrics"].items()
            ]
            count = next(iter(row["metrics"].values()))["count"]
            yield f"{count:,} {probe}", row["label"], ", ".join(figures)
        gains = [
            f"{difference['metric']} {_points(Interval(**difference['interval']))}"
            for difference in comparison["differences"]
        ]
        yield probe, "gained by REALM, in points", ", ".join(gains)
