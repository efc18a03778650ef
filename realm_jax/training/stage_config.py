"""The configuration shared by all training stages, and the shapes that follow from it.

Each stage has a function `update_shapes` beside its `run`, made of the parts that `run`
is made of. It describes the inputs of an update before there is a corpus; the planner
traces and compiles what it returns.
"""

import dataclasses
import enum
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax
from jax.sharding import Mesh, NamedSharding

from realm_jax import axes, ranges
from realm_jax.data.batch_order import Spans
from realm_jax.data.features import FeatureSpecs
from realm_jax.errors import BadInputError
from realm_jax.index.device_search import EmbeddingTable
from realm_jax.index.embed import EmbedConfig
from realm_jax.index.searchers import DeviceConfig
from realm_jax.stages import StageSpec
from realm_jax.storage import absolute_url
from realm_jax.training.checkpoint_manifests import Which
from realm_jax.training.initialization import ModelFactory, Reader
from realm_jax.training.optimizers import OptimizerConfig
from realm_jax.training.partitioning import MeshConfig
from realm_jax.training.projection import Projection
from realm_jax.training.refresh import RefreshMode
from realm_jax.training.step import Loss
from realm_jax.weights.tensors import weights_file

SOME_PIECES = (101, 102)
"""Ids of [CLS] and [SEP] in place of those of a vocabulary that is not known; no shape
depends on them."""

_DTYPES = ("int32", "float32", "bool")


@dataclasses.dataclass(frozen=True)
class IndexUse:
    """A stage's index: where it is searched, and how often it is rebuilt.

    Attributes:
      refresh: how the index follows the retriever; None for an index that is built once
        and searched to the end.
      is_in_step: whether the update itself searches, on the devices.
    """

    searcher: str
    embed: EmbedConfig
    blocking_rebuilds: float = 1.0
    refresh: RefreshMode | None = None
    device: DeviceConfig = dataclasses.field(default_factory=DeviceConfig)
    is_in_step: bool = False

    @property
    def has_builder(self) -> bool:
        """True if another job embeds the corpus."""
        return self.refresh is RefreshMode.ASYNC

    @property
    def is_replaced(self) -> bool:
        """True if a new index is loaded while the old one is searched."""
        return self.refresh in (RefreshMode.ASYNC, RefreshMode.BLOCKING)


