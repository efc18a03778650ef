"""Registers an encoder of one's own: one layer, which is applied several times.

    python examples/own_encoder.py

prints how many parameters that saves (ALBERT, Lan et al. 2020). For the stages, the gin
file takes the place of gin/models/minilm_l6.gin and the like; whoever opens the model
imports this module, too:

    realm warm-start --import_module=examples.own_encoder \
        --gin_file=examples/own_encoder.gin --gin_file=gin/runs/warm_start.gin ...
    realm ask --import_module=examples.own_encoder RUN "Who founded Rome?"
"""

import dataclasses

import jax
import jax.numpy as jnp

from realm_jax.models import encoders, layers
from realm_jax.models.bert import PAD_ID, BertConfig, Encoded, Encoder, EncoderLayer


@encoders.register_encoder("shared_layers")
@dataclasses.dataclass(frozen=True)
class SharedLayersConfig(BertConfig):
    """Size and numerics; `num_layers` is how often the layer is applied."""

    def make_encoder(self, name: str | None = None) -> Encoder:
        """Returns the encoder."""
        return SharedLayers(self, name=name)


class SharedLayers(Encoder):
    """Embeddings of wordpieces and positions, and the layer."""

    def setup(self):
        """Creates the parameters."""
        config, size = self.config, self.config.hidden_size
        self.tokens = layers.Embedding(config.vocab_size, size, "vocab")
        self.positions = layers.Embedding(config.max_positions, size, "position")
        self.norm = layers.LayerNorm(config.layer_norm_epsilon)
        self.layer = EncoderLayer(config)

    def __call__(self, ids, segment_ids, deterministic=True, packed_length=None):
        """Encodes padded sequences, each in a row of its own."""
        x = self.norm(self.tokens(ids) + self.positions.first_rows(ids.shape[1]))
        attends = (ids != PAD_ID)[:, None]
        for _ in range(self.config.num_layers):
            x, _ = self.layer(x, attends, deterministic)
        return Encoded(sequence=x, pooled=x[:, 0])

    def token_logits(self, x):
        """Returns inner products with the embeddings of all wordpieces."""
        return self.tokens.attend(x)


def main() -> None:
    """Runs the example."""
    ids = jnp.ones((1, 8), jnp.int32)
    for kind in (BertConfig, SharedLayersConfig):
        encoder = kind(30522, 384, 6, 12, 1536).make_encoder()
        shapes = jax.eval_shape(encoder.init, jax.random.key(0), ids, ids)["params"]
        total = sum(leaf.size for leaf in jax.tree.leaves(shapes))
        print(f"{kind.__name__}: {total / 1e6:.1f} M parameters")


if __name__ == "__main__":
    main()
