"""Writes tiny sentence encoders and their embeddings, for tests/cli.

    pip install sentence-transformers   # in an environment of its own
    python bench/peers/published_encoders.py tests/cli/published_encoders.tar.xz

A random BERT is put together and saved by sentence-transformers in the layouts of
published families. The gate's test reads the folders, and compares. Weights are
multiples of 1/16, and the BERT is the same in all, which makes the file small.
"""

import json
import pathlib
import string
import sys
import tarfile
import tempfile

import sentence_transformers
import torch
import transformers
from sentence_transformers.sentence_transformer import modules

HIDDEN = 8
TEXTS = ["the river", "Who is near the mill?", "a", "query: town"]
PAIRS = [("Mill", "The mill is near."), ("", "a town"), ("the town", "river, " * 9)]
WORDS = ("query", "passage", "the", "river", "town", "mill", "is", "near", "who")


def main() -> None:
    """Writes the archive."""
    mean, cls = (modules.Pooling(HIDDEN, pooling_mode=mode) for mode in ("mean", "cls"))
    unit = modules.Normalize()
    tanh = modules.Dense(HIDDEN, HIDDEN, activation_function=torch.nn.Tanh())
    narrow = modules.Dense(HIDDEN, 6, bias=False, activation_function=None)
    both = {"query": "query: ", "passage": "passage: "}
    with tempfile.TemporaryDirectory() as temporary:
        root = pathlib.Path(temporary)
        save(root / "gte", [mean])
        save(root / "bge", [cls, unit])
        # Published e5 have no prompts in their files; they are given.
        save(root / "e5", [mean, unit], given=both)
        save(root / "labse", [cls, tanh, unit])
        save(root / "arctic", [cls, unit], prompts={"query": "query: "})
        save(root / "dense", [mean, narrow], prompts=both, default_prompt_name="query")
        archive(root, pathlib.Path(sys.argv[1]))


def save(folder: pathlib.Path, parts, *, given=None, **settings) -> None:
    """Saves an encoder, and `expected.json` with its embeddings."""
    torch.manual_seed(0)
    base = folder.with_name(f"{folder.name}_base")
    base.mkdir()
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *string.ascii_lowercase]
    pieces += [f"##{letter}" for letter in string.ascii_lowercase]
    pieces += [*":?,.", *WORDS]
    (base / "vocab.txt").write_text("\n".join(pieces))
    transformers.BertTokenizer(str(base / "vocab.txt")).save_pretrained(base)
    config = transformers.BertConfig(
        vocab_size=len(pieces),
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=128,
    )
    rounded(transformers.BertModel(config)).save_pretrained(base)
    transformer = modules.Transformer(str(base))
    model = sentence_transformers.SentenceTransformer(
        modules=[transformer, *map(rounded, parts)], device="cpu", **settings
    )
    model.save(str(folder))
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    prompts = [{}, {}]
    if "passage" in settings.get("prompts", {}):
        # `encode_document` finds the empty "document" of every encoder first.
        prompts[1] = {"prompt_name": "passage"}
    if given:
        prompts = [{"prompt": prompt} for prompt in given.values()]
    queries = model.encode_query(TEXTS, **prompts[0])
    documents = model.encode_document(PAIRS, **prompts[1])
    expected = {
        "sentence_transformers": sentence_transformers.__version__,
        "given": given,
        "texts": TEXTS,
        "pairs": PAIRS,
        "queries": [[round(float(x), 7) for x in row] for row in queries],
        "documents": [[round(float(x), 7) for x in row] for row in documents],
    }
    (folder / "expected.json").write_text(json.dumps(expected))


def rounded(module):
    """Draws weights again that compress well, large enough for each to matter."""
    for parameter in module.parameters():
        drawn = torch.randn(parameter.shape) * 0.4
        parameter.data = (drawn * 16).round() / 16
    return module.eval()


def archive(root: pathlib.Path, path: pathlib.Path) -> None:
    """Writes what a start needs, the same bytes each time."""
    files = [
        file
        for file in root.rglob("*")
        if file.suffix in (".json", ".safetensors")
        and not file.relative_to(root).parts[0].endswith("_base")
    ]
    with tarfile.open(path, "w:xz", preset=9) as target:
        # Those that are alike beside each other.
        for file in sorted(files, key=lambda file: (file.name, file)):
            info = tarfile.TarInfo(file.relative_to(root).as_posix())
            info.size = file.stat().st_size
            with file.open("rb") as content:
                target.addfile(info, content)


if __name__ == "__main__":
    main()
