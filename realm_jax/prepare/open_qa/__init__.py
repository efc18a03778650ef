"""The published Open-QA sets, read from the files and the TFDS datasets they come in.

`formats` reads files, `sources` finds them, `sets` knows the sets and how they are
split.
"""
