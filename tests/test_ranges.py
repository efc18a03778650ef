"""Every number, flag and choice that gin can set is checked where it is configured."""

import ast
import dataclasses
import importlib
import math
import pathlib
import re
import threading
import typing

from realm_jax.errors import BadInputError
from realm_jax.hardware import HardwareConfig
from realm_jax.index.searchers import SEARCHERS
from realm_jax.models.bert import BertConfig
from realm_jax.prepare.prepare import PrepareConfig
from realm_jax.training import finetune
from realm_jax.training.finetune import FinetuneConfig
from realm_jax.training.initialization import ModelFactory
from realm_jax.training.optimizers import OptimizerConfig
from realm_jax.training.partitioning import MeshConfig
from realm_jax.training.pretrain import PretrainConfig
from realm_jax.training.warm_start import WarmStartConfig
from tests.refused import refused

ROOT = pathlib.Path(__file__).parents[1]

# Fields of which 0 is none of something, or a beginning.
TAKEN_AT_0 = {
    *("data", "slices", "seed", "train_steps", "total_steps", "warmup_steps"),
    *("final_fraction", "warmup_fraction", "weight_decay", "projection_dropout"),
    *("dropout_rate", "held_out_examples", "wait_seconds", "own", "null", "retrieved"),
    *("max_bm25_blocks", "port", "validation_fraction", "brute_force_below"),
    *("min_recall", "mean_length", "disk", "max_restarts", "ttl_hours"),
    *("skip_nonfinite_updates", "step_latency_ms", "num_embedded", "bm25_weight"),
    *("num_sentences", "examples", "longest", "host_disk_gib"),
    "attention_dropout_rate",
}
REFUSED_AT_0 = {"MeshConfig.data", "ReaderMixture.own"}
TAKEN_AT_MINUS_1 = {"MeshConfig.data"}

# Fields whose texts are no choice among a few that are known here.
FREE_TEXTS = {
    # Folders, files and where they came from.
    *("model_dir", "corpus", "questions", "source", "vocabulary", "scratch", "root"),
    *("output", "changes", "knowledge", "seqio_cache", "weights", "model"),
    *("warm_start", "retriever_warm_start", "reader_warm_start", "warm_started"),
    *("fills_masks", "pretrained", "starting_point"),
    *("control_warm_started", "control_finetuned"),
    # Of `realm import-weights`.
    *("dest", "blocks", "embeddings", "titles"),
    "Chain.hardware",
    # Names that depend on the data.
    *("task", "pairs_task", "masked_task", "split", "questions_split", "tagger"),
    *("name", "title", "attribution", "question", "characters"),
    # Words of the machines, which slices, the network and gin know.
    *("trainer", "builder", "currency", "project", "zone", "builder_zone", "host"),
    *("network", "subnetwork", "service_account", "Stage.command", "reservation"),
    *("namespace", "queue", "priority", "image"),
}


def bert(**settings):
    return BertConfig(8, 8, 1, 1, 8, **settings)


GIVEN = {
    "models": ModelFactory(bert),
    "bert": bert(),
    "task": "t",
    "pairs_task": "p",
    "command": "pretrain",
    "stages": (),
    "source": "s",
    "vocabulary": "v",
}


def bound_in_gin_files():
    """Names of the classes that a shipped gin file binds or makes."""
    pattern = re.compile(
        r"^(?:[\w/]+/)?\w+\.([A-Z]\w+)[.:]|@(?:[\w/]+/)?\w+\.([A-Z]\w+)", re.M
    )
    texts = (path.read_text() for path in (ROOT / "gin").rglob("*.gin"))
    found = (match for text in texts for match in pattern.findall(text))
    return {name for pair in found for name in pair if name}


