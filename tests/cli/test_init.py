"""`realm init` writes a chain that the launcher runs as it is."""

import json
import pathlib
import re
import string
import threading

import numpy as np
import pytest

from realm_jax.cli.init import corpus_name
from realm_jax.data.questions import read_questions
from realm_jax.errors import BadInputError
from realm_jax.prepare import first_chain, text_sample
from realm_jax.prepare.first_chain import Questions
from realm_jax.prepare.prepare import require_task_name
from tests import tiny_run
from tests.cli.chains import configs_of, stages_of, write_articles, write_encoder
from tests.json_lines import write_lines


@pytest.fixture
def text(tmp_path, monkeypatch):
    """A folder with articles.jsonl and questions.jsonl, which have what they must."""
    monkeypatch.chdir(tmp_path)
    tiny_run.make_inputs(tmp_path, num_articles=20)
    for name, fields in {
        "articles": ("title", "text"),
        "questions": ("question", "answers"),
    }.items():
        path = tmp_path / f"{name}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        write_lines(path, [{field: line[field] for field in fields} for line in lines])
    return tmp_path


ALPHABET = string.ascii_lowercase + string.digits
INIT = ["init", "runs/my", "--source=articles.jsonl"]


def words_of_the_text():
    text = pathlib.Path("articles.jsonl").read_text().lower()
    return sorted(set(re.findall(r"[a-z]{2,}", text)))


def test_all_stages_read_what_it_writes(text, realm):
    said = realm(*INIT, "--questions=questions.jsonl", "--weights=")
    assert "20 documents" in said
    assert "14 train, 2 dev, 4 test" in said
    assert "--gin_file=runs/my/chain.gin" in said
    assert 'realm ask runs/my "your question" --hybrid' in said
    configs = configs_of("runs/my/chain.gin")
    assert list(configs["evaluate"].baselines) == ["hybrid"]
    assert list(configs) == list(tiny_run.CHAIN)
    assert configs["prepare"].source == "articles.jsonl"
    assert configs["prepare"].questions == "runs/my/questions.jsonl"
    assert configs["pretrain"].warm_start == "runs/my/warm_start"
    assert configs["finetune"].task == "my_questions"
    assert configs["evaluate"].finetuned.model_dir == "runs/my/finetune"
    assert {config.corpus for config in configs.values()} == {"runs/my/corpus"}


def test_paths_and_names_may_have_any_character(text, realm):
    source = text / """it's "my" text.jsonl"""
    (text / "articles.jsonl").rename(source)
    realm("init", "My Text-2", f"--source={source}", "--weights=")
    config = configs_of("My Text-2/chain.gin")["prepare"]
    assert config.source == str(source)
    assert config.name == "my_text_2"


@pytest.mark.parametrize(
    ("folder", "name"),
    [("münchen", "m_nchen"), ("東京", "corpus"), ("2024", "corpus_2024")],
)
def test_names_of_folders_become_names_that_prepare_takes(folder, name):
    assert corpus_name(pathlib.Path(folder)) == name
    require_task_name(name)


def test_questions_about_unknown_articles_are_counted_and_named(text, realm):
    known = json.loads((text / "articles.jsonl").read_text().split("\n")[0])["title"]
    path = text / "questions.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line, title in zip(lines, [f" {known}_", *["No Such Page"] * 2], strict=False):
        line["title"] = title
    write_lines(path, lines)
    said = realm(*INIT, "--questions=questions.jsonl", "--weights=")
    assert "warning: 2 of 3 questions with a title name an article" in said
    assert "'No Such Page';" in said


def test_without_questions_it_ends_before_fine_tuning(text, realm):
    assert "  realm search runs/my " in realm(*INIT, "--weights=")
    stages = configs_of("runs/my/chain.gin")
    assert list(stages) == ["prepare", "warm-start", "pretrain"]


def test_published_weights_are_started_from(text, realm):
    weights = text / "weights"
    write_encoder(weights, ALPHABET, words_of_the_text())
    said = realm(*INIT, "--questions=questions.jsonl", f"--weights={weights}")
    assert "for English text --start=runs/quickstart goes on from" in said
    configs = configs_of("runs/my/chain.gin")
    assert configs["warm-start"].warm_start == str(weights)
    assert configs["prepare"].vocabulary == f"{weights}/vocab.txt"
    assert configs["pretrain"].refresh_period == 12
    assert configs["pretrain"].max_staleness_steps == 12


def test_a_large_text_has_no_index_to_wait_for_and_no_words_to_count(
    text, monkeypatch, realm
):
    for bound in ("_MOST_BLOCKS_TO_WAIT_FOR", "_MOST_BLOCKS_BY_WORDS"):
        monkeypatch.setattr(first_chain, bound, 10)
    write_encoder(text / "weights", ALPHABET, words_of_the_text())
    said = realm(*INIT, "--questions=questions.jsonl", "--weights=weights")
    assert "--hybrid" not in said
    configs = configs_of("runs/my/chain.gin")
    config = configs["pretrain"]
    assert config.refresh_period == config.train_steps
    assert config.max_staleness_steps is None
    assert not configs["evaluate"].baselines


