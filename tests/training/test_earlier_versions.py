"""What earlier versions recorded in checkpoints is read as a record of today."""

import json

import pytest

from realm_jax.run_record import Trained
from realm_jax.storage import open_store
from realm_jax.training import recorded
from realm_jax.training.checkpoint_manifests import write_manifest

MODEL = {
    "bert": {
        **{"activation": "gelu_tanh", "hidden_size": 16, "layer_norm_epsilon": 1e-12},
        **{"max_positions": 128, "mlp_size": 32, "num_heads": 2, "num_layers": 1},
        **{"num_segments": 2, "vocab_size": 300},
    },
    **{"layer_norm": True, "layer_norm_epsilon": 1e-12, "pooling": "cls"},
    **{"projection_size": 8, "shared": True},
}
LENGTHS = {"document": 40, "joined": 72, "query": 32}
OF_EVERY_STAGE = {
    **{"corpus_fingerprint": "1f9f7421c4cb", "vocabulary_fingerprint": "1da700a65178"},
    **{"model": MODEL, "lengths": LENGTHS, "seed": 0, "holds_index": False},
}
# As commit 826e235 wrote them for the chain of `tests/tiny_run.py`.
DETAILS = {
    "warm_start": OF_EVERY_STAGE
    | {"stage": "warm_start", "task": "towns_salient", "pairs_task": "towns_ict"}
    | {"batch_size": 16, "reader_batch_size": 512, "mixture": None, "train_steps": 60}
    | {"score_unmasked": False, "span_scorer": False, "spans": "one_per_sentence"},
    "pretrain": OF_EVERY_STAGE
    | {"stage": "pretrain", "task": "towns_salient", "batch_size": 4, "index_step": 8}
    | {"span_scorer": False, "spans": "one_per_sentence", "train_steps": 12}
    | {"questions": "/runs/questions.jsonl", "held_out_utility": 0.09},
    "finetune": OF_EVERY_STAGE
    | {"stage": "finetune", "task": "towns_questions", "batch_size": 4}
    | {"marginalization": "product", "max_span": 10, "train_steps": 20}
    | {"span_layer_norm_epsilon": 0.001}
    | {
        "answering": {
            **{"corpus": "/runs/corpus", "dtype": "float32", "products": "bfloat16"},
            **{"num_read": 2, "pretrained": "/runs/pretrain", "searcher": "scann"},
            "pretrained_checkpoint": "best",
        }
    },
}
STARTED = {
    **{"command": "pretrain", "started": "2026-11-01T10:00:00+00:00", "seed": 0},
    **{"version": "0.2.0.dev0", "commit": None, "arguments": [], "gin": ""},
    "settings": {"corpus": "runs/corpus"},
}
OF_SENTENCES = {"spans": "one_per_sentence", "span_scorer": False}
EXPECTED = {
    "warm_start": {
        "data_order": {
            **{"task": "towns_salient", "pairs_task": "towns_ict", "seed": 0},
            **{"batch_size": 16, "reader_batch_size": 512, "mixture": None},
            **OF_SENTENCES,
            "score_unmasked": False,
        },
    },
    "pretrain": {
        # It was not recorded then, as it had one value.
        "data_order": {"task": "towns_salient", "batch_size": 4, "seed": 0}
        | OF_SENTENCES
        | {"score_unmasked": False},
        "corpus": "runs/corpus",
        "questions": "/runs/questions.jsonl",
    },
    "finetune": {
        "data_order": {
            **{"task": "towns_questions", "batch_size": 4, "seed": 0, "max_span": 10},
            **{"marginalization": "product", "span_layer_norm_epsilon": 0.001},
        },
        "corpus": "/runs/corpus",
        "source": "/runs/pretrain",
        "source_checkpoint": "best",
        "numerics": {"dtype": "float32", "products": "bfloat16"},
        **{"searcher": "scann", "num_read": 2},
    },
}


@pytest.mark.parametrize("stage", DETAILS)
def test_the_details_of_a_checkpoint_are_a_record(stage, tmp_path):
    store = open_store(tmp_path)
    assert recorded.open_run(str(tmp_path)) is None
    write_manifest(store, 12, DETAILS[stage])
    if stage == "pretrain":
        store.write("settings/pretrain-0001.json", json.dumps(STARTED).encode())
    assert recorded.open_run(str(tmp_path)).trained == Trained(
        stage=stage,
        model=MODEL,
        lengths=LENGTHS,
        corpus_fingerprint="1f9f7421c4cb",
        vocabulary_fingerprint="1da700a65178",
        **EXPECTED[stage],
    )


def test_settings_that_had_one_value_were_not_recorded(tmp_path):
    names = ("spans", "span_scorer", "score_unmasked")
    details = {n: v for n, v in DETAILS["warm_start"].items() if n not in names}
    store = open_store(tmp_path)
    write_manifest(store, 12, details)
    order = recorded.open_run(str(tmp_path)).trained.data_order
    assert [order[name] for name in names] == ["all", False, False]
