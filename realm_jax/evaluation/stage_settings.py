"""Reads what each stage of a run recorded of its settings, and compares settings."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from realm_jax.evaluation.report_data import RecordedStage
from realm_jax.settings import Start, flat, read_starts
from realm_jax.stages import PRETRAIN, STAGES
from realm_jax.storage import open_store

NOT_RECORDED = "not recorded"


@dataclasses.dataclass(frozen=True)
class SettingChange:
    """A setting that two starts do not share; "–" stands for one that is not there."""

    name: str
    first: str
    second: str


def recorded_stages(
    model_dirs: Sequence[tuple[str, str]], others: Iterable[str] = ()
) -> list[RecordedStage]:
    """Returns what the stages of a run recorded.

    Args:
      model_dirs: name and model directory of each stage; it is among the results
        even if nothing was recorded.
      others: directories whose commands are among the results if they recorded
        something, such as the corpus.

    Raises:
      BadInputError: a record cannot be read.
    """
    found: dict[str, list[Start]] = {stage: [] for stage, _ in model_dirs}
    for directory in (*(model_dir for _, model_dir in model_dirs), *others):
        for start in read_starts(open_store(directory)):
            found.setdefault(start.command.replace("-", "_"), []).append(start)
    order = [spec.name for spec in STAGES.values() if spec.title]
    return [RecordedStage(name, found[name]) for name in order if name in found]


def flat_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns nested settings as text by dotted names, such as "optimizer.clip"."""
    return {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in flat(settings)
    }


def changed_settings(first: Start, second: Start) -> list[SettingChange]:
    """Returns what differs between two starts: version, commit, seed and settings."""
    return changed_texts(_described(first), _described(second))


def changed_texts(
    first: Mapping[str, str], second: Mapping[str, str]
) -> list[SettingChange]:
    """Returns the names whose texts differ, in the order of their appearance."""
    return [
        SettingChange(name, first.get(name, "–"), second.get(name, "–"))
        for name in {**first, **second}
        if first.get(name) != second.get(name)
    ]


def _described(start: Start) -> dict[str, str]:
    return {
        "version": start.version,
        "commit": start.commit or NOT_RECORDED,
        "seed": "none" if start.seed is None else str(start.seed),
    } | flat_settings(start.settings)


def split_of_held_out_questions(stages: Sequence[RecordedStage]) -> str:
    """Returns the split that pre-training searched, "" if it recorded none."""
    for stage in stages:
        if stage.stage == PRETRAIN.name and stage.starts:
            settings = stage.starts[-1].settings
            if settings.get("questions"):
                return str(settings.get("questions_split", ""))
    return ""
