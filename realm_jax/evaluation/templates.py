"""What the pages of this package share: one look, and how numbers are shown."""

import jinja2
from markupsafe import Markup


def page_environment() -> jinja2.Environment:
    """Returns the templates of this folder, with the filters that all of them use."""
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
    """A rate as a length in CSS."""
    return f"{100 * min(max(rate, 0.0), 1.0):.2f}%"


def probability(value: float) -> Markup:
    """A probability with three digits, however small."""
    if value == 0 or value >= 0.001:
        return Markup(f"{value:.3f}")
    mantissa, exponent = f"{value:.1e}".split("e")
    return Markup(f"{mantissa} × 10<sup>−{int(exponent[1:])}</sup>")
