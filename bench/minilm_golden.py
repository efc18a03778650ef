"""Writes tests/weights/minilm_golden.npz: outputs of torch's BERT for MiniLM's weights.

The everyday test compares `realm_jax.models.bert` with this file, and so needs no
torch. Run it again only to change the inputs:

    pip install torch transformers   # The extra "peers".
    python bench/minilm_golden.py --weights .cache/data/minilm-l6
"""

import argparse
import pathlib

import numpy as np
import tokenizers
import torch
import transformers

INPUTS: tuple[str | tuple[str, str], ...] = (
    "The Eiffel Tower was completed in March 1889.",
    "An equilateral triangle is easily constructed because 3 is a prime.",
    "Ça va?",
    ("Who wrote the Principia?", "Isaac Newton published it in 1687."),
    ("Photosynthesis", "Plants turn light into chemical energy, stored in sugars."),
    ("東京 is the capital of Japan.", "Its population exceeds 13.9 million people."),
)
# One feature in eight of the last layer keeps the file small; a wrong weight anywhere
# changes all of them.
FEATURE_STRIDE = 8


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=pathlib.Path, required=True)
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=pathlib.Path("tests/weights/minilm_golden.npz"),
    )
    arguments = parser.parse_args()
    tokenizer = tokenizers.BertWordPieceTokenizer(
        str(arguments.weights / "vocab.txt"), lowercase=True
    )
    tokenizer.enable_padding(pad_id=0)
    encodings = tokenizer.encode_batch(list(INPUTS))
    ids = np.array([encoding.ids for encoding in encodings], np.int32)
    segment_ids = np.array([encoding.type_ids for encoding in encodings], np.int32)

    model = transformers.BertModel.from_pretrained(arguments.weights).eval()
    with torch.no_grad():
        outputs = model(
            input_ids=torch.tensor(ids, dtype=torch.long),
            token_type_ids=torch.tensor(segment_ids, dtype=torch.long),
            attention_mask=torch.tensor(ids != 0, dtype=torch.long),
        )
    np.savez_compressed(
        arguments.output,
        ids=ids,
        segment_ids=segment_ids,
        sequence=outputs.last_hidden_state.numpy()[..., ::FEATURE_STRIDE],
        pooled=outputs.pooler_output.numpy(),
        feature_stride=FEATURE_STRIDE,
    )


if __name__ == "__main__":
    main()
