"""Formats numbers, renders this package's pages, and writes them beside their JSON."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import jinja2
from markupsafe import Markup, escape

from realm_jax.answering.answers import Characters
from realm_jax.manifests import seal
from realm_jax.metrics.curves import made_at
from realm_jax.metrics.retrieval import Interval
from realm_jax.stages import title_of
from realm_jax.storage import open_store


def percent(rate: float) -> str:
    """Formats a rate as a percentage with one decimal, with two if it is that small."""
    return f"{100 * rate:.{2 if 0.0 < abs(rate) < 0.0005 else 1}f}%"


def points(difference: float) -> str:
    """Formats a difference of rates in percentage points, with its sign."""
    return _signed(f"{100 * difference:+.1f}")


def nats(difference: float) -> str:
    """Formats a difference of log-probabilities, with its sign."""
    return _signed(f"{difference:+.2f}")


def _signed(text: str) -> str:
    return text.replace("-", "−") if float(text) else text[1:]


def span(interval: Interval, unit: Callable[[float], str] = percent) -> str:
    """Formats the ends of an interval."""
    return f"{unit(interval.low)} to {unit(interval.high)}"


def duration(seconds: float) -> str:
    """Formats a duration in seconds in its one or two largest units."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def probability(value: float) -> Markup:
    """Formats a probability with three decimals, or in scientific notation if small."""
    if value == 0 or value >= 0.001:
        return Markup(f"{value:.3f}")
    mantissa, exponent = f"{value:.1e}".split("e")
    return Markup(f"{mantissa} × 10<sup>−{int(exponent[1:])}</sup>")


def marked(text: str, places: Sequence[Characters]) -> Markup:
    """Escapes a text and highlights some places of it, which are in order."""
    pieces, end = [], 0
    for start, stop in places:
        if start < end:
            continue  # Occurrences of an answer can overlap.
        pieces.append(escape(text[end:start]))
        pieces.append(Markup("<mark>{}</mark>").format(text[start:stop]))
        end = stop
    return Markup("").join([*pieces, escape(text[end:])])


def capital(text: str) -> str:
    """Returns a text with its first letter in upper case, and the rest as it is."""
    return text[:1].upper() + text[1:]


def number(count: float | None, spec: str = ",") -> str:
    """Formats a number, and one that was not measured as a dash."""
    return "–" if count is None else format(count, spec)


def _position(rate: float) -> str:
    """Formats a rate as a CSS length in percent."""
    return f"{100 * min(max(rate, 0.0), 1.0):.2f}%"


def page_template(name: str) -> jinja2.Template:
    """Returns a template of this package, with the filters that all of them share."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("realm_jax", "evaluation"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    common = (percent, probability, duration, marked, capital, number, span)
    environment.filters |= {function.__name__: function for function in common}
    environment.filters |= {"position": _position, "stage": title_of}
    environment.globals |= {"points": points, "nats": nats, "made_at": made_at}
    return environment.get_template(name)


def as_json(content: Any) -> str:
    """Returns sealed JSON of an object; numbers that are not finite become null."""
    plain = json.loads(json.dumps(content), parse_constant=lambda _: None)
    return seal(plain, is_sorted=False).decode()


def write_page(directory: str, name: str, *, page: str, content: str) -> None:
    """Writes a page and its JSON as `name`, each atomically."""
    store = open_store(directory)
    store.write(f"{name}.json", content.encode())
    store.write(f"{name}.html", page.encode())
