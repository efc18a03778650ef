"""Makes the schema beside it from JobSet's CustomResourceDefinition, in YAML.

    python -m tests.tpu_launch.schemas.make_schema jobset.x-k8s.io_jobsets.yaml

The file is config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml of
https://github.com/kubernetes-sigs/jobset at the tag in `VERSION`. What `golden/` never
has is left out, and so refused: the API server, asked for strict validation, refuses
what the whole schema lacks. Of a Job's template it says nothing, for Kubernetes' client
has models of that.
"""

import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import yaml

VERSION = "v0.12.0"
FILE = pathlib.Path(__file__).with_name("jobset.json")

_KEPT = {"enum", "items", "maximum", "minimum", "pattern", "required", "type"}


def strict(schema: dict[str, Any], values: Sequence[Any]) -> dict[str, Any]:
    """Returns a schema, without descriptions, that allows only what the values have."""
    kept: dict[str, Any] = {key: schema[key] for key in schema.keys() & _KEPT}
    if "items" in kept:
        kept["items"] = strict(
            kept["items"], [one for value in values for one in value]
        )
    if "properties" in schema:
        kept["properties"] = {
            key: strict(described, [value[key] for value in values if key in value])
            for key, described in schema["properties"].items()
            if any(key in value for value in values)
        }
        kept["additionalProperties"] = False
    return kept


if __name__ == "__main__":
    definition = yaml.safe_load(pathlib.Path(sys.argv[1]).read_text())
    (version,) = definition["spec"]["versions"]
    whole = version["schema"]["openAPIV3Schema"]
    jobs = whole["properties"]["spec"]["properties"]["replicatedJobs"]["items"]
    jobs["properties"]["template"] = {"type": "object"}
    golden = FILE.parents[1].joinpath("golden").glob("*.yaml")
    written = [yaml.safe_load(path.read_text()) for path in sorted(golden)]
    source = f"kubernetes-sigs/jobset {VERSION}, (c) The Kubernetes Authors, Apache-2.0"
    made = {"$comment": source, **strict(whole, written)}
    FILE.write_text(json.dumps(made, sort_keys=True, indent=1) + "\n")
