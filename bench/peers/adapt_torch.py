"""Adapts a sentence encoder to a text with sentence-transformers, for
`bench.adaptation`; imports nothing of this project.

    python -m bench.peers.adapt_torch tsdae CASE --minutes 4 --output FILE.npz

Loss, batch and rate are those of the examples of sentence-transformers, and for ICT,
which has none, those of its other contrasts of pairs. An encoder without `modules.json`
is the mean of its features, of length 1, as `realm adapt` takes it.

- `untouched` trains nothing.
- `tsdae` restores a sentence without 60 % of its words (Wang et al. 2021).
- `simcse` embeds a sentence twice, with dropout, and finds the other (Gao et al. 2021).
- `ict` finds the block that a sentence was taken from (Lee et al. 2019).
- `margin_mse` learns by how much the block of a sentence is better than another that
  shares words with it: GPL's loss (Wang et al. 2022), whose generator is the text
  itself, and whose cross-encoder is BM25.

It trains for as much processor time as `--minutes` of all threads. The folder CASE has
`encoder`, `blocks.jsonl`, `sentences.jsonl`, `queries.jsonl` and `negatives.npz`.
Writes the embeddings of blocks and queries, and prints a JSON object.
"""

import argparse
import copy
import json
import math
import pathlib
import random
import resource
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from sentence_transformers import InputExample, SentenceTransformer, losses, models

_DELETED = 0.6
_KEPT_SENTENCE = 0.1
_TIMED_UPDATES = 6
_FEW = 256


class Case(NamedTuple):
    """A text: pairs of title and body, and sentences with their blocks' numbers."""

    folder: pathlib.Path
    blocks: Sequence[tuple[str, str]]
    sentences: Sequence[tuple[int, str]]
    queries: Sequence[str]


class Recipe(NamedTuple):
    """How a method trains. `example` draws one from the sentence of a number."""

    batch: int
    rate: float
    scheduler: str
    loss: Callable[[SentenceTransformer], torch.nn.Module]
    example: Callable[[int, random.Random], InputExample]


def read_case(folder: pathlib.Path) -> Case:
    """Reads the folder that `bench.adaptation` writes."""

    def rows(name: str) -> list[Any]:
        with (folder / f"{name}.jsonl").open() as lines:
            return [json.loads(line) for line in lines]

    blocks = [(title, body) for title, body in rows("blocks")]
    sentences = [(block, text) for block, text in rows("sentences")]
    return Case(folder, blocks, sentences, rows("queries"))


def tsdae(case: Case) -> Recipe:
    """Returns the recipe of the denoising autoencoder."""

    def example(number: int, drawn: random.Random) -> InputExample:
        text = case.sentences[number][1]
        words = text.split()
        kept = [word for word in words if drawn.random() >= _DELETED]
        return InputExample(texts=[" ".join(kept or [drawn.choice(words)]), text])

    def loss(model: SentenceTransformer) -> torch.nn.Module:
        encoder = str(case.folder / "encoder")
        return losses.DenoisingAutoEncoderLoss(
            model, decoder_name_or_path=encoder, tie_encoder_decoder=True
        )

    return Recipe(8, 3e-5, "constantlr", loss, example)


def simcse(case: Case) -> Recipe:
    """Returns the recipe of contrast by dropout."""

    def example(number: int, drawn: random.Random) -> InputExample:
        del drawn
        return InputExample(texts=[case.sentences[number][1]] * 2)

    loss = losses.MultipleNegativesRankingLoss
    return Recipe(128, 5e-5, "WarmupLinear", loss, example)


def ict(case: Case) -> Recipe:
    """Returns the recipe of the inverse cloze task."""

    def example(number: int, drawn: random.Random) -> InputExample:
        block, text = case.sentences[number]
        title, body = case.blocks[block]
        if drawn.random() >= _KEPT_SENTENCE:
            body = body.replace(text, " ", 1)
        return InputExample(texts=[text, (title, body)])

    loss = losses.MultipleNegativesRankingLoss
    return Recipe(32, 2e-5, "WarmupLinear", loss, example)


