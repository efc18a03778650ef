"""Records the settings of each start of a command in its model directory.

A model directory has `settings/<command>-<NNNN>.json` for each start of a command: its
configuration, seed, version and commit, written when its work begins. So a run can be
repeated, and a later start can say what has changed. A record carries its crc32c, but
not in directories of earlier versions, which may also have none.
"""

import dataclasses
import datetime
import enum
import functools
import pathlib
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from realm_jax.errors import BadInputError
from realm_jax.manifests import seal, unseal
from realm_jax.storage import AlreadyExistsError, Store

FOLDER = "settings"
COMMIT_NAME = "COMMIT"
"""File beside this one with the commit of the code, where there is no checkout."""

_NOT_SET = "not set"
_PACKAGE = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Start:
    """What a command recorded when it started.

    Attributes:
      command: name on the command line, such as "warm-start".
      started: date and time, ISO 8601 in UTC.
      version: version of the package.
      commit: commit of the checkout; None outside of one.
      seed: seed of the run; None for a command without one.
      arguments: the words of the command line.
      settings: the configuration, nested by its fields.
      gin: gin's operative configuration as text.
    """

    command: str
    started: str
    version: str
    commit: str | None
    seed: int | None
    arguments: Sequence[str]
    settings: Mapping[str, Any]
    gin: str


@functools.cache
def commit() -> str | None:
    """Returns the commit of the code; "+" follows if files differ from it.

    Returns:
      40 hexadecimal digits, or None outside of a checkout and of what one has launched.
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
    done = subprocess.run(
        ["git", *arguments],
        cwd=_PACKAGE,
        capture_output=True,
        check=True,
        text=True,
        timeout=30,
    )
    return done.stdout.strip()


def settings_of(config: Any) -> dict[str, Any]:
    """Returns a configuration as nested dictionaries of JSON's values.

    Args:
      config: a dataclass. A setting that makes a dataclass once some size is known, as
        the optimizer once the number of updates is, is replaced by what it makes.
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
            made[field.name] = _plain(value)
    return made


def _sizes(models: Any) -> dict[str, Any]:
    """Returns the settings of the models; the vocabulary's size is the corpus's."""
    retriever = _plain(models.retriever_config(vocab_size=1))
    bert = retriever.pop("bert")
    del bert["vocab_size"]
    return {
        "bert": bert,
        "retriever": retriever,
        "lengths": _plain(models.lengths),
        "span_scorer": models.span_scorer,
    }


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return settings_of(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return repr(value)


def new_start(
    command: str,
    config: Any,
    arguments: Sequence[str],
    gin: Callable[[], str],
    others: Mapping[str, Any],
    version: str,
) -> Start:
    """Returns the record of a command that starts now.

    Args:
      command: name on the command line.
      config: its configuration, a dataclass.
      arguments: its command line.
      gin: returns gin's operative configuration, which has what was made so far.
      others: further configurations by name.
      version: version of the package.
    """
    settings = {**settings_of(config), **_plain(others)}
    now = datetime.datetime.now(datetime.UTC)
    return Start(
        command,
        now.isoformat(timespec="seconds"),
        version,
        commit(),
        getattr(config, "seed", None),
        list(arguments),
        settings,
        gin(),
    )


def write_start(store: Store, start: Start) -> str:
    """Writes a record into a model directory; returns its name there."""
    prefix = f"{FOLDER}/{start.command}-"
    taken = [name for name in store.list(FOLDER) if name.startswith(prefix)]
    number = len(taken) + 1
    data = seal(dataclasses.asdict(start), is_sorted=False)
    while True:
        name = f"{prefix}{number:04d}.json"
        try:
            store.create(name, data)
            return name
        except AlreadyExistsError:
            number += 1


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Returns the settings that differ, each as "old -> new" by its dotted name."""
    old, new = dict(flat(before)), dict(flat(now))
    return {
        name: f"{old.get(name, _NOT_SET)} -> {new.get(name, _NOT_SET)}"
        for name in {**old, **new}
        if old.get(name, _NOT_SET) != new.get(name, _NOT_SET)
    }


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields nested settings by dotted names, such as "optimizer.clip"."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def read_starts(store: Store) -> list[Start]:
    """Returns what was recorded in a model directory, in the order of time.

    Args:
      store: the model directory.

    Raises:
      BadInputError: a record is not as `Start` describes it; the message names it.
    """
    names = [name for name in store.list(FOLDER) if name.endswith(".json")]
    starts = [_parse(store.read(name), store.url(name)) for name in names]
    # In the order of their names where two started in the same second.
    return sorted(starts, key=lambda start: start.started)


def start_of(record: Any, place: str) -> Start:
    """Returns a start from its fields; those of later versions are left out.

    Args:
      record: the fields of `Start` by name.
      place: where the record was found, for the error message.

    Raises:
      BadInputError: it is no object, or lacks a field.
    """
    try:
        names = (field.name for field in dataclasses.fields(Start))
        return Start(**{name: record[name] for name in names})
    except (KeyError, TypeError) as error:
        raise _unreadable(place, error) from error


def _parse(data: bytes, place: str) -> Start:
    try:
        record = unseal(data, required=False)
    except ValueError as error:
        raise _unreadable(place, error) from error
    return start_of(record, place)


def _unreadable(place: str, error: Exception) -> BadInputError:
    return BadInputError(
        f"expected a record of a start in {place}, got one that cannot be read "
        f"({type(error).__name__}: {error}); delete the file."
    )
