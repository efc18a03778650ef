"""Loads a vocabulary with the tokenizer settings that stand beside it.

Weights say in `tokenizer_config.json` how their tokenizer reads text, or in the
normalizer of `tokenizer.json`, and a corpus says it in `corpus.json`. The first file
that has one of the settings decides; those it leaves out have BERT's defaults, as in
`transformers`. The vocabulary is in `vocab.txt` or, where there is none, as in folders
that newer versions of `transformers` have written, in `tokenizer.json`.
"""

import os
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from realm_jax.data import blocks
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError
from realm_jax.manifests import parse_json, require_fields

CONFIG_FILE = "tokenizer_config.json"
TOKENIZER_FILE = "tokenizer.json"

# Settings of `WordPiece`, by their names in each file.
_OF_CONFIG = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "tokenize_chinese_chars",
}
_OF_NORMALIZER = {
    "lowercase": "lowercase",
    "strip_accents": "strip_accents",
    "handle_chinese_chars": "tokenize_chinese_chars",
}
_DEFAULTS = {"lowercase": True, "strip_accents": None, "tokenize_chinese_chars": True}
# The key in which `BertJapaneseTokenizer` names what finds its words.
_WORD_TOKENIZER, _BERTS_WORDS = "word_tokenizer_type", "basic"


def load_vocabulary(
    path: str | os.PathLike[str],
    *,
    lowercase: bool | None = None,
    strip_accents: bool | None = None,
    tokenize_chinese_chars: bool | None = None,
) -> WordPiece:
    """Reads `vocab.txt` or `tokenizer.json`, to be used as the files beside it say.

    Without such files BERT's defaults hold, but a vocabulary that has pieces with a
    capital is cased.

    Args:
      lowercase: as in `WordPiece`; None is as the files say, or the default.
    """
    asked = {
        "lowercase": lowercase,
        "strip_accents": strip_accents,
        "tokenize_chinese_chars": tokenize_chinese_chars,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    file, said = read_settings(Path(path).parent)
    settings: dict[str, Any] = given | said
    if "lowercase" not in settings:
        pieces = _load(path).pieces
        settings["lowercase"] = not any("A" <= piece[:1] <= "Z" for piece in pieces)
    vocabulary = _load(path, **settings)
    for name, value in given.items():
        found = vocabulary.settings[name]
        if found != value:
            raise BadInputError(
                f"expected {name}={found} as in {file}, got {name}={value}; prepare "
                f"the corpus without that setting and with VOCABULARY={path}"
            )
    return vocabulary


def vocabulary_file(folder: str | os.PathLike[str]) -> Path | None:
    """Returns the path of the vocabulary in a folder, None if there is none."""
    paths = (Path(folder) / name for name in (blocks.VOCABULARY_FILE, TOKENIZER_FILE))
    return next((path for path in paths if path.exists()), None)


def _load(path: str | os.PathLike[str], **settings: Any) -> WordPiece:
    path = Path(path)
    if path.name != TOKENIZER_FILE:
        return WordPiece.load(path, **settings)
    try:
        model = parse_json(path.read_bytes())["model"]
        if model.get("type", "WordPiece") != "WordPiece":
            raise ValueError(f"its model is {model['type']}")
        if model.get("continuing_subword_prefix", "##") != "##":
            raise ValueError("its words are not continued by ##")
        ids = model["vocab"]
        pieces = sorted(ids, key=ids.__getitem__)
        if [ids[piece] for piece in pieces] != list(range(len(pieces))):
            raise ValueError("its ids are not 0, 1, 2, ...")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInputError(
            f"expected BERT's vocabulary in {path}, got another one ({error!r}); give "
            "a folder with vocab.txt, or with the tokenizer.json of a BERT"
        ) from error
    return WordPiece(pieces, **settings)


def read_settings(
    folder: str | os.PathLike[str],
) -> tuple[Path | None, dict[str, bool | None]]:
    """Returns the file of a folder that has tokenizer settings, and these.

    They are arguments of `WordPiece`; None and none if no file has them.
    """
    folder = Path(folder)
    if (folder / blocks.INFO_FILE).exists():
        info = blocks.read_info(folder)
        return folder / blocks.INFO_FILE, dict(blocks.tokenizer_settings(info))
    for name, parse in ((CONFIG_FILE, _of_config), (TOKENIZER_FILE, _of_tokenizer)):
        file = folder / name
        if not file.exists():
            continue
        try:
            content = parse_json(file.read_bytes())
            require_fields(content, {})
            said = parse(content)
        except (OSError, ValueError) as error:
            raise BadInputError(
                f"expected the settings of BERT's tokenizer in {file}, but they cannot "
                f"be read ({error}); fetch it again, or use weights with a tokenizer "
                "of BERT's kind"
            ) from error
        if said:
            return file, _DEFAULTS | said
    return None, {}


def _of_config(config: Mapping[str, Any]) -> dict[str, bool | None]:
    words = config.get(_WORD_TOKENIZER, _BERTS_WORDS)
    if words != _BERTS_WORDS:
        raise ValueError(f"its {_WORD_TOKENIZER!r} is {reprlib.repr(words)}")
    return _flags(config, _OF_CONFIG)


def _of_tokenizer(tokenizer: Mapping[str, Any]) -> dict[str, bool | None]:
    normalizer = tokenizer.get("normalizer")
    kind = normalizer.get("type") if isinstance(normalizer, dict) else normalizer
    if not isinstance(normalizer, dict) or kind != "BertNormalizer":
        raise ValueError(f"its normalizer is {reprlib.repr(kind)}, not BertNormalizer")
    return _flags(normalizer, _OF_NORMALIZER)


def _flags(
    values: Mapping[str, Any], names: Mapping[str, str]
) -> dict[str, bool | None]:
    """Returns the settings that have a value; null stands for the default."""
    found = {name: values[name] for name in names if values.get(name) is not None}
    require_fields(found, dict.fromkeys(found, bool))
    return {names[name]: value for name, value in found.items()}
