"""`bert.BertConfig.remat = "auto"`: a word of gin files alone.

It leaves to the planner what the backward pass computes again. The planner writes its
choice as a gin file; a command that makes models refuses to go on without one.
"""

from realm_jax.cli import configuration
from realm_jax.errors import BadInputError

SETTING = "bert.BertConfig.remat"
_AUTO = "auto"


def is_undecided() -> bool:
    """Returns whether gin leaves it to the planner."""
    # Later, for commands that only show their help.
    from realm_jax.models.bert import BertConfig

    return configuration.bindings(BertConfig, resolve=True).get("remat") == _AUTO


def require_decided() -> None:
    """Checks that a model can be made of what gin holds.

    Raises:
      BadInputError: gin leaves a setting to the planner.
    """
    if is_undecided():
        raise BadInputError(
            f'expected a decision for remat="{_AUTO}", got none; have one made by '
            "`python -m tpu_launch plan ... --write=plan.gin` and add "
            f"--gin_file=plan.gin, or set {SETTING} to none, dots or full"
        )
