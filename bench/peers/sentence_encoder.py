"""Compares sentence-transformers with what `bench/sentence_encoder.py` has written.

pip install sentence-transformers   # in an environment of its own
python bench/peers/sentence_encoder.py DIR
"""

import json
import pathlib
import sys

import numpy as np
import sentence_transformers


def main() -> None:
    """Prints the largest difference of an embedding's feature, for each folder."""
    print("sentence-transformers", sentence_transformers.__version__)
    for folder in sorted(path for path in pathlib.Path(sys.argv[1]).iterdir()):
        texts, pairs = json.loads((folder / "inputs.json").read_text())
        model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
        expected = np.load(folder / "expected.npz")
        for name, found in (
            ("texts", model.encode_query(texts)),
            ("pairs", model.encode_document([tuple(pair) for pair in pairs])),
        ):
            difference = np.abs(found - expected[name]).max()
            print(
                f"{folder.name}, {name}: largest difference {difference:.1e} of "
                f"features up to {np.abs(expected[name]).max():.2f}; "
                f"scores by {model.similarity_fn_name}"
            )


if __name__ == "__main__":
    main()
