"""Provides BERT's WordPiece tokenizer, with character offsets into the input text."""

import functools
import hashlib
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.trainers import WordPieceTrainer

from realm_jax.errors import BadInputError

PAD, UNK, CLS, SEP, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
SPECIAL_PIECES = (PAD, UNK, CLS, SEP, MASK)

# BERT's `tokenization.py` maps longer words to [UNK]; ports that use 100 differ.
_MAX_WORD_LENGTH = 200
# Characters in the alphabet of a trained vocabulary: this many, and more where the text
# needs them (Korean has 11,172 syllables). A word with any other character is [UNK].
_MIN_ALPHABET = 1000
_ALPHABET_COVERAGE = 0.9995
# Words whose ids are kept, about 30 MB; then it begins anew, with the frequent ones.
_MAX_KEPT_WORDS = 1 << 17


@dataclass(frozen=True)
class Encoding:
    """The wordpieces of one text.

    Attributes:
      ids: wordpiece ids, without [CLS] and [SEP].
      offsets: for each piece, its characters in the original text as [start, end).
    """

    ids: Int32[np.ndarray, " length"]
    offsets: Int32[np.ndarray, "length 2"]

    def __len__(self) -> int:
        return len(self.ids)


class WordPiece:
    """BERT's tokenizer over one vocabulary.

    Text never produces a special piece: `[MASK]` written in a document is tokenized as
    a bracket, a word and a bracket, as in BERT's own code.

    Attributes:
      pad, unk, cls, sep, mask: ids of the special pieces; pad is always 0.
      size: number of pieces in the vocabulary.
      id_dtype: the smallest unsigned integer type that holds all ids, used to store
        them: uint16 for 257 to 65,536 pieces.
      lowercase: whether text is lowercased.
      strip_accents: whether accents are removed.
      tokenize_chinese_chars: whether each Chinese character is a word of its own.
      fingerprint: SHA-256 (hex) of the vocabulary and of these three settings.
    """

    def __init__(
        self,
        pieces: Sequence[str],
        *,
        lowercase: bool = True,
        strip_accents: bool | None = None,
        tokenize_chinese_chars: bool = True,
    ):
        """Creates a tokenizer from `pieces`, listed in the order of their ids.

        Args:
          lowercase: whether text is lowercased: False for a cased vocabulary.
          strip_accents: whether accents are removed. None follows BERT, which strips
            them if and only if text is lowercased. To strip accents BERT decomposes
            characters (NFD): a Korean syllable becomes two or three letters, each at
            least one wordpiece. Use False for vocabularies of whole syllables and for
            languages in which accents are distinctive.
          tokenize_chinese_chars: whether each Chinese character is a word of its own,
            as in BERT: False for vocabularies with words of several.
        """
        vocabulary = _checked_vocabulary(pieces)
        self.pieces = tuple(pieces)
        self.lowercase = lowercase
        self.strip_accents = lowercase if strip_accents is None else strip_accents
        self.size = len(pieces)
        self.id_dtype = np.min_scalar_type(self.size - 1)
        self.pad, self.unk, self.cls, self.sep, self.mask = (
            vocabulary[piece] for piece in SPECIAL_PIECES
        )
        self.tokenize_chinese_chars = tokenize_chinese_chars
        content = "\n".join([_rules(**self.settings), *pieces])
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()
        normalizer = _normalizer(**self.settings)
        self._tokenizer = _bert_tokenizer(vocabulary, normalizer)
        self._kept: dict[str, bytes] = {}

    @classmethod
    def load(
        cls,
        vocab_file: str | os.PathLike[str],
        lowercase: bool = True,
        *,
        strip_accents: bool | None = None,
        tokenize_chinese_chars: bool = True,
    ) -> "WordPiece":
        """Reads `vocab.txt`: a piece per line, ids are line numbers counted from 0."""
        try:
            text = Path(vocab_file).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise BadInputError(
                f"expected a WordPiece vocabulary (UTF-8, one piece a line) at "
                f"{vocab_file}, but it cannot be read ({error}); check the path."
            ) from error
        try:
            return cls(
                _lines(text),
                lowercase=lowercase,
                strip_accents=strip_accents,
                tokenize_chinese_chars=tokenize_chinese_chars,
            )
        except BadInputError as error:
            raise BadInputError(f"{vocab_file}: {error}") from error

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        size: int,
        path: str | os.PathLike[str],
        *,
        lowercase: bool = True,
        strip_accents: bool | None = None,
        characters: Iterable[str] = (),
    ) -> "WordPiece":
        """Learns a vocabulary of at most `size` pieces and writes it to `path`.

        The same texts give the same file.

        Args:
          size: largest number of pieces. The thousand most frequent characters are
            among them, or as many as make up 99.95 % of the text if those are more.
          characters: characters that are in the vocabulary even if the texts lack
            them, as the first of a word and within one.
        """
        strip = lowercase if strip_accents is None else strip_accents
        normalizer = _normalizer(lowercase, strip)
        pieces = _train_pieces(list(texts), size, normalizer, characters)
        wordpiece = cls(pieces, lowercase=lowercase, strip_accents=strip_accents)
        wordpiece.save(path)
        return wordpiece

    @property
    def settings(self) -> dict[str, bool]:
        """How text is read: arguments of `__init__`, by name."""
        return {
            "lowercase": self.lowercase,
            "strip_accents": self.strip_accents,
            "tokenize_chinese_chars": self.tokenize_chinese_chars,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `vocab.txt` atomically."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text("\n".join(self.pieces) + "\n", encoding="utf-8")
        os.replace(temporary, path)

    def save_pair_tokenizer(self, path: str | os.PathLike[str]) -> None:
        """Writes `tokenizer.json` of the `tokenizers` library for a model's inputs.

        It reads a text as `[CLS] x [SEP]`, a pair as `[CLS] x [SEP] y [SEP]`, of which
        `y [SEP]` are segment 1.
        """
        tokenizer = Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{CLS} $A {SEP}",
            pair=f"{CLS} $A {SEP} $B:1 {SEP}:1",
            special_tokens=[(CLS, self.cls), (SEP, self.sep)],
        )
        tokenizer.save(os.fspath(path))

    def encode(self, text: str) -> Encoding:
        """Returns the wordpieces of `text` without special pieces."""
        return _encoding(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_batch(self, texts: Sequence[str]) -> list[Encoding]:
        """Returns the wordpieces of each text, in the given order."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [_encoding(encoding) for encoding in encodings]

    def ids_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " length"]]:
        """Returns the ids of `encode_batch` alone, in a fraction of its time.

        A space ends a word, whatever stands beside it: no accent moves across one, and
        no other rule looks at more than a character. So texts are cut at spaces, and
        each distinct word is tokenized once. The arrays cannot be written to.
        """
        words = [text.split(" ") for text in texts]
        if len(self._kept) > _MAX_KEPT_WORDS:
            self._kept.clear()
        self._keep(list(set().union(*words).difference(self._kept)))
        ids_of = self._kept.__getitem__
        return [np.frombuffer(b"".join(map(ids_of, of)), np.int32) for of in words]

    def _keep(self, words: list[str]) -> None:
        """Tokenizes words, which may hold any character, and keeps their ids."""
        pieces = self._tokenizer.encode(
            words, is_pretokenized=True, add_special_tokens=False
        )
        counts = np.bincount(np.array(pieces.word_ids, int), minlength=len(words))
        ids = np.array(pieces.ids, np.int32).tobytes()
        ends = (counts.cumsum() * np.dtype(np.int32).itemsize).tolist()
        for word, start, end in zip(words, [0, *ends], ends, strict=False):
            self._kept[word] = ids[start:end]

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what is kept for speed alone, when a worker is sent this."""
        return {**self.__dict__, "_kept": {}}

    @functools.cached_property
    def is_inner(self) -> Bool[np.ndarray, " vocab"]:
        """True for pieces that continue a word ("##able"), False for others ("un")."""
        return np.array([p.startswith("##") and len(p) > 2 for p in self.pieces])

    def decode(self, ids: Iterable[int]) -> str:
        """Returns readable text for `ids`; padding is left out.

        Case and spacing of the original are lost: to quote a document, use offsets.
        Decomposed letters are composed again (NFC), so that Korean reads as written.
        """
        [text] = self.decode_parts([ids])
        return text

    def decode_parts(self, parts: Iterable[Iterable[int]]) -> list[str]:
        """Returns readable text for consecutive parts of one sequence of ids.

        Joined, the texts are `decode` of the whole sequence: a part begins with the
        space that separates it from the one before, if there is one.
        """
        texts: list[str] = []
        ids: list[int] = []
        end = 0
        for part in parts:
            ids += [int(i) for i in part if i != self.pad]
            # A piece is decoded without regard to those that follow.
            text = self._tokenizer.decode(ids, skip_special_tokens=False)
            texts.append(unicodedata.normalize("NFC", text[end:]))
            end = len(text)
        return texts


def _encoding(encoding) -> Encoding:
    offsets = np.array(encoding.offsets, np.int32).reshape(-1, 2)
    return Encoding(ids=np.array(encoding.ids, np.int32), offsets=offsets)


def _lines(text: str) -> list[str]:
    """Returns the pieces of a vocabulary file.

    Only a newline ends a line: `str.splitlines` would also split at pieces of published
    multilingual vocabularies that Unicode counts as line ends, and shift all ids.
    """
    lines = text.removesuffix("\n").split("\n")
    return [line.strip() or line for line in lines]


def _rules(lowercase: bool, strip_accents: bool, tokenize_chinese_chars: bool) -> str:
    # BERT's defaults are not spelled out.
    rules = "lowercase" if lowercase else "cased"
    if strip_accents != lowercase:
        rules += f", accents {'stripped' if strip_accents else 'kept'}"
    return rules if tokenize_chinese_chars else f"{rules}, Chinese words whole"


def _checked_vocabulary(pieces: Sequence[str]) -> dict[str, int]:
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    missing = [piece for piece in SPECIAL_PIECES if piece not in vocabulary]
    if missing:
        raise BadInputError(
            f"expected a BERT vocabulary with {', '.join(SPECIAL_PIECES)}, but "
            f"{', '.join(missing)} is missing among {len(pieces)} pieces; pass BERT's "
            "vocab.txt."
        )
    if vocabulary[PAD] != 0:
        raise BadInputError(
            f"expected {PAD} to be piece 0, but it is piece {vocabulary[PAD]}; move it "
            "to the first line of the vocabulary."
        )
    if len(vocabulary) != len(pieces):
        repeated = Counter(pieces).most_common(1)[0][0]
        raise BadInputError(
            f"expected every piece once, but {repeated!r} occurs more often; remove "
            "the repeated lines."
        )
    return vocabulary


def _normalizer(
    lowercase: bool, strip_accents: bool, tokenize_chinese_chars: bool = True
) -> normalizers.Normalizer:
    bert = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=tokenize_chinese_chars,
        strip_accents=strip_accents,
        lowercase=lowercase,
    )
    if strip_accents:
        return bert
    # Accents that stay are spelled as vocabularies do, whatever a text does.
    return normalizers.Sequence([normalizers.NFC(), bert])


