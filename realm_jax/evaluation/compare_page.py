"""Writes the comparison of two runs as an HTML page and as JSON."""

import dataclasses
import json

from realm_jax.evaluation.compare import RunComparison
from realm_jax.evaluation.findings import percent, points
from realm_jax.evaluation.templates import page_environment
from realm_jax.stages import title_of
from realm_jax.storage import open_store

HTML_NAME = "compare.html"
JSON_NAME = "compare.json"
_NUM_SHOWN = 20


def write_comparison(comparison: RunComparison, directory: str) -> None:
    """Writes `compare.html` and `compare.json`, each atomically.

    Args:
      comparison: the two runs.
      directory: a local folder or gs://.

    Raises:
      BadInputError: the directory cannot be written.
    """
    page, content = render_comparison(comparison), comparison_json(comparison)
    store = open_store(directory)
    store.write(JSON_NAME, content.encode())
    store.write(HTML_NAME, page.encode())


def comparison_json(comparison: RunComparison) -> str:
    """Returns the comparison as JSON: the fields of `RunComparison`."""
    content = {"format_version": 1, **dataclasses.asdict(comparison)}
    return json.dumps(content, ensure_ascii=False, indent=1, allow_nan=False)


def render_comparison(comparison: RunComparison) -> str:
    """Returns the comparison as a self-contained page."""
    environment = page_environment()
    environment.filters |= {"percent": percent, "stage": title_of}
    environment.globals |= {"points": points}
    return environment.get_template("compare.html.jinja").render(
        comparison=comparison, num_shown=_NUM_SHOWN
    )


def summary_lines(comparison: RunComparison) -> list[str]:
    """Returns a line for each metric: both means and the paired difference."""
    return [
        f"{figure.label}, {figure.metric}: {percent(figure.first.mean)} and "
        f"{percent(figure.second.mean)}, {points(figure.difference.mean)} points (95% "
        f"interval {points(figure.difference.low)} to {points(figure.difference.high)})"
        for figure in comparison.figures
    ]
