"""Materialises SeqIO tasks on disk, so that training runs without TensorFlow."""

import os

from realm_jax.data.examples import Examples
from realm_jax.errors import BadInputError
from realm_jax.prepare.examples import metadata, write
from realm_jax.prepare.seqio_tasks import RegisteredTask


def materialise(
    task_or_mixture: str,
    split: str,
    directory: str | os.PathLike[str],
    *,
    use_cached: bool = False,
    seed: int = 0,
) -> Examples:
    """Writes one epoch of a task or mixture, in the order of its source.

    The metadata of the examples hold task, split and provenance.

    Args:
      task_or_mixture: a name registered with SeqIO; its features have fixed shapes.
      directory: must be absent or empty; see `data.examples`.
      use_cached: read the output of SeqIO's caching tool.
    """
    task = RegisteredTask(task_or_mixture, seed=seed, use_cached=use_cached)
    if split not in task.splits:
        raise BadInputError(
            f"expected a split of {task_or_mixture} ({', '.join(task.splits)}), "
            f"got {split!r}; name one of these."
        )
    made = task.batches(split, 0, 1)
    return write(task, directory, made, metadata(task, split, seed))
