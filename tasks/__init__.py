"""SeqIO registrations of corpora and questions; thin wrappers around realm_jax.data.

Nothing is imported here: `tasks.corpora` and `tasks.questions` import TensorFlow, which
takes seconds, and `tasks.vital_articles` does without.
"""
