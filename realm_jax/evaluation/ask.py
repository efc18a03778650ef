"""Answers questions with a trained model, from the newest version of its corpus.

A version is a corpus with its index, loaded and with compiled programs. It is replaced
as a whole, between two questions, so that no answer mixes two versions. A thread
prepares the new version while the old one continues to answer. For a later version of
the corpus (`data/versions.py`) only the blocks that changed are embedded, see
`index/embedding_cache.py`.
"""

import dataclasses
import datetime
import functools
import logging
import reprlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from realm_jax import ranges
from realm_jax.answering.answers import Answer
from realm_jax.answering.hybrid import BM25Index
from realm_jax.answering.masks import MaskFiller, has_mask
from realm_jax.answering.reader import Answerer
from realm_jax.data.blocks import BlockStore
from realm_jax.data.versions import newest_version
from realm_jax.errors import BadInputError, StoppedError
from realm_jax.evaluation.loading import (
    FinetunedModel,
    FinishedRun,
    open_finished,
    wanted_of,
)
from realm_jax.index.embed import EmbedConfig
from realm_jax.index.embedding_cache import DOCUMENT_CRC32C
from realm_jax.index.follower import IndexFollower
from realm_jax.index.manifest import Manifest, MismatchedSnapshotError
from realm_jax.index.searchers import SEARCHERS
from realm_jax.index.source import LoadedIndex
from realm_jax.metrics.curves import made_at
from realm_jax.stages import PRETRAIN
from realm_jax.training.checkpoint_manifests import Which
from realm_jax.training.finetune import AnsweringConfig, FinetuneConfig
from realm_jax.training.initialization import described_models
from realm_jax.training.recorded import RecordedRun
from realm_jax.training.stage_config import require_one_of
from realm_jax.types import Lengths

MAX_CHARACTERS = 2000
"""Longest question in characters; the model reads only a part of such a question."""

# An arbitrary question, which shows that a version answers.
_WARM_UP = "who?"

_log = logging.getLogger(__name__)


_PORT = ranges.whole(0, 65535)._replace(
    advice="write PORT=8000 without quotes, or 0 for no page"
)


@dataclasses.dataclass(frozen=True)
class AskConfig:
    """Configuration of the answering model and its interface.

    Attributes:
      corpus: the prepared corpus that the model was fine-tuned on; its newest version
        is used.
      finetuned: the fine-tuned model: how it answers, or how it was fine-tuned.
      pretrained: model directory that fine-tuning began with, or ""; needed to embed
        later versions of the corpus with a model of one tower.
      pretrained_checkpoint: the checkpoint it began with: "last", or "best" by held-out
        utility.
      finetuned_checkpoint: the checkpoint that answers: "last", or "best" by exact
        match on dev, which is the last where that was not measured.
      fills_masks: model directory of pre-training, which fills in sentences with
        [MASK] (`answering/masks.py`); "" for `pretrained`.
      question: one question, or "" to ask at a prompt or on a page.
      host: the address that the page is served on.
      port: port of the page; 0 for no page.
      searcher: "device" (exact) or "scann".
      embed: configuration for making a missing index.
      allow_corpus_mismatch: whether `corpus` may differ from the one the model was
        trained on, with the same vocabulary.
      hybrid: whether BM25's scores are added to the retriever's.
      poll_seconds: interval of checks for a newer version, in seconds.
      allowed_hosts: names that browsers may know the page by, beside localhost and the
        address that it is served on.
    """

    corpus: str
    finetuned: FinetuneConfig | AnsweringConfig
    pretrained: str = ""
    pretrained_checkpoint: str = "last"
    finetuned_checkpoint: str = "best"
    fills_masks: str = ""
    question: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    searcher: str = "device"
    embed: EmbedConfig = dataclasses.field(default_factory=EmbedConfig)
    allow_corpus_mismatch: bool = False
    hybrid: bool = False
    poll_seconds: float = 2.0
    allowed_hosts: Sequence[str] = ()

    def __post_init__(self):
        ranges.require_ranges(
            self, corpus=ranges.PATH, port=_PORT, poll_seconds=ranges.POSITIVE
        )
        require_one_of("SEARCHER", self.searcher, SEARCHERS)
        require_one_of("CHECKPOINT", self.pretrained_checkpoint, Which)
        require_one_of("FINETUNED_CHECKPOINT", self.finetuned_checkpoint, Which)
        if self.port and self.question:
            raise BadInputError(
                f"expected a QUESTION or a PORT, got both ({self.question!r}, "
                f"{self.port}); leave one out"
            )
        hosts = self.allowed_hosts
        if isinstance(hosts, str) or not all(isinstance(name, str) for name in hosts):
            raise BadInputError(
                f"expected ALLOWED_HOSTS, a tuple of names, got {hosts!r}; write "
                "ALLOWED_HOSTS=('box.example',)"
            )