def margin_mse(case: Case) -> Recipe:
    """Returns the recipe of GPL's loss.

    Its margins are those of BM25, as far apart as the encoder's own are.
    """
    negatives = dict(np.load(case.folder / "negatives.npz"))
    few = range(0, len(case.sentences), max(1, len(case.sentences) // _FEW))
    texts = [case.sentences[i][1] for i in few]
    own = [case.blocks[case.sentences[i][0]] for i in few]
    others = [case.blocks[negatives["blocks"][i, 0]] for i in few]
    model = open_encoder(case.folder / "encoder")
    x, right, wrong = (np.asarray(model.encode(t)) for t in (texts, own, others))
    spread = np.std((x * (right - wrong)).sum(axis=1))
    negatives["margins"] *= spread / negatives["margins"][list(few), 0].std()

    def example(number: int, drawn: random.Random) -> InputExample:
        block, text = case.sentences[number]
        one = drawn.randrange(negatives["blocks"].shape[1])
        found = case.blocks[negatives["blocks"][number, one]]
        margin = float(negatives["margins"][number, one])
        return InputExample(texts=[text, case.blocks[block], found], label=margin)

    return Recipe(32, 2e-5, "WarmupLinear", losses.MarginMSELoss, example)


RECIPES = {"tsdae": tsdae, "simcse": simcse, "ict": ict, "margin_mse": margin_mse}


class Drawn(torch.utils.data.Dataset):
    """Examples of sentences, drawn anew each time."""

    def __init__(self, recipe: Recipe, count: int, seed: int):
        self._recipe = recipe
        self._count = count
        self._drawn = random.Random(seed)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> InputExample:
        return self._recipe.example(number, self._drawn)


def open_encoder(folder: pathlib.Path) -> SentenceTransformer:
    """Opens the encoder of a case."""
    model = SentenceTransformer(str(folder), device="cpu")
    if not (folder / "modules.json").exists():
        model.append(models.Normalize())
    return model


def train(
    model: SentenceTransformer,
    loss: torch.nn.Module,
    case: Case,
    recipe: Recipe,
    updates: int,
    seed: int,
) -> None:
    """Trains a model in place by a loss of it."""
    drawn = Drawn(recipe, len(case.sentences), seed)
    batches = torch.utils.data.DataLoader(
        drawn,
        recipe.batch,
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(seed),
    )
    model.fit(
        train_objectives=[(batches, loss)],
        epochs=1,
        steps_per_epoch=updates,
        scheduler=recipe.scheduler,
        warmup_steps=math.ceil(0.1 * updates),
        optimizer_params={"lr": recipe.rate},
        weight_decay=0.0 if recipe.scheduler == "constantlr" else 0.01,
        show_progress_bar=False,
    )


def updates_in(
    model: SentenceTransformer, case: Case, recipe: Recipe, seconds: float
) -> int:
    """Returns how many updates take so much processor time, by a few of a copy."""
    copied = copy.deepcopy(model)
    loss = recipe.loss(copied)
    train(copied, loss, case, recipe, 2, seed=0)
    began = time.process_time()
    train(copied, loss, case, recipe, _TIMED_UPDATES, seed=0)
    each = (time.process_time() - began) / _TIMED_UPDATES
    return max(1, round(seconds / each))


def main() -> None:
    """Runs one method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", choices=("untouched", *RECIPES))
    parser.add_argument("case", type=pathlib.Path)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    torch.manual_seed(flags.seed)
    case = read_case(flags.case)
    model = open_encoder(flags.case / "encoder")
    updates, seconds = 0, 0.0
    if flags.method != "untouched":
        recipe = RECIPES[flags.method](case)
        budget = 60 * flags.minutes * flags.threads
        updates = updates_in(model, case, recipe, budget)
        torch.manual_seed(flags.seed)
        loss = recipe.loss(model)
        began = time.process_time()
        train(model, loss, case, recipe, updates, flags.seed)
        seconds = (time.process_time() - began) / flags.threads
    blocks, queries = (
        np.asarray(model.encode(texts, batch_size=32, show_progress_bar=False))
        for texts in (case.blocks, case.queries)
    )
    np.savez(flags.output, blocks=blocks, queries=queries)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    found = {"updates": updates, "minutes": seconds / 60, "peak_gib": peak}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
