"""Makes the schema beside it from JobSet's CustomResourceDefinition, in YAML.

    python tests/tpu_launch/schemas/make_schema.py jobset.x-k8s.io_jobsets.yaml

The file is config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml of
https://github.com/kubernetes-sigs/jobset at the tag in `VERSION`. What is left out is
never written by us, and refused here: the API server, asked for strict validation,
refuses what the whole schema lacks.
"""

import json
import pathlib
import sys
from typing import Any

import yaml

VERSION = "v0.12.0"
FILE = pathlib.Path(__file__).with_name("jobset.json")

_KEPT = {"enum", "items", "maximum", "minimum", "pattern", "required", "type"}
# Of what has many more; the names are the ends of paths.
_WANTED = {
    "spec": {
        *("failurePolicy", "network", "replicatedJobs", "startupPolicy", "suspend"),
        *("successPolicy", "ttlSecondsAfterFinished"),
    },
    "template.spec": {
        *("activeDeadlineSeconds", "backoffLimit", "backoffLimitPerIndex"),
        *("completionMode", "completions", "maxFailedIndexes", "parallelism"),
        *("podFailurePolicy", "podReplacementPolicy", "template"),
    },
    "containers": {
        *("args", "command", "env", "image", "name", "ports", "resources"),
        *("securityContext", "volumeMounts", "workingDir"),
    },
    "env": {"name", "value", "valueFrom"},
    "valueFrom": {"fieldRef"},
    "securityContext": {"capabilities"},
    "resources": {"limits", "requests"},
    "volumes": {"emptyDir", "name"},
    "spec.template.spec": {
        *("containers", "dnsPolicy", "hostNetwork", "initContainers", "nodeSelector"),
        *("priorityClassName", "restartPolicy", "serviceAccountName", "tolerations"),
        *("terminationGracePeriodSeconds", "volumes"),
    },
}
_WANTED["initContainers"] = _WANTED["containers"]


def strict(schema: dict[str, Any], path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns a schema without descriptions that allows no other properties."""
    kept: dict[str, Any] = {key: schema[key] for key in schema.keys() & _KEPT}
    if "items" in kept:
        kept["items"] = strict(kept["items"], path)
    if schema.get("x-kubernetes-int-or-string"):
        kept["type"] = ["integer", "string"]
    if "properties" in schema:
        ends = [".".join(path[-length:]) for length in (3, 2, 1)]
        wanted = next((_WANTED[end] for end in ends if end in _WANTED), None)
        kept["properties"] = {
            key: strict(value, (*path, key))
            for key, value in schema["properties"].items()
            if wanted is None or key in wanted
        }
        kept["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), dict):
        kept["additionalProperties"] = strict(schema["additionalProperties"], path)
    return kept


if __name__ == "__main__":
    definition = yaml.safe_load(pathlib.Path(sys.argv[1]).read_text())
    (version,) = definition["spec"]["versions"]
    whole = version["schema"]["openAPIV3Schema"]
    whole["properties"].pop("status")
    source = f"kubernetes-sigs/jobset {VERSION}, (c) The Kubernetes Authors, Apache-2.0"
    made = {"$comment": source, **strict(whole)}
    FILE.write_text(json.dumps(made, sort_keys=True, indent=1) + "\n")