def dataclasses_by_name():
    """Class -> its module, of every dataclass; nothing is imported."""
    found = {}
    for path in (*ROOT.glob("realm_jax/**/*.py"), *ROOT.glob("tpu_launch/**/*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and any(
                "dataclasses.dataclass" in ast.unparse(decorator)
                for decorator in node.decorator_list
            ):
                found[node.name] = module
    return found


def configurable():
    """The dataclasses that gin can set, and those that are their fields."""
    modules = dataclasses_by_name()
    # A chain file of one's own makes local.Stage.
    named = {name for name in modules if name.endswith("Config")} | {"Stage"}
    pending = [
        getattr(importlib.import_module(modules[name]), name)
        for name in sorted(named | bound_in_gin_files() & modules.keys())
    ]
    found = []
    while pending:
        one = pending.pop()
        if one in found:
            continue
        found.append(one)
        for kind in kinds(one).values():
            pending += [inner for inner in kind if dataclasses.is_dataclass(inner)]
    return sorted(found, key=lambda one: one.__name__)


def kinds(config_class):
    """Field -> the types it may have."""
    hints = typing.get_type_hints(config_class)
    return {
        field.name: typing.get_args(hints[field.name]) or (hints[field.name],)
        for field in dataclasses.fields(config_class)
    }


def texts(config_class):
    """Fields that hold one text."""
    hints = typing.get_type_hints(config_class)
    return [
        field.name
        for field in dataclasses.fields(config_class)
        if hints[field.name] is str
        or typing.get_origin(hints[field.name]) is typing.Literal
    ]


def made(config_class, **changes):
    """A configuration whose required fields have some value of their type."""
    given = {}
    for field in dataclasses.fields(config_class):
        if field.default is field.default_factory is dataclasses.MISSING:
            name, (kind, *_) = field.name, kinds(config_class)[field.name]
            if name in GIVEN:
                given[name] = GIVEN[name]
            else:
                given[name] = made(kind) if dataclasses.is_dataclass(kind) else kind(8)
    return config_class(**given | changes)


CONFIGURATIONS = configurable()


def fields_of(kind):
    """(configuration, field) of every field that may have a value of the type."""
    return [
        (config, name)
        for config in CONFIGURATIONS
        for name, found in kinds(config).items()
        if kind in found
    ]


NUMBERS = sorted({*fields_of(int), *fields_of(float)}, key=str)
FLAGS = fields_of(bool)
CHOICES = [
    (config, name)
    for config in CONFIGURATIONS
    for name in texts(config)
    if not {name, f"{config.__name__}.{name}"} & FREE_TEXTS
]


def test_the_configurations_are_found():
    names = {config.__name__ for config in CONFIGURATIONS}
    # A base class, a command's, one that only a gin file names, a field of another, and
    # the planner's and launcher's.
    assert names > {"StageConfig", "AskConfig", "ModelFactory", "ReaderMixture"}
    assert names > {"CorpusSize", "Lengths", "HardwareConfig", "Stage", "Chain"}
    assert len(NUMBERS) > 100
    assert len(FLAGS) > 30
    assert len(CHOICES) > 20


def refusal(config, name, value):
    """Returns the line that refuses a value; "" where it is taken."""
    try:
        made(config, **{name: value})
    except BadInputError as error:
        said = str(error)
        assert "\n" not in said
        assert repr(value) in said
        return said
    return ""


def accepts(config, name, value):
    said = refusal(config, name, value)
    assert not said or name in said
    return not said


def test_numbers_have_a_range():
    for config, name in NUMBERS:
        field = f"{config.__name__}.{name}"
        for value in (math.nan, math.inf, -math.inf, "8", True):
            assert not accepts(config, name, value), (field, value)
        assert accepts(config, name, -1) == (field in TAKEN_AT_MINUS_1), field
        takes_0 = name in TAKEN_AT_0 and field not in REFUSED_AT_0
        assert accepts(config, name, 0) == takes_0, field


def test_flags_are_true_or_false():
    for config, name in FLAGS:
        takes_none = type(None) in kinds(config)[name]
        for value in ("False", "", 0, 1, *([] if takes_none else [None])):
            said = refusal(config, name, value)
            assert f"expected {config.__name__}.{name} to be True or False" in said
            assert f"got {value!r}; " in said


def test_choices_are_of_their_texts():
    for config, name in CHOICES:
        for value in ("no such", "Device", 1, None):
            said = refusal(config, name, value)
            assert re.search("^expected .*, got ", said), (config, name, value)


def test_every_searcher_may_be_chosen():
    for searching in (PretrainConfig, WarmStartConfig, FinetuneConfig):
        for searcher in SEARCHERS:
            assert made(searching, searcher=searcher).searcher == searcher


def test_training_on_questions_or_sentences_names_their_task():
    assert not accepts(PretrainConfig, "task", "")
    # A model that is evaluated or asked needs none; the corpus is not there.
    config = made(FinetuneConfig, task="")
    with refused(r"FinetuneConfig\.task to be a text"):
        finetune.run(config, lambda *_: None, threading.Event())


def test_other_values_that_cannot_be_meant():
    for config, name, value in (
        (HardwareConfig, "utilization", 5.0),
        (HardwareConfig, "chip_hour_prices", {"v4": math.nan}),
        (HardwareConfig, "trainer", ""),
        (PretrainConfig, "model_dir", ""),
        (PretrainConfig, "corpus", ""),
        (PrepareConfig, "corpus", "gs://bucket/corpus"),
        (PretrainConfig, "batch_size", 2.5),
        (OptimizerConfig, "final_fraction", 1.5),
        (BertConfig, "dropout_rate", 1.0),
        (FinetuneConfig, "seed", 2**63),
        (MeshConfig, "data", -2),
        (FinetuneConfig, "more_tasks", {"a": 0.0001}),
        (FinetuneConfig, "more_tasks", {"a": 0.5, "b": 0.5}),
        (FinetuneConfig, "more_tasks", {"": 0.5}),
        (PretrainConfig, "frozen", "retriever"),
        (PretrainConfig, "frozen", ("retriever", "")),
    ):
        assert not accepts(config, name, value), (config, name, value)
    assert refusal(PretrainConfig, "batch_size", -512) == (
        "expected PretrainConfig.batch_size to be a whole number of at least 1, got "
        "-512; correct pretrain.PretrainConfig.batch_size, or the macro that it reads"
    )
