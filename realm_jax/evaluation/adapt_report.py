"""Reads and writes adapt.json: what `realm adapt` has measured and exported.

It carries its crc32c: another `realm adapt` of the folder repeats what it says.
"""

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from realm_jax.evaluation.comparisons import (
    AFTER_REALM,
    AFTER_WARM_START,
    BEFORE_TRAINING,
    BM25,
    ENCODER,
    QUERIES,
    SENTENCES,
    Comparison,
    fused_name,
)
from realm_jax.evaluation.provenance import time_of
from realm_jax.index.snapshots import INDEX_SERIES, SnapshotSeries
from realm_jax.manifests import require_fields, seal, unseal
from realm_jax.metrics.retrieval import Interval
from realm_jax.stages import PRETRAIN, WARM_START
from realm_jax.storage import open_store
from realm_jax.training.recorded import RecordedRun

NAME = "adapt.json"

# By these a retriever is chosen, of the first probe that was measured: it has the most
# of the first metric, which is the one that is printed, and is worse in none.
_METRICS = {
    QUERIES: ("nDCG@10", "MRR@10"),
    SENTENCES: ("recall@5",),
}
STAGES_OF = {
    BEFORE_TRAINING: WARM_START,
    AFTER_WARM_START: WARM_START,
    AFTER_REALM: PRETRAIN,
}
"""Maps what may be exported to the stage that has it, or began with it (the first)."""

_log = logging.getLogger(__name__)

_FIELDS = {"of": dict, "exported": str, "measured": dict, "cost": dict}
_GIB = 1 << 30
_EMBEDDING = "embedding"


def decide(measured: Mapping[str, Comparison]) -> str:
    """Returns the label of the retriever that is to be used.

    It has the highest mean of those that are not worse than the encoder as it was by
    the whole interval of a metric; of equal ones the latest. Where there are queries,
    they decide; where nothing could be measured, it is the encoder as it was.
    """
    for probe, metrics in _METRICS.items():
        if probe in measured:
            of = measured[probe]
            means = {
                row.label: row.metrics[metrics[0]].mean
                for row in reversed(of.rows)
                if not _is_worse(of, row.label, metrics)
            }
            return max(means, key=lambda label: means[label])
    return BEFORE_TRAINING


def _is_worse(of: Comparison, label: str, metrics: Sequence[str]) -> bool:
    changes = (of.find_change(BEFORE_TRAINING, label, metric) for metric in metrics)
    return any(change is not None and change.high < 0.0 for change in changes)


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
    if seconds := _embedding_seconds(folder):
        cost[_EMBEDDING] = {"seconds": seconds}
    return {
        "of": dict(of),
        "exported": decide(measured),
        "measured": {
            name: dataclasses.asdict(comparison)
            for name, comparison in measured.items()
        },
        "cost": cost,
    }


def _embedding_seconds(folder: str) -> float:
    """Returns how long the two indexes took that a chain waits for, pauses included.

    They are the teacher's, before the first update, and the one of REALM's last.
    """
    seconds = 0.0
    for stage, choose in ((WARM_START, min), (PRETRAIN, max)):
        series = SnapshotSeries(open_store(f"{folder}/{stage.name}"), INDEX_SERIES)
        if steps := series.steps():
            seconds += series.read_manifest(choose(steps)).build_seconds
    return seconds


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


def chosen_of(folder: str, newest: RecordedRun) -> str | None:
    """Returns the label of what was chosen of a chain; None if nothing was.

    `newest` is the last stage of the chain. What was measured of other updates or of
    another corpus does not count, and is warned of.
    """
    if newest.trained.stage != PRETRAIN.name:
        return None
    report = read_report(folder)
    if report is None:
        if open_store(folder).exists(NAME):
            _log.warning("%s/%s is damaged, and nothing is chosen by it", folder, NAME)
        return None
    of, trained = report["of"], newest.trained
    is_same = (of.get("updates"), of.get("corpus")) == (
        newest.step,
        trained.corpus_fingerprint,
    )
    if not is_same or report["exported"] not in STAGES_OF:
        _log.warning(
            "%s/%s is not of what %s has trained, and nothing is chosen by it; "
            "`realm adapt` measures anew",
            folder,
            NAME,
            newest.model_dir,
        )
        return None
    return report["exported"]


