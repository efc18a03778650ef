"""Files of JSON lines."""

import bz2
import gzip
import json
import pathlib


def write_lines(path, records):
    """Writes records, packed as the suffix says; returns the path as a text."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"{json.dumps(one, ensure_ascii=False)}\n" for one in records)
    packers = {".gz": gzip.compress, ".bz2": bz2.compress}
    path.write_bytes(packers.get(path.suffix, bytes)(lines.encode()))
    return str(path)
