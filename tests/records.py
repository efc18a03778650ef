"""Changes what a run has recorded, and writes it as earlier versions did."""

import dataclasses
import json
import pathlib

from realm_jax.manifests import seal, unseal
from realm_jax.run_record import Trained


def _change(model_dir, pattern, part, new):
    for path in pathlib.Path(model_dir).glob(pattern):
        sealed = unseal(path.read_bytes())
        _merge(sealed[part], new)
        path.write_bytes(seal(sealed, is_sorted=False))


def change_record(model_dir, **new):
    """Changes what every attempt at a run has recorded of what is trained."""
    _change(model_dir, "settings/*.json", "trained", new)


def change_details(model_dir, **new):
    """Changes the details of every checkpoint; what is None is taken away."""
    _change(model_dir, "checkpoints/*.json", "details", new)


def _merge(old, new):
    for name, value in new.items():
        if isinstance(value, dict) and name in old:
            _merge(old[name], value)
        elif value is None:
            old.pop(name, None)
        else:
            old[name] = value


def as_earlier_version(model_dir):
    """Has a run described by its checkpoints, as version 0.1 did."""
    for path in pathlib.Path(model_dir).glob("settings/*.json"):
        record = unseal(path.read_bytes())
        of = record.pop("trained")
        path.write_text(json.dumps(record, indent=1))
    names = ("stage", "model", "lengths", "corpus_fingerprint")
    details = {name: of[name] for name in (*names, "vocabulary_fingerprint")}
    details |= of["data_order"] | {"questions": of["questions"] or None}
    if of["stage"] == "finetune":
        names = ("corpus", "searcher", "num_read")
        answering = {name: of[name] for name in names} | of["numerics"]
        answering["pretrained"] = of["source"]
        answering["pretrained_checkpoint"] = of["source_checkpoint"]
        details["answering"] = answering
    change_details(model_dir, trained=None, **details)


def details_of(**known):
    """Returns the details of a checkpoint of which nothing else is known."""
    fields = dict.fromkeys(f.name for f in dataclasses.fields(Trained))
    return {"trained": fields | known}
