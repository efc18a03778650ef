"""Readers of the published Open-QA sets, from their files or from TFDS.

`formats` reads files, `sets` defines the sets, their splits, and finds their files.
"""
