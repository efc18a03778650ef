"""Compares imported MiniLM weights with torch's outputs for the same weights.

    python -m bench.minilm_fidelity .cache/data/minilm-l6

torch's outputs are those of `bench/minilm_golden.py`; torch is not needed here.
"""

import argparse
import pathlib

import numpy as np

from realm_jax.models.bert import Bert
from realm_jax.weights import bert

_GOLDEN = pathlib.Path(__file__).parents[1] / "tests/weights/minilm_golden.npz"


def main() -> None:
    """Prints the largest absolute differences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", help="folder with model.safetensors and config.json")
    folder = parser.parse_args().weights
    golden = np.load(_GOLDEN)
    config = bert.config_from_json(folder)
    encoded = Bert(config).apply(
        {"params": bert.load_bert(folder, config)},
        golden["ids"],
        golden["segment_ids"],
    )
    is_token = golden["ids"] != 0
    sequence = np.asarray(encoded.sequence[..., :: int(golden["feature_stride"])])
    hidden = np.abs(sequence - golden["sequence"])[is_token].max()
    pooled = np.abs(np.asarray(encoded.pooled) - golden["pooled"]).max()
    print(f"largest difference: last hidden state {hidden:.1e}, pooled {pooled:.1e}")


if __name__ == "__main__":
    main()