@dataclasses.dataclass(frozen=True)
class Version:
    """A consistent version of a corpus and its index, from which answers are made."""

    answerer: Answerer
    index: LoadedIndex
    checkpoint: int
    """Step of the checkpoint of fine-tuning that answers."""

    @property
    def corpus(self) -> BlockStore:
        """The corpus that answers come from."""
        return self.answerer.corpus

    def describe(self) -> dict[str, Any]:
        """Returns the version as JSON values."""
        manifest = self.index.manifest
        began = datetime.datetime.fromtimestamp(manifest.began, datetime.UTC)
        return {
            "corpus": str(self.corpus.directory),
            "fingerprint": self.corpus.fingerprint,
            "num_blocks": self.corpus.num_blocks,
            "checkpoint_step": self.checkpoint,
            "index_step": manifest.step,
            "index_attempt": manifest.attempt,
            "index_began": began.isoformat(timespec="seconds"),
            "index_age_seconds": round(max(0.0, time.time() - manifest.began), 1),
        }


@dataclasses.dataclass(frozen=True)
class Reply:
    """An answer with its question, what of that was read, and the corpus's version."""

    question: str
    read_as: str
    answer: Answer
    version: Version
    seconds: float

    @property
    def note(self) -> str:
        """A note where the question was truncated, "" if it was not."""
        if self.read_as == self.question:
            return ""
        length = self.version.answerer.lengths.query - 2
        return (
            f"The model reads {length} wordpieces of a question; this one is longer "
            f"and was read up to “… {self.read_as[-40:].partition(' ')[2]}”."
        )

    def describe(self) -> dict[str, Any]:
        """Returns the reply as JSON values."""
        return {
            "question": self.question,
            "note": self.note,
            "answer": self.answer.text,
            "marginal": self.answer.probability,
            "documents": [document.as_json() for document in self.answer.documents],
            "version": self.version.describe(),
            "seconds": round(self.seconds, 3),
        }


def require_question(question: Any) -> str:
    """Returns a question without surrounding white space."""
    if not isinstance(question, str) or not question.strip():
        # repr() of a value from JSON may exceed the recursion limit.
        raise BadInputError(
            "expected a question, a text that is not empty, got "
            f"{reprlib.repr(question)}"
        )
    question = question.strip()
    try:
        question.encode()
    except UnicodeEncodeError as error:
        raise BadInputError(
            f"expected a question in valid Unicode, got a lone surrogate at character "
            f"{error.start}; send UTF-8"
        ) from error
    if len(question) > MAX_CHARACTERS:
        raise BadInputError(
            f"expected a question of at most {MAX_CHARACTERS:,} characters, got "
            f"{len(question):,}; shorten it"
        )
    return question


