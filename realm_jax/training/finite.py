"""Keeps numbers that are not finite out of checkpoints and published retrievers.

A NaN in one gradient is in every parameter after that update. Reading the gradient norm
of each update on the host would keep the devices waiting for it, so norms are kept on
the devices and read where training waits anyway: when a line of metrics is written, and
before a checkpoint or a publication.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from realm_jax.errors import BadInputError
from realm_jax.metrics.means import Means
from realm_jax.training.step import SKIPPED_UPDATES

_WATCHED = ("loss", "gradient_norm", SKIPPED_UPDATES)


class FiniteUpdates:
    """Requires that updates are finite, and names the first that was not.

    All processes of a job decide alike: what they read is replicated over the devices.
    At most `max_skipped` updates may be skipped (`make_step`); `num_skipped` counts
    those that have been read, and those before the run was resumed.
    """

    def __init__(self, max_skipped: int = 0, num_skipped: int = 0):
        self._max_skipped = max_skipped
        self.num_skipped = num_skipped
        self._unread: list[tuple[int, Means]] = []

    def note(self, step: int, metrics: Means) -> None:
        """Keeps what `require_updates` reads, without waiting for it."""
        watched = {name: metrics[name] for name in _WATCHED if name in metrics}
        self._unread.append((step, watched))

    def require_updates(self) -> None:
        """Waits for the updates since the last call, and requires finite ones."""
        unread, self._unread = jax.device_get(self._unread), []
        for update, means in unread:
            values = {name: float(mean.total) for name, mean in means.items()}
            if values.pop(SKIPPED_UPDATES, 0.0):
                self.num_skipped += 1
                if self.num_skipped > self._max_skipped:
                    raise BadInputError(
                        f"expected at most {self._max_skipped} updates that are not "
                        "finite (SKIP_NONFINITE_UPDATES), got number "
                        f"{self.num_skipped} at update {update}; lower LEARNING_RATE, "
                        "or raise that bound, and run the same command again"
                    )
            bad = {k: v for k, v in values.items() if not math.isfinite(v)}
            if bad:
                found = " and ".join(f"a {k} of {v}" for k, v in bad.items())
                raise BadInputError(
                    f"expected finite losses and gradients, got {found} at update "
                    f"{update}; nothing from it on was kept: lower LEARNING_RATE, or "
                    "let such updates pass without effect (SKIP_NONFINITE_UPDATES=1 "
                    "for one), and run the command again to go on from the last "
                    "checkpoint"
                )

    def require(self, step: int, tree: PyTree) -> None:
        """Requires that all updates and a tree are finite; names what is not."""
        self.require_updates()
        name = _not_finite(tree)
        if name is not None:
            raise BadInputError(
                f"expected finite numbers after {step} updates, got NaN or infinity in "
                f"{name}; lower LEARNING_RATE, or, if the run began so, use another "
                f"WARM_START or delete checkpoints/{step}.json in MODEL_DIR to go on "
                "from the checkpoint before, and run the command again"
            )


def _not_finite(tree: PyTree) -> str | None:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    flags = jax.device_get(_are_finite([array for _, array in flat]))
    bad = (path for (path, _), flag in zip(flat, flags, strict=True) if not flag)
    names = (jax.tree_util.keystr(path, simple=True, separator="/") for path in bad)
    return next(names, None)


@jax.jit
def _are_finite(arrays: PyTree) -> Any:
    return [jnp.isfinite(array).all() for array in arrays]
