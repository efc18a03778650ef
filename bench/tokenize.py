"""Compares WordPiece tokenizers: how fast they are, and where their ids differ.

    python -m bench.tokenize PASSAGES --vocabulary VOCABULARY --page docs/benchmarks.md

`tokenizers`, this project's two ways of using it, and TF-Text's FastBertTokenizer,
which follows other rules of Unicode. They take turns, batch by batch; passages are
tokenized whole, and sentence by sentence to make blocks. Where ids differ, the cause is
found by giving both tokenizers each character of the words that differ.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import statistics
import time
import types
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bench.command import command_line, make_parser, publish, reporting
from bench.machine import machine, today
from bench.tables import table
from realm_jax.data.corpus import chunk_each
from realm_jax.data.documents import Document
from realm_jax.data.salient_spans import PreAnnotated
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError
from realm_jax.prepare.documents.open import open_source
from realm_jax.prepare.documents.source import read_all

BATCH, _CHUNK_LENGTH = 512, 288
_FAST = "FastBertTokenizer"
_THREADS = "TOKENIZERS_PARALLELISM"
# FastBertTokenizer's, which cannot be set.
_LONGEST_WORD = 100
# Beyond printable ASCII the two have other rules, and in longer words another limit.
_MAY_DIFFER = re.compile(rf"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|[^ \t\n\r]{{{101}}}")

Ids = Sequence[np.ndarray | list[int]]
Tokenize = Callable[[Sequence[str]], Ids]


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A tokenizer.

    Attributes:
      start: returns the tokenizer, as it is before it has seen any text.
      threads: whether `tokenizers` may use all cores.
    """

    start: Callable[[], Tokenize]
    gives: str = "ids"
    threads: bool = False

    @property
    def makes_blocks(self) -> bool:
        """Whether blocks could be made with it as well: they need ids, on one core."""
        return self.gives == "ids" and not self.threads


def fast_bert(pieces: Sequence[str], offsets: bool = False) -> Tokenize:
    """Returns TF-Text's FastBertTokenizer.

    With `offsets` it finds the bytes of each wordpiece, too; they are dropped.
    """
    tokenizer = _fast_bert_tokenizer(pieces)

    def tokenize(texts: Sequence[str]) -> Ids:
        if not texts:  # Of which it would make a tensor of numbers.
            return []
        if offsets:
            ids, _, _ = tokenizer.tokenize_with_offsets(list(texts))
        else:
            ids = tokenizer.tokenize(list(texts))
        return np.split(ids.flat_values.numpy(), ids.row_splits.numpy()[1:-1])

    return tokenize


@functools.cache
def _fast_bert_tokenizer(pieces: tuple[str, ...]) -> Any:
    # TensorFlow takes seconds to import.
    import tensorflow as tf
    import tensorflow_text

    return tensorflow_text.FastBertTokenizer(
        vocab=list(pieces),
        token_out_type=tf.int32,  # pyright: ignore[reportArgumentType]
        lower_case_nfd_strip_accents=True,
    )


def must_agree(text: str) -> bool:
    """Returns whether both tokenizers are certain to give the same ids."""
    return text.isascii() and not _MAY_DIFFER.search(text)


def combined(fast: Tokenize, exact: Tokenize) -> Tokenize:
    """Returns a tokenizer that takes the fast one where both must agree."""

    def tokenize(texts: Sequence[str]) -> Ids:
        agree = [must_agree(text) for text in texts]
        quick = iter(fast([t for t, same in zip(texts, agree, strict=True) if same]))
        rest = [t for t, same in zip(texts, agree, strict=True) if not same]
        slow = iter(exact(rest))
        return [next(quick if same else slow) for same in agree]

    return tokenize


def contestants(vocabulary: WordPiece) -> dict[str, Contestant]:
    """Returns all that take part, by name; the first is what others are measured by."""
    # What `WordPiece` is built on: the same rules, without this project's arrays.
    peer = vocabulary._tokenizer

    def bare(texts: Sequence[str]) -> Ids:
        return [e.ids for e in peer.encode_batch(texts, add_special_tokens=False)]

    def whole(texts: Sequence[str]) -> Ids:
        return [encoding.ids for encoding in vocabulary.encode_batch(texts)]

    def fresh() -> Tokenize:
        pieces, lowercase = vocabulary.pieces, vocabulary.lowercase
        return WordPiece(pieces, lowercase=lowercase).ids_batch

    fast = functools.partial(fast_bert, vocabulary.pieces)
    both = "ids and offsets"
    return {
        "tokenizers": Contestant(lambda: bare, both),
        "tokenizers, its threads on": Contestant(lambda: bare, both, threads=True),
        "WordPiece.encode_batch": Contestant(lambda: whole, both),
        "the same, its ids alone": Contestant(lambda: whole),
        "WordPiece.ids_batch": Contestant(fresh),
        _FAST: Contestant(fast),
        "FastBertTokenizer, with offsets": Contestant(
            functools.partial(fast, offsets=True), both
        ),
        "FastBertTokenizer where it must agree": Contestant(
            lambda: combined(fast(), fresh())
        ),
    }


