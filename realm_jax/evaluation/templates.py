"""Provides the templates of this package's pages, and filters that format numbers."""

import jinja2
from markupsafe import Markup


def page_environment() -> jinja2.Environment:
    """Returns an environment with the templates and filters of this package."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("realm_jax", "evaluation"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"probability": probability, "position": _position}
    return environment


def _position(rate: float) -> str:
    """Formats a rate as a CSS length in percent."""
    return f"{100 * min(max(rate, 0.0), 1.0):.2f}%"


def probability(value: float) -> Markup:
    """Formats a probability with three decimals, or in scientific notation if small."""
    if value == 0 or value >= 0.001:
        return Markup(f"{value:.3f}")
    mantissa, exponent = f"{value:.1e}".split("e")
    return Markup(f"{mantissa} × 10<sup>−{int(exponent[1:])}</sup>")