@dataclasses.dataclass(frozen=True)
class StageConfig:
    """Base configuration of a training stage.

    Attributes:
      model_dir: folder or gs:// of this run; an unfinished run there is resumed.
      corpus: the prepared corpus (`realm prepare`).
      task: name of the SeqIO task whose examples are trained on.
      train_steps: total number of updates; fewer than are done are refused.
      batch_size: examples per update, over all devices.
      microbatches: parts of a batch that are computed one after the other, so that a
        larger batch fits; the gradient stays that of the whole batch.
      models: sizes and lengths of the models.
      optimizer: makes the update rule's configuration from `total_steps`.
      warm_start: source of the initial parameters: the model directory of an earlier
        stage, a folder of published weights (docs/weights.md), or "" for random ones;
        see `warm_start_params`.
      projection: initialization of the retriever's projection if the source of its
        weights has none, "random", "pca" or "lda"; see `projection.py`.
      warm_start_checkpoint: which checkpoint of an earlier stage: "last", or "best" by
        held-out utility.
      retriever_warm_start: source of the retriever instead, or "".
      reader_warm_start: source of the reader instead, or "".
      seed: seed of initialization, the order of examples, and dropout.
      mesh: how devices are arranged.
      checkpoint_period: steps between checkpoints; one more follows the last step.
      log_period: steps between two lines of metrics.
      profile: whether to profile ten steps; see `profiling.py`.
      spans: which masked spans an epoch visits: "one_per_sentence" (the paper),
        "all" or "together" (`batch_order.Spans`); examples other than masked sentences
        are all visited.
      pack_documents: whether two documents, or two queries, may share a row of a
        model's input, where they leave rows half empty; see `packed_updates.py`.
      skip_nonfinite_updates: number of updates of a run that may be skipped because
        their loss or gradient is not finite; one more ends it. See `finite.py`.
      stall_seconds: shortest time without an update after which the run ends itself, in
        seconds; None for never. See `watchdog.py`.
      verify_files: whether every byte of corpus and examples is read once at the start,
        and compared with its checksum.
    """

    model_dir: str
    corpus: str
    task: str
    train_steps: int
    batch_size: int
    models: ModelFactory
    optimizer: Callable[..., OptimizerConfig] = OptimizerConfig
    warm_start: str = ""
    projection: str = Projection.RANDOM.value
    warm_start_checkpoint: str = "last"
    retriever_warm_start: str = ""
    reader_warm_start: str = ""
    seed: int = 0
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    checkpoint_period: int = 1000
    microbatches: int = 1
    log_period: int = 100
    profile: bool = False
    spans: str = Spans.ONE_PER_SENTENCE.value
    pack_documents: bool = False
    skip_nonfinite_updates: int = 0
    stall_seconds: float | None = 600.0
    verify_files: bool = True

    stage: ClassVar[StageSpec]
    """The stage that this configures."""

    starts_from_nothing: ClassVar[bool] = False
    """True if the stage ordinarily starts from random parameters."""

    def __post_init__(self):
        ranges.require_ranges(
            self,
            model_dir=ranges.PATH,
            corpus=ranges.PATH,
            train_steps=ranges.whole(0),
            batch_size=ranges.whole(1),
            seed=ranges.SEED,
            checkpoint_period=ranges.whole(1),
            microbatches=ranges.whole(1),
            log_period=ranges.whole(1),
            skip_nonfinite_updates=ranges.whole(0),
            stall_seconds=ranges.POSITIVE.or_none(),
        )
        require_one_of("spans", self.spans, Spans)
        require_one_of("projection", self.projection, Projection)
        require_one_of("CHECKPOINT", self.warm_start_checkpoint, Which)
        # So that its settings are checked before a corpus is read.
        self.optimizer(total_steps=self.train_steps)

    @property
    def examples_per_update(self) -> int:
        """Number of examples by which speed is measured."""
        return self.batch_size

    @property
    def batch_sizes(self) -> Mapping[str, int]:
        """Examples of an update, by the macro that sets their number."""
        return {"BATCH_SIZE": self.batch_size}

    def require_divisible(self, shards: int) -> None:
        """Requires that batches split evenly over microbatches and parts of a mesh."""
        for name, size in self.batch_sizes.items():
            if size % (shards * self.microbatches):
                raise BadInputError(
                    f"expected {name} that {shards} (data x fsdp of the mesh) times "
                    f"{self.microbatches} (MICROBATCHES) divides, got {size}; change "
                    "one of them"
                )

    @property
    def tasks(self) -> Sequence[str]:
        """Names of the tasks whose examples are read."""
        return [self.task] if self.task else []

    @property
    def index_use(self) -> IndexUse | None:
        """The stage's use of an index; None if it uses none."""
        return None

    def one_microbatch(self) -> Self:
        """Returns a configuration whose batch is one microbatch of this one."""
        size = self.batch_size // self.microbatches
        return dataclasses.replace(self, batch_size=size, microbatches=1)

    @property
    def donors(self) -> Sequence[str]:
        """Model directories that may have an index of the initial retriever."""
        source = self.retriever_source
        # Published weights have none.
        return (source,) if source and weights_file(source) is None else ()

    @property
    def retriever_source(self) -> str:
        """Source of the retriever's initial parameters."""
        return self.retriever_warm_start or self.warm_start

    def data_order(self) -> dict[str, Any]:
        """Returns the settings that fix each update's examples, for resumed runs."""
        return {
            "task": self.task,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "spans": self.spans,
        }

    def recorded(self) -> dict[str, Any]:
        """Returns what the record has for those who open the model."""
        source = self.retriever_source
        return {
            "corpus": absolute_url(self.corpus),
            "source": absolute_url(source) if source else "",
            "source_checkpoint": self.warm_start_checkpoint,
        }


def require_one_of(name: str, value: str, choices: Iterable[enum.Enum | str]) -> None:
    """Requires that a setting is among some texts, or the values of an enumeration."""
    values = [
        choice.value if isinstance(choice, enum.Enum) else choice for choice in choices
    ]
    if value not in values:
        raise BadInputError(
            f"expected {name} to be one of {', '.join(values)}, got {value!r}"
        )


class UpdateShapes(NamedTuple):
    """What the update of a stage is compiled for, where documents are not packed.

    Inputs, over all processes, and the index in the state, if any, are shapes.
    """

    reader: Reader
    loss: Loss
    frozen: tuple[str, ...]
    inputs: Any
    index: EmbeddingTable | None = None


def batch_of(kind: Any, specs: FeatureSpecs, batch_size: int, mesh: Mesh) -> Any:
    """Returns a batch of a type, of examples over all devices, as shapes."""
    return kind(
        **{
            name: rows_of_batch((batch_size, *spec.shape), spec.dtype, mesh)
            for name, spec in specs.items()
        }
    )


def shapes_of(kind: Any, sizes: Mapping[str, int], mesh: Mesh, **given: Any) -> Any:
    """Returns inputs as shapes, by the annotations and defaults of their dataclass."""
    annotations = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if field.name in given or field.default is not dataclasses.MISSING:
            continue
        # Each is the union of an array of JAX and one of NumPy.
        annotation, _ = typing.get_args(annotations[field.name])
        shape = tuple(sizes[name] for name in annotation.dim_str.split())
        dtype = next(dtype for dtype in _DTYPES if dtype in annotation.dtypes)
        given[field.name] = rows_of_batch(shape, dtype, mesh)
    return kind(**given)


def rows_of_batch(
    shape: tuple[int, ...], dtype: Any, mesh: Mesh
) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array whose first axis is that of the batch."""
    place = NamedSharding(mesh, axes.partition_spec("batch"))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)
