"""Retrieval-augmented language-model pre-training (REALM) in JAX."""