def time_texts(
    entered: Mapping[str, Contestant], batches: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Returns the seconds that each takes for all batches; they take turns."""
    tokenizers = {name: one.start() for name, one in entered.items()}
    seconds = dict.fromkeys(entered, 0.0)
    for turn, batch in enumerate(batches):
        # Another order each time: who comes first finds the texts in no cache.
        for name in _rotated(list(entered), turn):
            with _threads(entered[name].threads):
                began = time.perf_counter()
                tokenizers[name](batch)
                seconds[name] += time.perf_counter() - began
    return seconds


def time_blocks(
    entered: Mapping[str, Contestant],
    batches: Sequence[Sequence[Document]],
    vocabulary: WordPiece,
) -> dict[str, float]:
    """Returns the seconds of making blocks of documents, with each that can."""
    # As a vocabulary: `encode` is asked for sentences longer than a block alone.
    makers = {
        name: types.SimpleNamespace(ids_batch=one.start(), encode=vocabulary.encode)
        for name, one in entered.items()
        if one.makes_blocks
    }
    seconds = dict.fromkeys(makers, 0.0)
    for turn, batch in enumerate(batches):
        for name in _rotated(list(makers), turn):
            with _threads(False):
                began = time.perf_counter()
                chunk_each(batch, makers[name], PreAnnotated(), _CHUNK_LENGTH)  # pyright: ignore[reportArgumentType]
                seconds[name] += time.perf_counter() - began
    return seconds


@contextlib.contextmanager
def _threads(on: bool) -> Iterator[None]:
    """Has `tokenizers` use all cores, or one."""
    os.environ[_THREADS] = "true" if on else "false"
    yield
    del os.environ[_THREADS]


def _rotated(names: list[str], turn: int) -> list[str]:
    first = turn % len(names)
    return names[first:] + names[:first]


class Differences:
    """Counts the passages in which two tokenizers differ, by cause.

    Attributes:
      different: passages with other ids.
      causes: how many of them have a word that differs for that cause; a passage may
        have several.
      examples: characters by cause, with how often they caused a difference.
    """

    def __init__(self, one: Tokenize, other: Tokenize):
        self.passages = self.different = 0
        self.causes: collections.Counter[str] = collections.Counter()
        self.examples: dict[str, collections.Counter[str]] = {}
        self._both = one, other
        self._differs: dict[str, bool] = {}

    def add(self, texts: Sequence[str]) -> None:
        """Compares the ids of passages, and finds the causes where they differ."""
        self.passages += len(texts)
        for text in self._differing(texts):
            self.different += 1
            words = self._differing(list(dict.fromkeys(text.split(" "))))
            found = [cause for word in words for cause in self._causes(word)]
            self.causes.update({cause for cause, _ in found})
            for cause, character in found:
                of_cause = self.examples.setdefault(cause, collections.Counter())
                of_cause[character] += 1

    def _causes(self, word: str) -> list[tuple[str, str]]:
        """Returns the causes of a difference with their characters, "" for others."""
        new = [c for c in dict.fromkeys(word) if c not in self._differs]
        within = self._differing([f"a{c}b" for c in new])
        self._differs |= {c: f"a{c}b" in within for c in new}
        guilty = [c for c in dict.fromkeys(word) if self._differs[c]]
        if guilty:
            return [(rule(c), c) for c in guilty]
        if len(word) > _LONGEST_WORD:
            return [(f"words of {_LONGEST_WORD + 1} to 200 characters", "")]
        return [("several characters together", word)]

    def _differing(self, texts: Sequence[str]) -> list[str]:
        one, other = (tokenize(texts) for tokenize in self._both)
        return [
            text
            for text, mine, theirs in zip(texts, one, other, strict=True)
            if not np.array_equal(mine, theirs)
        ]


def rule(character: str) -> str:
    """Names the rule by which FastBertTokenizer treats a character as BERT does not."""
    category = unicodedata.category(character)
    if category in ("Cc", "Cf"):
        return "control characters: they vanish in BERT, and end a word"
    if category in ("Co", "Cn"):
        return "private and unassigned characters: they vanish in BERT, and are kept"
    whole = unicodedata.normalize("NFD", character)
    if unicodedata.normalize("NFKD", character) != whole:
        return "compatibility characters: kept in BERT, and mapped (NFKC)"
    if character.casefold() != character.lower():
        return "case folding: not in BERT"
    return "character classes of another version of Unicode"


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the seconds of every round, and the differences."""
    vocabulary = WordPiece.load(arguments.vocabulary)
    documents = list(itertools.islice(documents_of(arguments.corpus), arguments.limit))
    if not documents:
        raise BadInputError(
            f"expected passages in {arguments.corpus}, got none; give another file"
        )
    timed = list(batched(documents[: arguments.timed]))
    entered, rounds = contestants(vocabulary), []
    texts = [[document.text for document in batch] for batch in timed]
    time_texts(entered, texts[:1])  # TensorFlow traces, threads start.
    for number in range(arguments.rounds):
        rounds.append({"texts": time_texts(entered, texts)})
        rounds[-1]["blocks"] = time_blocks(entered, timed, vocabulary)
        print(f"round {number + 1}: {json.dumps(rounds[-1])}", flush=True)
    whole, ours, fast = (
        entered[name].start()
        for name in ("WordPiece.encode_batch", "WordPiece.ids_batch", _FAST)
    )
    # The second by way of the first, which is compared with what is slow.
    counted = {"ours": Differences(whole, ours), "fast": Differences(ours, fast)}
    for batch in batched(documents):
        for differences in counted.values():
            differences.add([document.text for document in batch])
    return {
        "timed": sum(map(len, timed)),
        "rounds": rounds,
        "agree": sum(must_agree(document.text) for document in documents),
        "differences": counted,
    }


def markdown(measured: Mapping[str, Any], command: str, vocabulary: WordPiece) -> str:
    """Returns the tables with their command, machine and date."""
    counted: Mapping[str, Differences] = measured["differences"]
    of_fast, of_ours = counted["fast"], counted["ours"]
    heads = ["tokenizer", "gives", "passages/s", "ratio", "passages/s, to blocks"]
    causes = [
        [cause, f"{count:,}", _characters(of_fast.examples[cause])]
        for cause, count in of_fast.causes.most_common()
    ]
    speeds = _speeds(measured, contestants(vocabulary))
    return (
        f"    {command}\n\n{machine()}, {today()}; {measured['timed']:,} passages, "
        f"median of {len(measured['rounds'])} rounds (least to most).\n\n"
        f"{table(heads, speeds)}\n\n"
        f"Other ids than `tokenizers`: FastBertTokenizer in {of_fast.different:,} of "
        f"{of_fast.passages:,} passages ({of_fast.different / of_fast.passages:.1%}), "
        f"WordPiece.ids_batch in {of_ours.different:,}. "
        f"{measured['agree'] / of_fast.passages:.1%} of the passages are of characters "
        "on which both must agree.\n\n"
        f"{table(['cause', 'passages', 'characters'], causes)}\n"
    )


def summary(measured: Mapping[str, Any]) -> dict[str, float]:
    """Returns how many times as fast as `tokenizers` we are, and texts that differ."""
    ratios = [
        r["texts"][next(iter(r["texts"]))] / r["texts"]["WordPiece.ids_batch"]
        for r in measured["rounds"]
    ]
    different = measured["differences"]["ours"].different
    return {"ratio": statistics.median(ratios), "different": different}


def _speeds(
    measured: Mapping[str, Any], entered: Mapping[str, Contestant]
) -> Iterator[list[str]]:
    rates = {
        (kind, name): [measured["timed"] / r[kind][name] for r in measured["rounds"]]
        for kind in ("texts", "blocks")
        for name in measured["rounds"][0][kind]
    }
    base = statistics.median(rates["texts", next(iter(entered))])
    for name, contestant in entered.items():
        mine = rates["texts", name]
        blocks = rates.get(("blocks", name))
        ratio = f"{statistics.median(mine) / base:.1f}"
        made = _spread(blocks) if blocks else ""
        yield [name, contestant.gives, _spread(mine), ratio, made]


def _spread(values: Sequence[float]) -> str:
    middle = f"{statistics.median(values):,.0f}"
    return f"{middle} ({min(values):,.0f} to {max(values):,.0f})"


def _characters(found: Mapping[str, int]) -> str:
    """Returns the most frequent characters of a cause."""
    most = collections.Counter(found).most_common(6)
    shown = [
        f"{c} U+{ord(c):04X}" if c.isprintable() else f"U+{ord(c):04X}"
        for c, _ in most
        if len(c) == 1
    ]
    return ", ".join(shown)


def documents_of(corpus: str) -> Iterator[Document]:
    """Yields the documents of a text, without records that are none."""
    records = read_all(open_source(corpus))
    return (record for record in records if isinstance(record, Document))


def batched(items: Iterable[Any]) -> Iterator[list[Any]]:
    """Yields 512 of the items at a time."""
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, BATCH)):
        yield batch


def main() -> None:
    """Compares, and prints the tables."""
    parser = make_parser(__doc__, "page", "output")
    parser.add_argument("corpus", help="JSON lines, plain or .gz")
    parser.add_argument("--vocabulary", required=True, help="a BERT vocab.txt")
    parser.add_argument("--limit", type=int, help="passages whose ids are compared")
    parser.add_argument("--timed", type=int, default=10_000, help="passages of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="2,000 passages, a round")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.limit, arguments.timed, arguments.rounds = 2000, 2000, 1
    with reporting("tokenize", arguments):
        measured = measure(arguments)
        command = command_line("tokenize", {"PASSAGES": arguments.corpus})
        text = markdown(measured, command, WordPiece.load(arguments.vocabulary))
        publish("tokenize", text, summary(measured), arguments)


if __name__ == "__main__":
    main()
