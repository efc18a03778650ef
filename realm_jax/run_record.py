"""The record of a run: what was started, and what a training stage makes of it.

A model directory has `settings/<command>-<NNNN>.json` for each attempt of a command,
written once, when its work begins: configuration, seed, version and commit. That of a
training stage also has what is trained (`Trained`). A later attempt compares itself
with it, whoever opens the model does so by it, and reports show it. It carries its
crc32c, which records of earlier versions may lack.
"""

import contextlib
import dataclasses
import datetime
import enum
import functools
import importlib
import itertools
import json
import logging
import pathlib
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from realm_jax import manifests, multihost
from realm_jax.errors import BadInputError
from realm_jax.storage import AlreadyExistsError, Store, open_store

FOLDER = "settings"
COMMIT_NAME = "COMMIT"
"""File beside this one with the commit of the code, where there is no checkout."""

NOT_RECORDED = "not recorded"

_IDENTITY = (
    "stage",
    "model",
    "corpus_fingerprint",
    "vocabulary_fingerprint",
    "lengths",
)
_PACKAGE = pathlib.Path(__file__).parent

# How a run is done, not what it computes: of no interest where it is resumed.
_UNIMPORTANT = ("profile", "log_period", "checkpoint_period")

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class SettingChange:
    """A setting that differs between two configurations, with both values."""

    name: str
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a training stage makes, and what is needed to use it without gin files.

    Attributes:
      model: the towers, from `initialization.describe`.
      data_order: settings that fix the examples of each update, and how they are read.
      questions: location of the held-out questions, or "".
      source: what the retriever began with, a model directory or weights, or "".
      source_checkpoint: the checkpoint of `source`, "last" or "best".
      numerics: `dtype` and `products` of the encoders.
      searcher: "device" or "scann", of fine-tuning; else "".
      num_read: blocks that fine-tuning reads per question; else None.
      retrieval_weight: factor of f(x, z) in an answer of a fine-tuned model.
    """

    stage: str
    model: Mapping[str, Any]
    lengths: Mapping[str, int]
    corpus_fingerprint: str
    vocabulary_fingerprint: str
    data_order: Mapping[str, Any]
    corpus: str = ""
    questions: str = ""
    source: str = ""
    source_checkpoint: str = "last"
    numerics: Mapping[str, str] = dataclasses.field(default_factory=dict)
    searcher: str = ""
    num_read: int | None = None
    retrieval_weight: float = 1.0

    def identity(self) -> dict[str, Any]:
        """Returns the settings that all attempts at a run share, by name."""
        return {name: getattr(self, name) for name in _IDENTITY} | {**self.data_order}

    def differences(self, wanted: Mapping[str, Any]) -> list[SettingChange]:
        """Returns where the identity differs from settings: theirs, then its own."""
        own = self.identity()
        return changes(wanted, {name: own.get(name) for name in wanted})


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """What was started by an attempt of a command.

    Attributes:
      command: name on the command line, such as "warm-start".
      started: date and time, ISO 8601 in UTC.
      arguments: the words of the command line; none if the library was called.
      trained: of a training stage alone; earlier versions did not record it.
    """

    command: str
    started: str
    version: str
    commit: str | None
    seed: int | None
    arguments: Sequence[str]
    settings: Mapping[str, Any]
    gin: str
    trained: Trained | None = None


@functools.cache
def commit() -> str | None:
    """Returns the commit of the code, with "+" if files differ from it.

    It is None outside of a checkout and of what one has launched.
    """
    recorded = _PACKAGE / COMMIT_NAME
    if recorded.exists():
        return recorded.read_text().strip() or None
    # A package may be installed into a folder of another repository.
    if not (_PACKAGE.parent / ".git").exists():
        return None
    try:
        head = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}+" if changed else head


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_PACKAGE), *arguments]
    return subprocess.check_output(
        command, stderr=subprocess.DEVNULL, text=True, timeout=30
    ).strip()


def new_record(**fields: Any) -> RunRecord:
    """Returns the record of an attempt that begins now, by this version."""
    return RunRecord(
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        # The package imports the library, which imports this file.
        version=importlib.import_module("realm_jax").__version__,
        commit=commit(),
        **fields,
    )


def settings_of(config: Any) -> dict[str, Any]:
    """Returns a dataclass as nested dictionaries of JSON's values.

    A setting that makes a dataclass once some size is known, as the optimizer once the
    number of updates is, is replaced by what it makes.
    """
    total_steps = getattr(config, "train_steps", None)
    made = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name == "optimizer" and callable(value) and total_steps:
            value = value(total_steps=total_steps)
        if field.name == "models":
            made[field.name] = _sizes(value)
        elif not callable(value):
            made[field.name] = plain(value)
    return made


def _sizes(models: Any) -> dict[str, Any]:
    """Returns the settings of the models; the vocabulary's size is the corpus's."""
    retriever = plain(models.retriever_config(vocab_size=1))
    bert = retriever.pop("bert")
    del bert["vocab_size"]
    return {
        "bert": bert,
        "retriever": retriever,
        "lengths": plain(models.lengths),
        "span_scorer": models.span_scorer,
    }


def plain(value: Any) -> Any:
    """Returns a value as JSON has it; what JSON lacks becomes text."""
    if dataclasses.is_dataclass(value):
        return settings_of(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(inner) for inner in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return repr(value)


def changes(
    first: Mapping[str, Any], second: Mapping[str, Any], missing: Any = None
) -> list[SettingChange]:
    """Returns the settings that differ; what one of them lacks is `missing` there."""
    old, new = dict(flat(first)), dict(flat(second))
    return [
        SettingChange(name, old.get(name, missing), new.get(name, missing))
        for name in {**old, **new}
        if old.get(name, missing) != new.get(name, missing)
    ]


def changed_settings(first: RunRecord, second: RunRecord) -> list[SettingChange]:
    """Returns what differs between two attempts: version, commit, seed and settings."""
    return changes(_described(first), _described(second), missing="–")


def _described(record: RunRecord) -> dict[str, str]:
    return {
        "version": record.version,
        "commit": record.commit or NOT_RECORDED,
        "seed": "none" if record.seed is None else str(record.seed),
    } | flat_texts(record.settings)


def flat_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns nested settings as text by dotted names, such as "optimizer.clip"."""
    return {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in flat(settings)
    }


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields nested settings by dotted names, such as "optimizer.clip"."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def write_record(store: Store, record: RunRecord) -> None:
    """Writes a record into a model directory, under the next number that is free."""
    prefix = f"{FOLDER}/{record.command}-"
    taken = sum(name.startswith(prefix) for name in store.list(FOLDER))
    data = manifests.seal(dataclasses.asdict(record), is_sorted=False)
    for number in itertools.count(taken + 1):
        with contextlib.suppress(AlreadyExistsError):
            store.create(f"{prefix}{number:04d}.json", data)
            return


