"""Makes a corpus of one's own articles and registers it, and a task, with SeqIO.

    python examples/own_corpus_and_task.py FOLDER

Writes 40 invented articles to FOLDER, makes FOLDER/corpus of them, and prints the names
of the tasks that `tasks.corpora.register` gives and two examples of a task of our own:
masked sentences whose answer is a year. A second call opens the corpus of the first.
"""

import functools
import json
import pathlib
import sys

import numpy as np
import seqio

from realm_jax.data import masking
from realm_jax.data.blocks import BlockStore
from realm_jax.prepare.seqio_tasks import BlockSource, add_task
from tasks import corpora

LENGTHS = {"query_length": 32, "max_masks": 6}
TEXT = "Town{i} lies on the river Fosk. It was founded in {year} by Karel Dorm."


def years(store: BlockStore, block_ids: np.ndarray) -> dict[str, np.ndarray]:
    """Keeps the masked sentences whose answer is a number; arrays [example, ...]."""
    examples = masking.salient_examples(store, block_ids, **LENGTHS)
    answers = [store.vocabulary.decode(ids[ids > 0]) for ids in examples["mask_ids"]]
    kept = np.array([answer.isdigit() for answer in answers], bool)
    return {name: array[kept] for name, array in examples.items()}


def main(folder: pathlib.Path) -> None:
    """Runs the example."""
    folder.mkdir(parents=True, exist_ok=True)
    articles, corpus = folder / "articles.jsonl", folder / "corpus"
    articles.write_text(
        "".join(
            json.dumps({"title": f"Town{i}", "text": TEXT.format(i=i, year=1400 + i)})
            + "\n"
            for i in range(40)
        )
    )
    names = corpora.register("towns", articles, corpus=corpus, tagger="rules")
    store = BlockStore.open(corpus)
    add_task(
        "towns_years",
        BlockSource(store, num_shards=4, fraction=0.1),
        functools.partial(years, store),
        masking.sentence_specs(**LENGTHS),
        store.vocabulary.size,
    )
    print(*names, "towns_years")
    dataset = seqio.get_mixture_or_task("towns_years").get_dataset(
        dict.fromkeys(masking.sentence_specs(**LENGTHS)), "train"
    )
    for example in dataset.take(2).as_numpy_iterator():
        query, answer = (example[name] for name in ("query_ids", "mask_ids"))
        print(f"{store.vocabulary.decode(query[query > 0])}  ->  ", end="")
        print(store.vocabulary.decode(answer[answer > 0]))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
