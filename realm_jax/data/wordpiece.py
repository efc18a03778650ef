"""WordPiece as BERT does it, with character offsets into the original text."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int32
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import WordPieceTrainer

from realm_jax.errors import BadInputError

PAD, UNK, CLS, SEP, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
SPECIAL_PIECES = (PAD, UNK, CLS, SEP, MASK)

MAX_PIECES = 65_536
"""Block stores keep wordpieces as uint16."""

# BERT's `tokenization.py` gives up on longer words; ports that say 100 differ from it.
_MAX_WORD_LENGTH = 200
_MAX_ALPHABET = 1000


@dataclass(frozen=True)
class Encoding:
    """The wordpieces of one text.

    Attributes:
      ids: wordpiece ids, no [CLS] or [SEP] added.
      offsets: for each piece, the characters of the original text it stands for, as
        [start, end).
    """

    ids: Int32[np.ndarray, " length"]
    offsets: Int32[np.ndarray, "length 2"]

    def __len__(self) -> int:
        return len(self.ids)


class WordPiece:
    """BERT's tokenizer over one vocabulary.

    Text never produces a special piece: `[MASK]` written in a document is a bracket,
    a word and a bracket, as in BERT's own code.

    Attributes:
      pad, unk, cls, sep, mask: ids of the special pieces; pad is always 0.
      size: pieces in the vocabulary.
      fingerprint: SHA-256 (hex) of the vocabulary and the case rule.
    """

    def __init__(self, pieces: Sequence[str], *, lowercase: bool = True):
        """Makes a tokenizer of `pieces`, listed in the order of their ids.

        Raises:
          BadInputError: the vocabulary cannot serve (see `load`).
        """
        vocabulary = _checked_vocabulary(pieces)
        self.pieces = tuple(pieces)
        self.lowercase = lowercase
        self.size = len(pieces)
        self.pad, self.unk, self.cls, self.sep, self.mask = (
            vocabulary[piece] for piece in SPECIAL_PIECES
        )
        case_rule = "lowercase" if lowercase else "cased"
        content = "\n".join([case_rule, *pieces])
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()
        self._tokenizer = _bert_tokenizer(vocabulary, lowercase)

    @classmethod
    def load(
        cls, vocab_file: str | os.PathLike[str], lowercase: bool = True
    ) -> "WordPiece":
        """Reads `vocab.txt`: one piece a line, the line number is the id.

        Raises:
          BadInputError: the file is missing or not UTF-8, a special piece is missing,
            [PAD] is not piece 0, a piece occurs twice, or there are too many.
        """
        try:
            text = Path(vocab_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadInputError(
                f"expected a WordPiece vocabulary (UTF-8, one piece a line) at "
                f"{vocab_file}, but it cannot be read ({error}); check the path."
            ) from error
        try:
            pieces = [line.strip() for line in text.splitlines()]
            return cls(pieces, lowercase=lowercase)
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
    ) -> "WordPiece":
        """Learns a vocabulary of at most `size` pieces and writes it to `path`.

        The same texts give the same file.

        Raises:
          BadInputError: `size` is out of range or below what the characters of the text
        take, or there is no text.
        """
        pieces = _train_pieces(list(texts), size, lowercase)
        wordpiece = cls(pieces, lowercase=lowercase)
        wordpiece.save(path)
        return wordpiece

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `vocab.txt`, whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text("\n".join(self.pieces) + "\n", encoding="utf-8")
        os.replace(temporary, path)

    def encode(self, text: str) -> Encoding:
        """Returns the wordpieces of `text` without special pieces."""
        return _encoding(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_batch(self, texts: Sequence[str]) -> list[Encoding]:
        """Returns the wordpieces of every text, in the order given."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [_encoding(encoding) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns readable text for `ids`; padding is left out.

        Case and spacing of the original are gone: to quote a document, use offsets.
        """
        kept = [int(i) for i in ids if i != self.pad]
        return self._tokenizer.decode(kept, skip_special_tokens=False)


def _encoding(encoding) -> Encoding:
    offsets = np.array(encoding.offsets, np.int32).reshape(-1, 2)
    return Encoding(ids=np.array(encoding.ids, np.int32), offsets=offsets)


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
    if len(pieces) > MAX_PIECES:
        raise BadInputError(
            f"expected at most {MAX_PIECES} pieces (ids are stored as uint16), got "
            f"{len(pieces)}; pass a smaller vocabulary."
        )
    return vocabulary


def _normalizer(lowercase: bool) -> normalizers.BertNormalizer:
    return normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=True,
        strip_accents=None,  # As `lowercase` says, which is BERT's rule.
        lowercase=lowercase,
    )


def _bert_tokenizer(vocabulary: dict[str, int], lowercase: bool) -> Tokenizer:
    tokenizer = Tokenizer(
        models.WordPiece(
            vocab=vocabulary,
            unk_token=UNK,
            max_input_chars_per_word=_MAX_WORD_LENGTH,
        )
    )
    tokenizer.normalizer = _normalizer(lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def _train_pieces(texts: Sequence[str], size: int, lowercase: bool) -> list[str]:
    if not len(SPECIAL_PIECES) < size <= MAX_PIECES:
        raise BadInputError(
            f"expected a vocabulary size above {len(SPECIAL_PIECES)} and at most "
            f"{MAX_PIECES}, got {size}; choose one in that range."
        )
    if not any(text.strip() for text in texts):
        raise BadInputError(
            "expected text to learn a vocabulary from, got none; check the corpus."
        )
    # The trainer numbers word-inner characters in the order of a randomised hash table
    # and breaks ties between pairs by number. A first pass without merges finds those
    # characters; the second is given them in order, so that it has nothing to draw.
    alphabet = _run_trainer(texts, 0, lowercase, SPECIAL_PIECES)
    inner = sorted(piece for piece in alphabet if piece.startswith("##") and piece[2:])
    pieces = _run_trainer(texts, size, lowercase, (*SPECIAL_PIECES, *inner))
    if len(pieces) > size:
        raise BadInputError(
            f"expected a vocabulary size of at least {len(pieces)}, which the "
            f"characters of the text alone take, got {size}; raise it."
        )
    return pieces


def _run_trainer(
    texts: Sequence[str], size: int, lowercase: bool, first: Sequence[str]
) -> list[str]:
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNK))
    tokenizer.normalizer = _normalizer(lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = WordPieceTrainer(
        vocab_size=size,
        special_tokens=list(first),
        limit_alphabet=_MAX_ALPHABET,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    vocabulary = tokenizer.get_vocab()
    return sorted(vocabulary, key=vocabulary.__getitem__)
