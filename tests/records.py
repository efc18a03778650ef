"""Changes what a run has recorded, and writes it as earlier versions did."""

import json
import pathlib

from realm_jax.manifests import seal, unseal
from realm_jax.run_record import RunRecord, Trained, write_record
from realm_jax.storage import open_store

# Of `Trained`, the names that these had in the details of a checkpoint.
_ANSWERING = {
    "corpus": "corpus",
    "source": "pretrained",
    "source_checkpoint": "pretrained_checkpoint",
    "searcher": "searcher",
    "num_read": "num_read",
}


def change_record(model_dir, change):
    """Makes a change to what every attempt at a run has recorded of what is trained."""
    for path in pathlib.Path(model_dir).glob("settings/*.json"):
        record = unseal(path.read_bytes())
        change(record["trained"])
        path.write_bytes(seal(record))


def change_details(model_dir, change):
    """Makes a change to the details of every checkpoint."""
    for path in pathlib.Path(model_dir).glob("checkpoints/*.json"):
        manifest = unseal(path.read_bytes())
        change(manifest["details"])
        path.write_bytes(seal(manifest))


def as_earlier_version(model_dir):
    """Has a run described by its checkpoints, as version 0.1 did."""
    for path in pathlib.Path(model_dir).glob("settings/*.json"):
        record = unseal(path.read_bytes())
        trained = record.pop("trained")
        path.write_text(json.dumps(record, indent=1))
    details = {name: trained[name] for name in ("stage", "model", "lengths")}
    for name in ("corpus_fingerprint", "vocabulary_fingerprint"):
        details[name] = trained[name]
    details |= trained["data_order"]
    if trained["questions"]:
        details["questions"] = trained["questions"]
    if trained["stage"] == "finetune":
        answering = {theirs: trained[own] for own, theirs in _ANSWERING.items()}
        details["answering"] = answering | trained["numerics"]
    change_details(model_dir, lambda of_step: of_step.update(details))


def record_training(model_dir, **known):
    """Writes the record of a run, of which nothing else is known."""
    fields = {
        **dict.fromkeys(("stage", "corpus_fingerprint", "vocabulary_fingerprint"), ""),
        **{name: {} for name in ("model", "lengths", "data_order")},
    }
    trained = Trained(**(fields | known))
    record = RunRecord("warm-start", "2026-01-01", "", None, 0, [], {}, "", trained)
    write_record(open_store(model_dir), record)
