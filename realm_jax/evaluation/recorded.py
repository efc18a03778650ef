"""Restores the configuration of a fine-tuned model from its checkpoint, without gin.

The checkpoint's details hold the sizes and lengths of the models, how spans are scored,
and, under `finetune.ANSWERING`, the other settings that answering needs. Checkpoints
written before that record existed lack it: settings without a safe default must then be
given.
"""

from realm_jax.errors import BadInputError
from realm_jax.evaluation.loading import require_finished
from realm_jax.stages import FINETUNE
from realm_jax.training import finetune
from realm_jax.training.finetune import FinetuneConfig
from realm_jax.training.initialization import Lengths, described_models

# Settings that the details of every fine-tuned model provide.
_SETTINGS = (
    "task",
    "train_steps",
    "batch_size",
    "seed",
    "marginalization",
    "max_span",
    "span_layer_norm_epsilon",
)
_NUMERICS = ("dtype", "products")


def recorded_config(
    model_dir: str,
    *,
    corpus: str = "",
    num_read: int | None = None,
    searcher: str = "",
) -> FinetuneConfig:
    """Returns the configuration that a model directory records; reads no arrays.

    Args:
      model_dir: folder or gs:// of a finished `realm finetune` run.
      corpus: the prepared corpus, "" for the recorded one.
      num_read: number of blocks read per question, None for the recorded number.
      searcher: "device" or "scann", "" for the recorded one. Without a record it is
        "device", which is exact.

    Raises:
      BadInputError: there is no finished fine-tuning run, its checkpoint lacks what is
        not given, num_read is below 1, or its settings are not those of this version.
    """
    _, details = require_finished(model_dir, FINETUNE.name, {})
    recorded = details.get(finetune.ANSWERING, {})
    given = {"corpus": corpus, "num_read": num_read, "searcher": searcher}
    chosen = {"searcher": "device", **recorded}
    chosen |= {name: value for name, value in given.items() if value not in ("", None)}
    missing = [name for name in given if name not in chosen]
    if missing:
        raise BadInputError(
            f"expected {' and '.join(missing)} in the checkpoint of {model_dir}, which "
            "was written before that was recorded; give "
            f"{' and '.join(f'{name}=' for name in missing)} as it was fine-tuned with"
        )
    if chosen["num_read"] < 1:
        raise BadInputError(
            f"expected num_read of at least 1 block, got {chosen['num_read']}; raise it"
        )
    try:
        models = described_models(
            details["model"],
            Lengths(**details["lengths"]),
            **{name: recorded[name] for name in _NUMERICS if name in recorded},
        )
        settings = {name: details[name] for name in _SETTINGS}
    except (KeyError, TypeError) as error:
        raise BadInputError(
            f"expected the checkpoint of {model_dir} to record the settings that this "
            f"version has, got others ({error}); open it with the version it is of"
        ) from error
    return FinetuneConfig(
        model_dir=model_dir,
        corpus=chosen["corpus"],
        models=models,
        searcher=chosen["searcher"],
        num_read=chosen["num_read"],
        # Nothing is trained here, so only the blocks that are read are retrieved.
        num_retrieved=chosen["num_read"],
        **settings,
    )