LOWER_CASE = [
    " ".join(
        f"{word}{(i * k) % 23} of the flow" for k, word in enumerate("abcdefgh", 1)
    )
    for i in range(40)
]


@pytest.mark.full  # Each prepares a corpus.
@pytest.mark.parametrize(
    ("texts", "more", "kind"),
    [
        (LOWER_CASE, [], "terms"),
        (LOWER_CASE, ["--masks=random_tokens"], "random_tokens"),
        # Each is unlike the others, so no term of one is in another.
        (["".join(chr(97 + i) * 3 for _ in range(40)) + " x" for i in range(26)], [],
         "random_spans"),
        (["\n\n".join("".join(chr(0xE01 + i * j % 41) for j in range(k, k + 60))
                      for k in (1, 9)) for i in range(30)], [], "random_tokens"),
    ],
)  # fmt: skip
def test_text_without_names_has_masks_that_are_prepared(texts, more, kind, text, realm):
    write_articles(texts)
    assert f"masks: {kind}, about " in realm(*INIT, "--weights=", *more)
    (_, prepare, config), (_, _, warm_start), (_, _, pretrain) = stages_of(
        "runs/my/chain.gin"
    )
    assert pretrain.task == warm_start.task == f"my_{kind}"
    assert list(config.examples) == ["ict", kind]
    realm(*prepare, f'--gin.EXAMPLES=["{kind}"]')
    for split in ("train", "validation"):
        assert pathlib.Path(f"runs/my/corpus/examples/my_{kind}/{split}").is_dir()


def test_text_that_cannot_be_masked_or_read_from_nothing(text, realm, refuse):
    write_articles(LOWER_CASE)
    refuse([*INIT, "--weights=", "--masks=salient"], "other masks by --masks")
    # Single short sentences need a trained encoder.
    write_articles([f"Town{i} burnt down in {1200 + i}." for i in range(40)])
    refuse([*INIT, "--weights="], "--weights=FOLDER")
    write_encoder(text / "weights", ALPHABET, words_of_the_text())
    realm(*INIT, "--weights=weights")


def test_a_vocabulary_that_lacks_the_script_is_not_used(
    text, monkeypatch, realm, refuse
):
    weights = text / "weights"
    write_encoder(weights, string.ascii_lowercase)
    write_articles([f"東京は{'日本の首都である。' * 12}" for _ in range(20)])
    refuse([*INIT, f"--weights={weights}"], "are [UNK]", "--weights=''")
    # Weights that are only found, not asked for, are passed over.
    monkeypatch.setattr("realm_jax.prepare.encoder_start._MINILM", weights)
    assert "trained on the text; in MiniLM's" in realm(*INIT)
    config = configs_of("runs/my/chain.gin")["prepare"]
    assert (config.vocabulary, config.strip_accents) == ("", False)


def test_a_vocabulary_that_has_only_the_alphabet_is_not_used(text, refuse):
    write_encoder(text / "weights", ALPHABET)
    refuse([*INIT, "--weights=weights"], "spells 100% of them letter by letter")


def test_goes_on_from_a_trained_model(text, finished, monkeypatch, realm, refuse):
    start, questions = f"--start={finished}", "--questions=questions.jsonl"
    refuse([*INIT, questions, "--start=runs/none"], "run `make quickstart` first")
    # The chain that it goes on with has the quickstart's size.
    refuse([*INIT, questions, start], "6 layers of 384")
    monkeypatch.setattr("realm_jax.cli.init._MINILM_SIZE", (1, 16))
    realm(*INIT, questions, start)
    configs = configs_of("runs/my/chain.gin")
    assert list(configs) == ["prepare", "finetune", "evaluate"]
    assert configs["prepare"].vocabulary == f"{finished}/corpus/vocab.txt"
    assert list(configs["prepare"].examples) == ["questions"]
    assert configs["finetune"].warm_start == f"{finished}/finetune"
    text_of_chain = (text / "runs/my/chain.gin").read_text()
    assert "finetune/LEARNING_RATE = 3e-5" in text_of_chain
    assert configs["evaluate"].finetuned.model_dir == "runs/my/finetune"
    assert configs["evaluate"].pretrained == ""
    assert configs["evaluate"].masked_task == ""
    # Without questions it needs only the corpus.
    said = realm("init", "runs/other", "--source=articles.jsonl", start)
    assert list(configs_of("runs/other/chain.gin")) == ["prepare"]
    asked = (
        '--corpus=runs/other/corpus --allow_corpus_mismatch "your question" --hybrid'
    )
    assert asked in said
    assert "no fine-tuning: the model answers as it is" in said


