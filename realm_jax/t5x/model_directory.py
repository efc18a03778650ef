"""Makes a model directory of what T5X has trained."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jaxtyping import PyTree

from realm_jax.errors import BadInputError
from realm_jax.run_record import newest_record
from realm_jax.stages import TRAINING
from realm_jax.storage import open_store
from realm_jax.training.checkpoints import Checkpointer, host_template
from realm_jax.training.recorded import TRAINED
from realm_jax.training.state import TrainState


def make_model_directory(model_dir: str) -> int:
    """Makes a directory that T5X has trained in one that `realm` opens.

    The parameters of T5X's newest checkpoint are written as a checkpoint of ours, whose
    step is returned. Later stages, `realm evaluate`, `ask`, `search` and `export` then
    take the directory, MODEL_DIR of `t5x.train`. It has no state of the optimizer: to
    train further, use T5X.
    """
    store = open_store(model_dir)
    record = newest_record(store, TRAINING)
    steps = [
        int(path.name.removeprefix("checkpoint_"))
        for path in epath.Path(model_dir).glob("checkpoint_*")
        if path.name.removeprefix("checkpoint_").isdecimal()
    ]
    if record is None or record.trained is None or not steps:
        raise BadInputError(
            f"expected a checkpoint of T5X and the record of its run in {model_dir}, "
            "found none; train with a gin file of gin/t5x first"
        )
    step = max(steps)
    state = TrainState(
        step=jnp.int32(step),
        params=_read_params(epath.Path(model_dir) / f"checkpoint_{step}"),
        optimizer_state={},
        key=jax.random.key_data(jax.random.key(record.seed or 0)),
    )
    checkpointer = Checkpointer(store)
    details = {"train_steps": step, TRAINED: dataclasses.asdict(record.trained)}
    checkpointer.save(state, details)
    checkpointer.close()
    return step


def _read_params(checkpoint: epath.Path) -> PyTree:
    """Returns the parameters in a checkpoint of T5X, on the host."""
    place = checkpoint / "state"
    handler = ocp.PyTreeCheckpointHandler()
    saved = handler.metadata(place)
    template = {"target": host_template(getattr(saved, "tree", saved)["target"])}
    read = ocp.args.PyTreeRestore(
        item=template,
        restore_args=jax.tree.map(
            lambda _: ocp.RestoreArgs(restore_type=np.ndarray), template
        ),
        partial_restore=True,
    )
    with ocp.Checkpointer(handler) as orbax:
        return orbax.restore(place, read)["target"]