def _bert_tokenizer(
    vocabulary: dict[str, int], normalizer: normalizers.Normalizer
) -> Tokenizer:
    tokenizer = Tokenizer(
        models.WordPiece(
            vocab=vocabulary,
            unk_token=UNK,
            max_input_chars_per_word=_MAX_WORD_LENGTH,
        )
    )
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def _train_pieces(
    texts: Sequence[str],
    size: int,
    normalizer: normalizers.Normalizer,
    characters: Iterable[str],
) -> list[str]:
    if size <= len(SPECIAL_PIECES):
        raise BadInputError(
            f"expected a vocabulary size above {len(SPECIAL_PIECES)}, got {size}; "
            "choose a larger one."
        )
    if not any(text.strip() for text in texts):
        raise BadInputError(
            "expected text to learn a vocabulary from, got none; check the corpus."
        )
    # The trainer numbers word-inner characters in the order of a randomised hash table
    # and breaks ties between pairs by number. A first pass without merges finds those
    # characters; the second receives them in order, which makes it deterministic. It
    # receives the alphabet too, so as not to choose among equally rare characters.
    # It sees the characters that are asked for too, alone and within a word.
    wanted = sorted(set(characters))
    words = [text for character in wanted for text in (character, character * 2)]
    alphabet = _alphabet(texts, normalizer)
    alphabet += [c for c in _alphabet(words, normalizer) if c not in set(alphabet)]
    single = _run_trainer([*texts, *words], 0, alphabet, normalizer, SPECIAL_PIECES)
    inner = sorted(piece for piece in single if piece.startswith("##") and piece[2:])
    first = (*SPECIAL_PIECES, *inner)
    pieces = _run_trainer(texts, size, alphabet, normalizer, first)
    if len(pieces) > size:
        raise BadInputError(
            f"expected a vocabulary_size of at least {len(pieces)}, which the "
            f"characters alone take, got {size}; raise it."
        )
    return pieces


def _alphabet(texts: Iterable[str], normalizer: normalizers.Normalizer) -> list[str]:
    """Returns the most frequent characters, the alphabet of a vocabulary."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(normalizer.normalize_str(text))
    characters = sorted(
        (character for character in counts if not character.isspace()),
        key=lambda character: (-counts[character], character),
    )
    if not characters:
        return []
    covered = np.cumsum([counts[character] for character in characters])
    needed = int(np.searchsorted(covered, _ALPHABET_COVERAGE * covered[-1])) + 1
    return characters[: max(_MIN_ALPHABET, needed)]


def _run_trainer(
    texts: Sequence[str],
    size: int,
    alphabet: Sequence[str],
    normalizer: normalizers.Normalizer,
    first: Sequence[str],
) -> list[str]:
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNK))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = WordPieceTrainer(
        vocab_size=size,
        special_tokens=list(first),
        initial_alphabet=list(alphabet),
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    vocabulary = tokenizer.get_vocab()
    return sorted(vocabulary, key=vocabulary.__getitem__)
