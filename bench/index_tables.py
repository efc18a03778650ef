"""Formats the results of `bench/index.py` as the tables of docs/benchmarks.md."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.tables import table

Spread = Mapping[str, float]


def markdown(measured: Mapping[str, Any]) -> str:
    """Returns the tables, a heading before each, in the order of their parts."""
    load = ", ".join(f"{n} {v:.1f}" for n, v in measured["load_before"].items())
    texts = [
        f"{measured['machine']}; {measured['date']}; load before each part: {load}",
        f"    {measured['command']}",
    ]
    for part, format_part in _TABLES.items():
        if part in measured:
            texts += [f"### {part}", format_part(measured[part])]
    return "\n\n".join(texts)


def _search(corpora: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(
        f"{corpus['num_blocks']:,} blocks ({corpus['source']}):\n\n{_searchers(corpus)}"
        for corpus in corpora
    )


def _searchers(corpus: Mapping[str, Any]) -> str:
    batches = next(iter(corpus["searchers"].values()))["seconds"]
    rows = []
    for name, row in corpus["searchers"].items():
        if "failed" in row:
            rows.append([name, row["failed"], *[""] * (3 + len(batches))])
            continue
        label = f"{name} ({row['setting']})" if row["setting"] else name
        rows.append(
            [
                label,
                f"{row['recall_at_8']:.3f}",
                *(_milliseconds(row["seconds"][batch]) for batch in batches),
                f"{row['memory_mib']:,.0f}",
                f"{row['device_mib']:,.0f}" if row["device_mib"] else "",
                f"{row['build_seconds']:.1f}",
            ]
        )
    heads = ["searcher", "recall@8", *(f"ms, {batch} queries" for batch in batches)]
    heads += ["MiB, process", "MiB, device arrays", "s to build"]
    return table(heads, rows)


def _embed(models: Mapping[str, Any]) -> str:
    rows = []
    for model, measured in models.items():
        bucketed, full = measured["buckets"], measured["full length"]
        speeds = [kind["blocks_per_second"] for kind in (bucketed, full)]
        rows.append(
            [
                f"{model}, {measured['document_length']} wordpieces",
                *(_number(speed) for speed in speeds),
                f"{speeds[0]['median'] / speeds[1]['median']:.2f}",
                f"{bucketed['padding_share']:.0%}",
                f"{full['padding_share']:.0%}",
            ]
        )
    heads = ["model", "blocks/s, buckets", "blocks/s, full length", "ratio"]
    return table([*heads, "padding, buckets", "padding, full length"], rows)


def _publish(measured: Mapping[str, Any]) -> str:
    step = measured["step_seconds"]["median"]
    swap, probe = measured["index_swap_seconds"], measured["measure_seconds"]
    stall = swap["median"] + probe["median"]
    first = measured["first_swap"]["measure_seconds"]
    rows = [
        ["commit to swap, s", _number(measured["commit_to_swap_seconds"])],
        ["a step, s", _number(measured["step_seconds"])],
        ["`take()` and swap, s", _number(swap)],
        ["measuring drift and kept neighbours after it, s", _number(probe)],
        ["both together, steps", f"{stall / step:.2f}"],
        ["measuring at the first swap, which compiles, s", f"{first:.1f}"],
    ]
    title = f"{measured['blocks']:,} blocks, {measured['swaps']} swaps"
    return table([title, "median (least to most)"], rows)


def _trainer(measured: Mapping[str, Any]) -> str:
    rates = measured["steps_per_second"]
    rows = [
        ["steps/s alone", _number(rates["alone"])],
        ["steps/s beside the builder", _number(rates["beside"])],
        ["ratio of steps/s", _number(measured["rate_ratio"])],
        ["ratio of median steps", _number(measured["step_ratio"])],
        ["ratio of their CPU seconds", _number(measured["cpu_ratio"])],
    ]
    return table(["", "median (least to most)"], rows)


def _size(measured: Sequence[Mapping[str, Any]]) -> str:
    least = measured[0]["step_seconds"]["median"]
    rows = [
        [
            f"{size['blocks']:,}",
            _number(size["step_seconds"]),
            f"{size['step_seconds']['median'] / least:.3f}",
        ]
        for size in measured
    ]
    return table(["blocks", "s a step, median (least to most)", "ratio"], rows)


def _milliseconds(seconds: Spread) -> str:
    return _number({name: 1000 * value for name, value in seconds.items()})


def _number(values: Spread) -> str:
    def short(value: float) -> str:
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"

    least, most = short(values["least"]), short(values["most"])
    return f"{short(values['median'])} ({least} to {most})"


_TABLES: Mapping[str, Callable[[Any], str]] = {
    "search": _search,
    "recall": lambda corpus: _search([corpus]),
    "embed": _embed,
    "publish": _publish,
    "trainer": _trainer,
    "size": _size,
}
