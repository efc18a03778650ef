"""Search and answers over a corpus, by a model that is trained already."""
