"""A trainer or an index builder of a tiny world, as one process of several.

    python -m tests.training.hosts_program pretrain WORLD MODEL_DIR CHANGES

WORLD is the folder of a world that is there, CHANGES are JSON settings of the run.
"""

import json
import pathlib
import signal
import sys
import threading

from realm_jax import hosts
from realm_jax.data.blocks import BlockStore
from realm_jax.index.builder import BuilderConfig, IndexBuilder
from realm_jax.storage import open_store
from realm_jax.training import pretrain
from realm_jax.training.partitioning import MeshConfig
from tests import tiny_world


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
    found = tiny_world.TinyWorld(f"{world}/corpus", f"{world}/questions.jsonl", None)
    config = tiny_world.pretrain_config(
        found, model_dir, questions=found.questions, **settings
    )
    seen = pathlib.Path(model_dir, f"index_of_steps-{hosts.number()}.jsonl")

    def report(step: int, total: int, values) -> None:
        with seen.open("a") as file:
            file.write(json.dumps([step, values["index_step"]]) + "\n")

    pretrain.run(config, report, stop)


if __name__ == "__main__":
    main(*sys.argv[1:])
