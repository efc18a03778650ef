"""A trainer or an index builder of a tiny world, as one process of several.

    python -m tests.training.hosts_program pretrain|finetune|build-index \
        WORLD MODEL_DIR CHANGES

WORLD is the folder of a world that is there, CHANGES are JSON settings of the run;
`bad` are updates whose gradient is NaN; after the update `hangs_after` the last process
waits for its batch for ever.
"""

import contextlib
import json
import pathlib
import signal
import sys
import threading
import types
from typing import Any
from unittest import mock

import jax

from realm_jax import multihost
from realm_jax.data.blocks import BlockStore
from realm_jax.index.builder import BuilderConfig, IndexBuilder
from realm_jax.index.device_search import row_sharding
from realm_jax.storage import open_store
from realm_jax.training import finetune, initialization, partitioning, pretrain
from realm_jax.training.optimizers import OptimizerConfig
from realm_jax.training.partitioning import MeshConfig
from realm_jax.training.stage import Stage
from realm_jax.training.state import state_shardings
from tests import tiny_world


def arguments(world, model_dir, what="pretrain", **changes) -> list[str]:
    """What `groups.started` takes to start this program."""
    folder = str(pathlib.Path(world.corpus).parent)
    program = "tests.training.hosts_program"
    return [program, what, folder, str(model_dir), json.dumps(changes)]


def smooth(total_steps: int) -> OptimizerConfig:
    """Updates as continuous as their gradients.

    Adam makes a whole step of a gradient that is nothing but rounding, which differs
    with the order of additions; this epsilon is above those.
    """
    return OptimizerConfig(1e-2, 0, 100, final_fraction=1.0, epsilon=0.1)


def check_places(stage: Stage) -> None:
    """Every array lies where the axis table says, and no axis of the mesh is idle."""
    _, params_axes = initialization.initial_params(
        stage.retriever, stage.reader, tiny_world.LENGTHS, seed=0
    )
    by_axes = partitioning.parameter_shardings(stage.mesh, params_axes)
    state = stage.state.replace(index=None)
    expected = state_shardings(state, by_axes, stage.mesh)
    used = set()

    def check(array, sharding) -> None:
        assert array.sharding.is_equivalent_to(sharding, array.ndim), sharding
        used.update(jax.tree.leaves(tuple(sharding.spec)))

    jax.tree.map(check, state, expected)
    if stage.state.index is not None:
        check(stage.state.index.rows, row_sharding(stage.mesh))
    split = {axis for axis in ("fsdp", "model") if stage.mesh.shape[axis] > 1}
    assert split <= used, (split, used)


def main(what: str, world: str, model_dir: str, changes: str) -> None:
    multihost.join(multihost.HostsConfig(heartbeat_seconds=20))
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    settings = json.loads(changes)
    if what == "build-index":
        config = BuilderConfig(embed=tiny_world.EMBED, keep=99, poll_seconds=0.05)
        blocks = BlockStore.open(f"{world}/corpus")
        IndexBuilder(open_store(model_dir), blocks, config).run(stop)
        return
    bad = settings.pop("bad", [])
    hangs_after = settings.pop("hangs_after", None)
    settings["mesh"] = MeshConfig(**settings.get("mesh", {}))
    settings |= {"questions": f"{world}/questions.jsonl", "optimizer": smooth}
    # Training needs the files alone.
    found: Any = types.SimpleNamespace(corpus=f"{world}/corpus")
    if what == "finetune":
        config = tiny_world.finetune_config(found, model_dir, **settings)
        finetune.run(config, tiny_world.silent, stop)
        return
    config = tiny_world.pretrain_config(found, model_dir, **settings)
    seen = pathlib.Path(model_dir, f"index_of_steps-{multihost.number()}.jsonl")

    def report(step: int, total: int, values, what: str = "") -> None:
        if what:
            return
        with seen.open("a") as file:
            file.write(json.dumps([step, values["index_step"]]) + "\n")

    close = Stage.close

    def check_and_close(stage: Stage) -> None:
        check_places(stage)
        close(stage)

    batch = Stage.batch

    def hanging(stage: Stage, examples: Any, step: int, *others: Any) -> Any:
        if step == hangs_after and multihost.number() == multihost.count() - 1:
            threading.Event().wait()
        return batch(stage, examples, step, *others)

    poison = tiny_world.poisoned(*bad) if bad else contextlib.nullcontext()
    with poison, mock.patch.multiple(Stage, close=check_and_close, batch=hanging):
        pretrain.run(config, report, stop)


if __name__ == "__main__":
    main(*sys.argv[1:])
