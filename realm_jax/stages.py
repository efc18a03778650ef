"""Defines the commands of `realm` in one table.

Command line, launcher, planner, metrics and report read the table. It imports none of
the modules it names: a command's modules are loaded when the command is run.
"""

import dataclasses
import importlib
from typing import Any


@dataclasses.dataclass(frozen=True)
class StageSpec:
    """A command of `realm`.

    Attributes:
      command: name on the command line, such as "warm-start".
      purpose: its line in `realm --help`.
      config: path of the dataclass that gin binds, "" for a command without one.
      title: title in the report, "" if it does not appear there.
      trains: whether it updates parameters, so that it can be launched on slices.
      other_configs: paths of further dataclasses that gin binds.
      others_are_passed_on: whether it is given the settings of another command too, as
        the index builder is given its trainer's.
    """

    command: str
    purpose: str
    config: str = ""
    title: str = ""
    trains: bool = False
    other_configs: tuple[str, ...] = ()
    others_are_passed_on: bool = False

    @property
    def name(self) -> str:
        """Name in metrics, checkpoints and file names, such as "warm_start"."""
        return self.command.replace("-", "_")

    @property
    def module(self) -> str:
        """Name of the module that has `main` of the command."""
        return f"realm_jax.cli.{self.name}"

    @property
    def configs(self) -> tuple[str, ...]:
        """Paths of all dataclasses that gin binds for it."""
        return (self.config, *self.other_configs)

    def load_config(self) -> Any:
        """Imports and returns the class that `config` names."""
        module, _, name = self.config.rpartition(".")
        return getattr(importlib.import_module(module), name)


INIT = StageSpec("init", "write a chain file for a text of your own")
ADAPT = StageSpec("adapt", "adapt an encoder to a text, measure and export it")
PREPARE = StageSpec(
    "prepare",
    "turn text into a corpus: blocks, tagged spans, examples",
    config="realm_jax.prepare.prepare.PrepareConfig",
    title="Prepare",
)
UPDATE_CORPUS = StageSpec(
    "update-corpus",
    "add, replace and delete documents of a corpus",
    config="realm_jax.prepare.update_corpus.UpdateConfig",
)
WARM_START = StageSpec(
    "warm-start",
    "start the retriever (ICT) and the reader (MLM)",
    config="realm_jax.training.warm_start.WarmStartConfig",
    title="Warm start",
    trains=True,
)
PRETRAIN = StageSpec(
    "pretrain",
    "train retriever and reader together (REALM)",
    config="realm_jax.training.pretrain.PretrainConfig",
    title="REALM pre-training",
    trains=True,
)
BUILD_INDEX = StageSpec(
    "build-index",
    "follow the newest retriever, publish its index",
    config="realm_jax.cli.build_index.BuildIndexConfig",
    title="Index builder",
    other_configs=("realm_jax.index.builder.BuilderConfig",),
    others_are_passed_on=True,
)
FINETUNE = StageSpec(
    "finetune",
    "train on questions over the document index",
    config="realm_jax.training.finetune.FinetuneConfig",
    title="Open-QA fine-tuning",
    trains=True,
)
EVALUATE = StageSpec(
    "evaluate",
    "measure recall, exact match and F1, write report.html",
    config="realm_jax.evaluation.run.EvaluateConfig",
    title="Evaluate",
)
COMPARE = StageSpec("compare", "two evaluated runs side by side, write compare.html")
ASK = StageSpec(
    "ask",
    "question a trained model, on a page or the command line",
    config="realm_jax.evaluation.ask.AskConfig",
)
SEARCH = StageSpec("search", "find blocks with the retriever of any stage")
EXPORT = StageSpec(
    "export", "write a retriever, reader or embeddings for other software"
)
IMPORT_WEIGHTS = StageSpec(
    "import-weights", "make a model directory of others' weights"
)
TASKS = StageSpec(
    "tasks", "list the SeqIO tasks, print examples as the model sees them"
)

STAGES = {
    spec.command: spec
    for spec in (
        INIT,
        ADAPT,
        PREPARE,
        UPDATE_CORPUS,
        WARM_START,
        PRETRAIN,
        BUILD_INDEX,
        FINETUNE,
        EVALUATE,
        COMPARE,
        ASK,
        SEARCH,
        EXPORT,
        IMPORT_WEIGHTS,
        TASKS,
    )
}
"""Maps a command to its specification, in the order in which a run uses them."""

TRAINING = frozenset(command for command, spec in STAGES.items() if spec.trains)
"""The commands that train."""


def title_of(name: str) -> str:
    """Returns a stage's title in the report, by its name in metrics or its command."""
    spec = STAGES.get(name.replace("_", "-"))
    return spec.title if spec and spec.title else name
