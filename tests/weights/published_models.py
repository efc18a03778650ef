"""Unpacks the models that `bench/peers/realm_models.py` has written."""

import pathlib
import tarfile

ARCHIVE = pathlib.Path(__file__).with_name("realm_models.tar.xz")


def unpacked(root: pathlib.Path) -> pathlib.Path:
    """Returns a folder with a folder for each model."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(root, filter="data")
    return root
