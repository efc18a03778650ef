"""Readers of the published Open-QA sets, from their files or from TFDS.

`formats` reads files, `sources` finds them, `sets` defines the sets and their splits.
"""