class AnswerService:
    """Answers from the newest version of a corpus.

    A context manager: inside the context a thread compiles for questions of any length,
    and follows newer versions. Outside of it the service answers from the version that
    it has, and a question compiles what it is the first to run.
    """

    def __init__(
        self,
        config: AskConfig,
        stop: threading.Event,
        note: Callable[[str], None] = lambda text: None,
    ):
        """Opens the model and the newest version of its corpus.

        `stop` ends following and the making of an index, and is also set at the end of
        the context. `note` is called from any thread with a sentence on the version
        being made or used.
        """
        self._config = config
        self._stop = stop
        self._note = note
        self._problem = ""
        corpus = BlockStore.open(config.corpus)
        self._model = open_model(config, corpus)
        newest = newest_version(config.corpus)
        if newest.resolve() != Path(config.corpus).resolve():
            corpus = BlockStore.open(newest)
        self._version = self._open(corpus)
        self._indexes = self._follow_indexes(self._version)
        self._thread = threading.Thread(
            target=self._follow, name="version-follower", daemon=True
        )

    @property
    def version(self) -> Version:
        """The version that answers at present."""
        return self._version

    @property
    def problem(self) -> str:
        """The reason why a newer version is not used, "" if there is none."""
        refused = list(self._indexes.refused.values())
        return self._problem or (refused[-1] if refused else "")

    def answer(self, question: str) -> Reply:
        """Answers one question; not thread-safe."""
        question, version = require_question(question), self._version
        began = time.monotonic()
        if has_mask(question):
            (answer,) = self._filler(version).answer([question])
            read_as = question
        else:
            (answer,) = version.answerer.answer([question])
            read_as = version.answerer.part_that_fits(question)
        return Reply(question, read_as, answer, version, time.monotonic() - began)

    def __enter__(self) -> "AnswerService":
        self._indexes.start()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # The making of an index stops after the current shard.
        self._stop.set()
        self._thread.join()
        self._indexes.stop()

    def _filler(self, version: Version) -> MaskFiller:
        """Returns the pre-trained model, which searches the index of a version.

        Fine-tuning has left the document tower of that index as it was.
        """
        if self._model.refreshed:
            raise BadInputError(
                "expected a question, got a sentence with [MASK]: fine-tuning has "
                "refreshed the index, which is no longer that of the pre-trained model "
                "that fills in; ask a question"
            )
        run, answerer = self._pretrained, version.answerer
        models = described_models(
            run.trained.model, Lengths(**run.trained.lengths), **run.trained.numerics
        )
        retriever = models.retriever_config(answerer.corpus.vocabulary.size)
        return MaskFiller(
            retriever=retriever,
            params=run.tree,
            corpus=answerer.corpus,
            searcher=answerer.searcher,
            lengths=models.lengths,
            batch_size=1,
            reader=models.knowledge_encoder(retriever.bert),
            num_candidates=answerer.num_read + 1,
        )

    @functools.cached_property
    def _pretrained(self) -> FinishedRun:
        """What fills in masks; read when the first one comes."""
        config = self._config
        model_dir = config.fills_masks or config.pretrained
        if not model_dir:
            raise BadInputError(
                "expected a question, got a sentence with [MASK], which the "
                "pre-trained model fills in, and there is none; give --pretrained "
                "FOLDER, or ask a question"
            )
        corpus = self._version.corpus
        wanted = {"vocabulary_fingerprint": corpus.vocabulary.fingerprint}
        which = Which(config.pretrained_checkpoint)
        return open_finished(model_dir, PRETRAIN.name, wanted, which)

    def _open(self, corpus: BlockStore) -> Version:
        """Loads or makes the index of a corpus, and answers from it."""
        if not self._model.has_index(corpus):
            self._note(f"making the index of {corpus.directory}")
        index, words = self._model.index(corpus, self._stop), None
        if self._config.hybrid:
            self._note(f"counting the words of {corpus.num_blocks:,} blocks")
            words = BM25Index(corpus)
        return self._warm(corpus, index, words)

    def _warm(
        self, corpus: BlockStore, index: LoadedIndex, words: BM25Index | None
    ) -> Version:
        answerer = self._model.corpus_search(corpus, index, batch_size=1)
        answerer = dataclasses.replace(answerer, words=words)
        answerer.answer([_WARM_UP])
        return Version(answerer, index, self._model.run.step)

    def _follow(self) -> None:
        # What a version has been asked is compiled, other lengths here. Of a newer
        # version nothing but the search has other shapes.
        self._version.answerer.compile(self._stop)
        while not self._stop.wait(self._config.poll_seconds):
            try:
                newer = self._newer()
            except StoppedError:
                return
            except (BadInputError, OSError) as error:
                # The present version continues to answer; the problem is logged once.
                if str(error) != self._problem:
                    _log.warning("no newer version: %s", error)
                self._problem = str(error)
            except Exception as error:
                self._problem = f"following has ended: {error!r}"
                _log.exception("following has ended; this version keeps answering")
                return
            else:
                self._problem = ""
                if newer is not None:
                    self._version = newer
                    self._note(f"answering from {_name(newer)} now")

    def _newer(self) -> Version | None:
        """Returns a later corpus with its index, or a later index, or None."""
        corpus = self._version.corpus
        newest = newest_version(corpus.directory)
        if newest.resolve() != corpus.directory.resolve():
            version = self._open(BlockStore.open(newest))
            self._indexes.stop()
            self._indexes = self._follow_indexes(version).start()
            return version
        index = self._indexes.take()
        if index is None:
            return None
        return self._warm(corpus, index, self._version.answerer.words)

    def _follow_indexes(self, version: Version) -> IndexFollower:
        """Returns a follower of this corpus's indexes, newer than the one in use."""
        source = self._model.source(version.corpus)
        made_by = version.index.manifest.metadata.get(DOCUMENT_CRC32C)

        def require_same_tower(manifest: Manifest) -> None:
            if manifest.metadata.get(DOCUMENT_CRC32C) != made_by:
                raise MismatchedSnapshotError(
                    "expected an index of the document tower that this model was "
                    f"trained with, got one of another tower at step {manifest.step}; "
                    "ask the model that it belongs to."
                )

        return IndexFollower(
            source.series,
            source.load_manifest,
            check=require_same_tower,
            poll_seconds=self._config.poll_seconds,
            newer_than=version.index.manifest.step,
        )


def _name(version: Version) -> str:
    step = version.index.manifest.step
    return (
        f"{version.corpus.directory} ({version.corpus.fingerprint[:12]}, "
        f"{version.corpus.num_blocks:,} blocks), index made {made_at(step)}"
    )


def open_model(
    config: AskConfig, corpus: BlockStore, recorded: RecordedRun | None = None
) -> FinetunedModel:
    """Reads the model that is asked, and the one it began with where that is named.

    `corpus` is the one that it was fine-tuned on, or any other of its vocabulary if the
    configuration allows a mismatch; `recorded` the fine-tuned run if it is open
    already.
    """
    pretrained_run = None
    if config.pretrained:
        wanted = wanted_of(config.finetuned.models, corpus, allow_corpus_mismatch=True)
        del wanted["lengths"]  # Pre-training may have had others.
        which = Which(config.pretrained_checkpoint)
        run = open_finished(config.pretrained, PRETRAIN.name, wanted, which)
        # Its reader need not stay in memory.
        retriever = {"retriever": run.tree["retriever"]}
        pretrained_run = dataclasses.replace(run, tree=retriever)
    return FinetunedModel.open(
        config.finetuned,
        corpus,
        searcher=config.searcher,
        embed=config.embed,
        allow_corpus_mismatch=config.allow_corpus_mismatch,
        pretrained_run=pretrained_run,
        checkpoint=Which(config.finetuned_checkpoint),
        recorded=recorded,
    )
