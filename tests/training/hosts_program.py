"""A trainer or an index builder of a tiny world, as one process of several.

    python -m tests.training.hosts_program pretrain WORLD MODEL_DIR CHANGES

WORLD is the folder of a world that is there, CHANGES are JSON settings of the run.
"""

import json
import pathlib
import signal
import sys
import threading
import types
from typing import Any

from realm_jax import hosts
from realm_jax.data.blocks import BlockStore
from realm_jax.index.builder import BuilderConfig, IndexBuilder
from realm_jax.storage import open_store
from realm_jax.training import pretrain
from realm_jax.training.optimizers import OptimizerConfig
from realm_jax.training.partitioning import MeshConfig
from tests import tiny_world


def smooth(total_steps: int) -> OptimizerConfig:
    """Updates as continuous as their gradients.

    Adam makes a whole step of a gradient that is nothing but rounding, which differs
    with the order of additions; this epsilon is above those.
    """
    return OptimizerConfig(1e-2, 0, 100, final_fraction=1.0, epsilon=0.1)


def main(what: str, world: str, model_dir: str, changes: str) -> None:
    hosts.join(hosts.HostsConfig(heartbeat_seconds=20))
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    settings = json.loads(changes)
    if what == "build-index":
        config = BuilderConfig(embed=tiny_world.EMBED, keep=99, poll_seconds=0.05)
        blocks = BlockStore.open(f"{world}/corpus")
        IndexBuilder(open_store(model_dir), blocks, config).run(stop)
        return
    settings["mesh"] = MeshConfig(**settings.get("mesh", {}))
    # Training needs the files alone.
    found: Any = types.SimpleNamespace(
        corpus=f"{world}/corpus", questions=f"{world}/questions.jsonl"
    )
    config = tiny_world.pretrain_config(
        found,
        model_dir,
        questions=found.questions,
        optimizer=smooth,
        **settings,
    )
    seen = pathlib.Path(model_dir, f"index_of_steps-{hosts.number()}.jsonl")

    def report(step: int, total: int, values) -> None:
        with seen.open("a") as file:
            file.write(json.dumps([step, values["index_step"]]) + "\n")

    pretrain.run(config, report, stop)


if __name__ == "__main__":
    main(*sys.argv[1:])