def read_records(store: Store) -> list[RunRecord]:
    """Returns what was recorded in a model directory, in the order of time."""
    names = [name for name in store.list(FOLDER) if name.endswith(".json")]
    # In the order of their names where two started in the same second.
    return sorted((_read(store, name) for name in names), key=lambda r: r.started)


def newest_record(store: Store, commands: Iterable[str]) -> RunRecord | None:
    """Returns the record of the last attempt of some commands, reading no others."""
    prefixes = tuple(f"{FOLDER}/{command}-" for command in commands)
    names = [name for name in store.list(FOLDER) if name.startswith(prefixes)]
    newest = max(names, key=lambda name: (len(name), name), default=None)
    return None if newest is None else _read(store, newest)


def _read(store: Store, name: str) -> RunRecord:
    data = store.read(name)
    with _named(store.url(name)):
        # Earlier versions wrote neither what is trained nor, at first, a checksum.
        fields = manifests.unseal(data, required=b'"trained"' in data)
    return record_of(fields, store.url(name))


def record_of(fields: Any, place: str) -> RunRecord:
    """Returns the record that was found in a place; see `trained_of`."""
    with _named(place):
        found = fields.get("trained")
        trained = None if found is None else _known(Trained, found)
        return _known(RunRecord, {**fields, "trained": trained})


def trained_of(fields: Any, place: str) -> Trained:
    """Returns what is trained; what later versions record beside it is left out."""
    with _named(place):
        return _known(Trained, fields)


def _known(kind: type[Any], fields: Mapping[str, Any]) -> Any:
    names = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in fields.items() if name in names})


@contextlib.contextmanager
def _named(place: str) -> Iterator[None]:
    try:
        yield
    except (AttributeError, TypeError, ValueError) as error:
        raise BadInputError(
            f"expected the record of a run in {place}, got one that cannot be read "
            f"({type(error).__name__}: {error}); delete the file, or use the version "
            "that wrote it"
        ) from error


@dataclasses.dataclass
class Attempt:
    """An attempt of a command, which the first process records when its work begins.

    A command that refuses its input, or has nothing left to do, records nothing.

    Attributes:
      config: the configuration, with its `model_dir`.
      others: further configurations by name, dataclasses too.
      note: called with a sentence on the settings that have changed.
    """

    command: str
    config: Any
    arguments: Sequence[str] = ()
    gin: Callable[[], str] = str
    others: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    note: Callable[[str], None] = _log.info

    def __post_init__(self):
        self._has_begun = False

    def begin(self, trained: Trained | None = None) -> None:
        """Reports changed settings and writes the record, the first time."""
        if not self._has_begun and multihost.is_first():
            self._has_begun = True
            record = self._new(trained)
            self._report_changes(record)
            write_record(open_store(self.config.model_dir), record)

    def report_ignored_changes(self) -> None:
        """Reports changed settings that have no effect, because the run is complete."""
        if not self._has_begun and multihost.is_first():
            self._report_changes(self._new(), "; the run is done, so it has no effect")

    def _new(self, trained: Trained | None = None) -> RunRecord:
        return new_record(
            command=self.command,
            seed=getattr(self.config, "seed", None),
            arguments=list(self.arguments),
            settings={**settings_of(self.config), **plain(self.others)},
            gin=self.gin(),
            trained=trained,
        )

    def _report_changes(self, record: RunRecord, effect: str = "") -> None:
        try:
            earlier = newest_record(open_store(self.config.model_dir), [self.command])
        except BadInputError as error:
            self.note(str(error))
            return
        before = record.settings if earlier is None else earlier.settings
        listed = [
            f"{change.name} {change.first} -> {change.second}"
            for change in changes(before, record.settings, "not set")
            if change.name not in _UNIMPORTANT
        ]
        if listed:
            self.note(f"changed since the last start: {', '.join(listed)}{effect}")
