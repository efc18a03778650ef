"""Settings beside a vocabulary, against the wordpieces of `transformers`."""

import json

import pytest

from realm_jax.data.documents import Document
from realm_jax.data.tokenizer_files import load_vocabulary
from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece
from tests.corpus_builder import build_corpus
from tests.refused import refused

_SPACED = "The the café cafe Café Cafe ##s in 東 京 東京 ##京 タワー ##タワー ."
PIECES = _SPACED.split()
TEXT = "The Cafés in 東京タワー."
CONFIG, TOKENIZER = "tokenizer_config.json", "tokenizer.json"


@pytest.fixture
def folder(tmp_path):
    WordPiece([*SPECIAL_PIECES, *PIECES]).save(tmp_path / "vocab.txt")
    return tmp_path


def write(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def read(folder, text=TEXT, **given):
    vocabulary = load_vocabulary(folder / "vocab.txt", **given)
    return " ".join(vocabulary.pieces[i] for i in vocabulary.encode(text).ids)


def test_text_is_read_as_the_tokenizer_files_say(folder):
    cased, kept = {"do_lower_case": False}, {"strip_accents": False}
    chinese = {"tokenize_chinese_chars": False}
    for config, pieces in [
        # What `BertTokenizer.from_pretrained` of transformers 5.24 makes of the text.
        ({"do_lower_case": True}, "the cafe ##s in 東 京 タワー ."),
        (cased, "The Café ##s in 東 京 タワー ."),
        ({"do_lower_case": True} | kept, "the café ##s in 東 京 タワー ."),
        (cased | {"strip_accents": True}, "The Cafe ##s in 東 京 タワー ."),
        (cased | {"strip_accents": None}, "The Café ##s in 東 京 タワー ."),
        (cased | chinese, "The Café ##s in 東京 ##タワー ."),
        (kept, "the café ##s in 東 京 タワー ."),
        (chinese, "the cafe ##s in 東京 ##タワー ."),
    ]:
        # It decides, as in `transformers`, whatever stands in the other file.
        other = {"type": "BertNormalizer", "lowercase": not config.get("do_lower_case")}
        write(folder, tokenizer_config=config, tokenizer={"normalizer": other})
        assert read(folder) == pieces, config
        # The same settings as the library `tokenizers` names them.
        renamed = {"do_lower_case": "lowercase"}
        renamed["tokenize_chinese_chars"] = "handle_chinese_chars"
        normalizer = {renamed.get(name, name): value for name, value in config.items()}
        normalizer["type"] = "BertNormalizer"
        empty = {"model_max_length": 512, "do_lower_case": None}
        write(folder, tokenizer_config=empty, tokenizer={"normalizer": normalizer})
        assert read(folder) == pieces, config


def test_without_files_capitals_make_a_vocabulary_cased(folder):
    assert read(folder) == "The Café ##s in 東 京 タワー ."
    assert read(folder, lowercase=True) == "the cafe ##s in 東 京 タワー ."
    lower = [*SPECIAL_PIECES, *(piece for piece in PIECES if piece.islower())]
    WordPiece(lower).save(folder / "vocab.txt")
    assert read(folder, "The Cafés") == "the cafe ##s"


def test_a_corpus_and_its_vocabulary_keep_the_settings(folder):
    write(folder, tokenizer_config={"do_lower_case": True})
    for setting in ("lowercase", "tokenize_chinese_chars"):
        vocabulary = WordPiece.load(folder / "vocab.txt", **{setting: False})
        cafes = [Document("The Cafe", TEXT, "0")]
        store = build_corpus(cafes, folder / setting, vocabulary, chunk_length=40)
        assert store.info[setting] is False
        for found in (store.vocabulary, load_vocabulary(store.directory / "vocab.txt")):
            assert found.settings == vocabulary.settings
            assert found.fingerprint == vocabulary.fingerprint


def test_a_setting_that_contradicts_the_files_is_refused(folder):
    write(folder, tokenizer_config={"do_lower_case": True})
    for name in ("lowercase", "strip_accents", "tokenize_chinese_chars"):
        assert read(folder, **{name: True}) == read(folder)
        with refused(f"{name}=True as in .*{CONFIG}, got .*"):
            read(folder, **{name: False})


def test_what_is_not_berts_or_cannot_be_read_is_refused(folder):
    odd = '{"normalizer": {"type": "BertNormalizer", "lowercase": 1}}'
    for file, content, said in [
        (CONFIG, "[1", "delimiter"),
        (CONFIG, "[1]", "no object"),
        (CONFIG, '{"do_lower_case": "no"}', "'do_lower_case' is 'no'"),
        (CONFIG, '{"word_tokenizer_type": "mecab"}', "is 'mecab'"),
        (TOKENIZER, "\xff", "decode"),
        (TOKENIZER, '{"normalizer": null}', "is None, not BertNormalizer"),
        (TOKENIZER, '{"normalizer": {"type": "Sequence"}}', "'Sequence', not Bert"),
        (TOKENIZER, odd, "'lowercase' is 1"),
    ]:
        (folder / file).write_bytes(content.encode("latin-1"))
        with refused(rf"in .*{file}, but .*{said}"):
            read(folder)
        (folder / file).unlink()
