"""Chooses the settings of a chain that starts with a published encoder."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from realm_jax.data.tokenizer_files import (
    load_vocabulary,
    read_settings,
    vocabulary_file,
)
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError
from realm_jax.weights.bert import load_bert
from realm_jax.weights.published_encoder import (
    SentenceEncoder,
    load_dense,
    prompt_pieces,
    read_sentence_encoder,
)
from realm_jax.weights.tensors import weights_file

# Where `make data` puts MiniLM's weights, below a checkout.
_MINILM = pathlib.Path(".cache/data/minilm-l6")
_CHECKOUT = pathlib.Path(__file__).parents[2]

# As gin/models/minilm_l6.gin has them.
_SIZES_OF_MINILM = {
    "hidden_size": 384,
    "num_layers": 6,
    "num_heads": 12,
    "mlp_size": 1536,
    "max_positions": 512,
    "num_segments": 2,
    "activation": "gelu",
    "layer_norm_epsilon": 1e-12,
}
# As gin/models/common.gin has it.
_PROJECTION = 128
# In wordpieces, as gin/runs/quickstart.gin has them.
_QUERY_LENGTH, _DOCUMENT_LENGTH, _JOINED_LENGTH = 64, 96, 112
# Of cosines, as most such encoders are trained with 0.01 to 0.05.
_TEMPERATURE_OF_COSINES = 0.05


@dataclasses.dataclass(frozen=True)
class EncoderStart:
    """An encoder to start with.

    Attributes:
      encoder: what the folder says of it.
      width: features of the embeddings of the chain: the encoder's own, or fewer, to
        which they are projected.
    """

    folder: str
    encoder: SentenceEncoder
    vocabulary: WordPiece
    vocabulary_file: str
    width: int

    @classmethod
    def read(
        cls,
        folder: str,
        *,
        width: int | None = None,
        query_prompt: str | None = None,
        document_prompt: str | None = None,
    ) -> "EncoderStart":
        """Reads an encoder, and its weights to try them out.

        Args:
          width: see above. None is that of the encoder, if it is a sentence encoder,
            and at most 128 if it is a bare BERT.
          query_prompt: what stands in front of a query; None is what the folder says.
          document_prompt: likewise, of a document.
        """
        file = vocabulary_file(folder)
        assert file is not None
        encoder = read_sentence_encoder(
            folder, query_prompt=query_prompt, document_prompt=document_prompt
        )
        vocabulary = load_vocabulary(file)
        if width is None:
            most = _PROJECTION if encoder.is_bare else encoder.width
            width = min(most, encoder.width)
        if not 1 <= width <= encoder.width:
            raise BadInputError(
                f"expected a --width from 1 to {encoder.width}, which the encoder in "
                f"{folder} has, got {width}; leave it out to keep the encoder's"
            )
        if encoder.is_bare and width == encoder.width:
            # By inner products of its features MiniLM retrieves far worse than by the
            # cosine: nDCG@10 of 26.1 and 37.0 on Cranfield.
            encoder = dataclasses.replace(encoder, normalize=True)
        start = cls(folder, encoder, vocabulary, str(file), width)
        start._require_lengths()
        bert = dataclasses.replace(encoder.bert, vocab_size=vocabulary.size)
        load_bert(folder, bert, needs_pooler=False)
        if encoder.dense:
            load_dense(encoder)
        return start

    def _require_lengths(self) -> None:
        bert, query, document = self.encoder.bert, self._query(), self._document()
        longest = max(
            _QUERY_LENGTH + len(query),
            _DOCUMENT_LENGTH + len(document),
            _JOINED_LENGTH,
        )
        if bert.max_positions < longest or bert.num_segments < 2:
            raise BadInputError(
                f"expected an encoder of at least {longest} positions and 2 segments "
                f"in {self.folder}, got {bert.max_positions} and {bert.num_segments}; "
                "give one that reads longer texts"
            )
        longest = _DOCUMENT_LENGTH + len(document)
        most = self.encoder.max_length
        if most is not None and most < longest:
            raise BadInputError(
                f"expected a max_seq_length of at least {longest}, for blocks of "
                f"{_DOCUMENT_LENGTH} wordpieces and a prompt, in {self.folder}, got "
                f"{most}; raise it, or give an encoder that reads longer texts"
            )

    def _query(self) -> tuple[int, ...]:
        return prompt_pieces(self.encoder.query_prompt, self.vocabulary)

    def _document(self) -> tuple[int, ...]:
        return prompt_pieces(self.encoder.document_prompt, self.vocabulary)

    @property
    def is_projected(self) -> bool:
        """Whether the chain has fewer features than the encoder."""
        return self.width < self.encoder.width

    @property
    def model(self) -> str:
        """The size of the encoder, and where it is from."""
        bert = self.encoder.bert
        return f"{bert.num_layers} layers of {bert.hidden_size}, from {self.folder}"

    @property
    def description(self) -> str:
        """How it makes embeddings, and of which width they will be."""
        bare = " (no modules.json says otherwise)" * self.encoder.is_bare
        width = (
            f"projected to {self.width} (--width={self.encoder.width} keeps them all)"
            if self.is_projected
            else "kept as wide (--width projects to fewer)"
        )
        return f"{self.encoder.description()}{bare}; {width}"

    def settings(self) -> Iterator[str]:
        """Yields the lines of a chain file that differ from those of MiniLM."""
        yield f"WEIGHTS = {self.folder!r}"
        yield f"VOCABULARY = {self.vocabulary_file!r}"
        bert = {name: getattr(self.encoder.bert, name) for name in _SIZES_OF_MINILM}
        towers = self._towers()
        if bert == _SIZES_OF_MINILM and not towers:
            return
        yield ""
        yield f"# {self.encoder.description()}"
        yield from self._macros()
        if bert != _SIZES_OF_MINILM:
            yield f"SCAN_UNROLL = {self.encoder.bert.num_layers}"
            yield "from realm_jax.models import bert"
            yield "bert.BertConfig:"
            yield from _bindings(bert)
        if towers:
            yield "from realm_jax.models import retriever"
            yield "retriever.RetrieverConfig:"
            yield from _bindings(towers)

    def _macros(self) -> Iterator[str]:
        if self.encoder.pooling != "mean":
            yield f"POOLING = {json.dumps(self.encoder.pooling)}"
        if self.encoder.normalize and not self.is_projected:
            yield f"TEMPERATURE = {_TEMPERATURE_OF_COSINES}"

    def _towers(self) -> dict[str, Any]:
        """Returns the settings of the towers that are not those of MiniLM's."""
        encoder, found = self.encoder, {}
        if self.width != _PROJECTION:
            found["projection_size"] = self.width
        if not self.is_projected:
            found["projected"] = False
        if encoder.dense:
            found["dense_size"] = encoder.dense.size
            found["dense_activation"] = encoder.dense.activation
        if encoder.normalize:
            found["normalize"] = True
        if encoder.query_prompt:
            found["query_prefix"] = self._query()
        if encoder.document_prompt:
            found["document_prefix"] = self._document()
        return found


def _bindings(settings: dict[str, Any]) -> Iterator[str]:
    for name, value in settings.items():
        yield f"    {name} = {value!r}"


def find_weights(folder: str | None) -> str:
    """Returns the weights to start from.

    Args:
      folder: a folder with weights, "" for none, None for MiniLM's if they are there.
    """
    if folder is None:
        for root in (pathlib.Path(), _CHECKOUT):
            if weights_file(str(root / _MINILM)) is not None:
                return str(root / _MINILM)
        return ""
    if folder and (weights_file(folder) is None or vocabulary_file(folder) is None):
        path = pathlib.Path(folder)
        found = sorted(one.name for one in path.iterdir()) if path.is_dir() else []
        raise BadInputError(
            f"expected weights (model.safetensors) and vocab.txt or tokenizer.json in "
            f"{folder}, got {', '.join(found[:8]) or 'nothing'}; give the folder of a "
            "published BERT, or --weights='' to start from nothing"
        )
    read_settings(folder)
    return folder