def write_report(folder: str, report: Mapping[str, Any]) -> None:
    """Writes adapt.json of a chain."""
    open_store(folder).write(NAME, seal(report, is_sorted=False))


def summary(report: Mapping[str, Any], folder: str, export: str) -> list[str]:
    """Returns three lines: what was gained, what it cost, and what was exported."""
    chosen, measured = report["exported"], report["measured"]
    gained = [_gained(name, of, chosen) for name, of in measured.items()]
    unknown = "not known, for no article that was held out has two blocks"
    what = f"the retriever {_lowered(chosen)}"
    if chosen == BEFORE_TRAINING:
        what = f"the encoder as it was, for {_why(measured)}"
    return [
        f"gained: {'; '.join(gained) or unknown}",
        f"cost: {', '.join(_costs(report['cost']))}",
        f'export: {export} is {what}; try realm search {folder} "your query"',
    ]


def _why(measured: Mapping[str, Any]) -> str:
    """Returns why the encoder is left as it was."""
    probe = next((probe for probe in _METRICS if probe in measured), None)
    if probe is None:
        return "nothing was measured"
    lost = [
        f"{difference['metric']} {_points(difference)} {_lowered(difference['after'])}"
        for difference in measured[probe]["differences"]
        if difference["metric"] in _METRICS[probe]
        and difference["interval"]["high"] < 0.0
    ]
    if not lost:
        return f"training did not improve it for the {probe}"
    return f"training made it worse: {', '.join(lost)}, of the {probe}"


def _gained(probe: str, comparison: Mapping[str, Any], chosen: str) -> str:
    metric = _METRICS[probe][0]
    rows = {
        row["label"]: Interval(**row["metrics"][metric])
        for row in (*comparison["baselines"], *comparison["rows"])
    }
    changes = [
        f"{_percent(rows[difference['after']])} {_lowered(difference['after'])} "
        f"({_points(difference)})"
        for difference in comparison["differences"]
        if difference["metric"] == metric
    ]
    before = rows[BEFORE_TRAINING]
    fused = rows[fused_name(chosen)]
    of = f" of {before.groups:,} articles" if before.groups else ""
    others = [f"BM25 {_percent(rows[BM25])}", f"fused {_percent(fused)}"]
    if ENCODER in rows:
        others.append(f"{_lowered(ENCODER)} {_percent(rows[ENCODER])}")
    return (
        f"{metric} of {before.count:,} {probe}{of} {_percent(before)}, "
        f"{', '.join(changes)}; {', '.join(others)}"
    )


def _lowered(label: str) -> str:
    """Returns a label within a sentence, such as "after REALM"."""
    return label[0].lower() + label[1:]


def _percent(value: Interval) -> str:
    return f"{100 * value.mean:.1f}"


def _points(difference: Mapping[str, Any]) -> str:
    """Returns a difference in percentage points, with its 95 % interval."""
    return Interval(**difference["interval"]).percent("+.1f")


def _costs(cost: Mapping[str, Any]) -> Iterator[str]:
    for name, title in ((WARM_START.name, "warm start"), (PRETRAIN.name, "REALM")):
        if name in cost:
            updates, seconds = cost[name]["updates"], cost[name]["seconds"]
            yield f"{title} {updates:,} updates in {seconds / 60:.1f} min"
    if _EMBEDDING in cost:
        yield f"embedding the text {cost[_EMBEDDING]['seconds'] / 60:.1f} min"
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
                f"{name} {Interval(**value).percent()}"
                for name, value in row["metrics"].items()
            ]
            count = next(iter(row["metrics"].values()))["count"]
            yield f"{count:,} {probe}", row["label"], ", ".join(figures)
        for label in dict.fromkeys(d["after"] for d in comparison["differences"]):
            gains = [
                f"{difference['metric']} {_points(difference)}"
                for difference in comparison["differences"]
                if difference["after"] == label
            ]
            yield probe, f"gained {_lowered(label)}, in points", ", ".join(gains)
