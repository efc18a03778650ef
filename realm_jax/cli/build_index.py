"""Follows the newest retriever of a run and publishes an index for each refresh.

Runs beside `realm pretrain` with REFRESH_MODE="async", on the same MODEL_DIR, and ends
once the trainer has finished. If the trainer fails, or is silent for ten minutes, this
ends with exit code 75: start both again. If killed, it resumes and repeats at most one
shard.

Example:
  realm build-index --gin_file=gin/runs/build_index.gin \\
    --gin.MODEL_DIR=runs/my/pretrain --gin.CORPUS=runs/my/corpus
"""

import dataclasses
import logging
import threading
from collections.abc import Sequence

from gin import operative_config_str

from realm_jax import multihost, ranges
from realm_jax.cli import configuration, model_dir
from realm_jax.cli.main import STOPPED
from realm_jax.cli.progress import StageProgress
from realm_jax.run_record import Attempt


@dataclasses.dataclass(frozen=True)
class BuildIndexConfig:
    """The run to follow.

    Attributes:
      model_dir: folder or gs:// of the run.
      corpus: the prepared corpus.
      verify_files: whether every byte of it is read once at the start, and compared
        with its checksum.
    """

    model_dir: str
    corpus: str
    verify_files: bool = True

    def __post_init__(self):
        ranges.require_ranges(self, model_dir=ranges.PATH, corpus=ranges.PATH)


def main(argv: Sequence[str], stop: threading.Event) -> int | None:
    """Runs the command."""
    parser = configuration.make_parser("realm build-index", __doc__)
    configuration.parse(parser, argv, "build-index")
    from realm_jax.data.blocks import BlockStore
    from realm_jax.index.builder import BuilderConfig, IndexBuilder
    from realm_jax.storage import open_store

    logging.getLogger("realm_jax").setLevel(logging.INFO)
    multihost.join(configuration.configured_if_bound(multihost.HostsConfig), stop)
    config = configuration.configured(BuildIndexConfig)
    building = configuration.configured(BuilderConfig)
    model_dir.require_writable_folder("MODEL_DIR", config.model_dir)
    store = open_store(config.model_dir)
    with StageProgress("build-index", stop) as progress:
        others = {"builder": building}
        attempt = Attempt(
            "build-index",
            config,
            argv,
            gin=operative_config_str,
            others=others,
            note=progress.note,
        )
        progress.before_first(attempt.begin)
        corpus = multihost.run_on_all(
            lambda: BlockStore.open(config.corpus, verify=config.verify_files)
        )
        has_finished = IndexBuilder(store, corpus, building, progress).run(stop)
    return None if has_finished or stop.is_set() else STOPPED
