"""Handles `bert.BertConfig.remat = "auto"`, a value that only gin files may have.

It lets the planner choose what the backward pass recomputes. The planner writes its
choice as a gin file; a command that makes models requires one.
"""

from realm_jax.cli import configuration
from realm_jax.errors import BadInputError

SETTING = "bert.BertConfig.remat"
_AUTO = "auto"


def is_undecided() -> bool:
    """Returns whether gin leaves the choice to the planner."""
    # Imported here, for commands that only show their help.
    from realm_jax.models.bert import BertConfig

    return configuration.bindings(BertConfig, resolve=True).get("remat") == _AUTO


def require_decided() -> None:
    """Requires that gin does not leave the choice to the planner."""
    if is_undecided():
        raise BadInputError(
            f'expected a decision for remat="{_AUTO}", got none; have one made by '
            "`python -m tpu_launch plan ... --write=plan.gin` and add "
            f"--gin_file=plan.gin, or set {SETTING} to none, attention, dots or full"
        )