def test_passages_without_a_title_are_counted(text, realm):
    passages = [{"text": f"Graz{i} has {i} mills."} for i in range(9)]
    article = {"title": "Graz", "text": "Graz burnt down."}
    write_lines("articles.jsonl", [*passages, article])
    write_encoder(text / "weights", ALPHABET, words_of_the_text())
    said = realm(*INIT, "--weights=weights")
    assert "10 documents (9 without a title), " in said


def test_of_a_large_compressed_file_only_the_beginning_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(text_sample, "SHARD_BYTES", 30_000)
    numbers = np.random.default_rng(0).random((5000, 3))
    lines = [{"text": f"{row} stands here."} for row in numbers]
    path = write_lines(tmp_path / "a.jsonl.gz", lines)
    sample = text_sample.TextSample.read(path, threading.Event())
    assert 500 < len(sample.documents) < 2500
    estimate = sample.scale * len(sample.documents)
    assert estimate == pytest.approx(len(lines), rel=0.1)


class TestSplits:
    def drawn(self, path, questions):
        write_lines(path, [{"question": q, "answers": ["x"]} for q in questions])
        return {q.question: q.split for q in Questions.read(path).questions}

    def test_do_not_depend_on_the_order_of_the_file(self, tmp_path):
        questions = [f"What is {i}?" for i in range(50)]
        path = str(tmp_path / "q.jsonl")
        drawn = self.drawn(path, questions)
        assert drawn == self.drawn(path, questions[::-1])
        counts = [list(drawn.values()).count(s) for s in ("train", "dev", "test")]
        assert counts == [35, 5, 10]

    def test_spellings_of_a_question_are_in_one(self, tmp_path):
        path = str(tmp_path / "q.jsonl")
        for *spellings, other in (
            ["When was {}?", "when was {} ?", "When  was {}? ", "“When was {}”",
             "When was {}x?"],
            ["माला {}?", "माला {} ?", "मेला {}?"],
            ["É {}", "E\u0301 {}", "E {}"],
        ):  # fmt: skip
            asked = [[s.format(f"t{i}") for s in spellings] for i in range(20)]
            others = [other.format(f"t{i}") for i in range(20)]
            drawn = self.drawn(
                path, [*(one for alike in asked for one in alike), *others]
            )
            splits = [{drawn[one] for one in alike} for alike in asked]
            assert all(len(found) == 1 for found in splits)
            # Another question is not drawn with it.
            pairs = zip(splits, others, strict=True)
            assert any(drawn[one] not in found for found, one in pairs)

    def test_an_id_that_occurs_twice_is_refused_with_its_lines(self, tmp_path):
        path = tmp_path / "q.jsonl"
        line = '{"id": "a", "question": "Who?", "answers": ["x"]}'
        path.write_text(f"{line}\n\n{line}")
        with pytest.raises(BadInputError, match=r"jsonl:3: .* as on line 1"):
            Questions.read(str(path))

    def test_of_the_file_are_kept(self, text, realm):
        tiny_run.make_inputs(text, num_articles=20)
        before = read_questions("questions.jsonl")
        realm(*INIT, "--questions=questions.jsonl", "--weights=")
        assert not pathlib.Path("runs/my/questions.jsonl").exists()
        config = configs_of("runs/my/chain.gin")["prepare"]
        assert read_questions(config.questions) == before


def test_bad_input_is_one_line_and_writes_nothing(text, refuse):
    (text / "weights").mkdir()
    for name in ("model.safetensors", "vocab.txt"):
        (text / "weights" / name).touch()
    (text / "weights/tokenizer_config.json").write_text('{"do_lower_case": 3}')
    for more, word in (
        ("--questions=none.jsonl", "none.jsonl"),
        ("--weights=nowhere", "vocab.txt"),
        ("--weights=weights", "'do_lower_case' is 3"),
        ("--stages=3", "--stages"),
        ("--name=my-text", "got 'my-text'"),
    ):
        refuse([*INIT, more], word)
    articles = text / "articles.jsonl"
    articles.write_text('{"title": "A", "text": "Short."}\n')
    refuse(INIT, "8 blocks", "1 documents")
    articles.write_text("")
    refuse(INIT, "empty")
    assert not (text / "runs").exists()


@pytest.mark.usefixtures("text")
def test_a_chain_that_is_there_is_not_overwritten(realm, refuse):
    realm(*INIT, "--weights=")
    before = pathlib.Path("runs/my/chain.gin").read_text()
    refuse([*INIT, "--weights=", "--name=other"], "delete")
    assert pathlib.Path("runs/my/chain.gin").read_text() == before
