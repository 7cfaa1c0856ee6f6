"""Fields and types of the published custom resources, as compact data, and a strict check of a manifest against them.

    python tests/support/kubernetes_schemas.py jobset.x-k8s.io_jobsets.yaml ...     writes kubernetes_schemas.json

A server drops unknown fields silently; here they are problems. The form of a type:

    {"field": type, "!required": type}    {"*": type} a map    [type] a list    "#3" a shared type
    "string", "integer >=0", "string Always|Never", "int|str" a number or a quantity, "any"
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_suffix(".json")
SOURCES = {
    "JobSet": "kubernetes-sigs/jobset v0.12.0, config/components/crd/bases",
    "TrainJob": "kubeflow/trainer v2.3.0, manifests/base/crds",
    "TrainingRuntime": "kubeflow/trainer v2.3.0, manifests/base/crds",
}
_SHARED_FROM = 120  # characters of a type that is worth a name
_KINDS = {"string": str, "integer": int, "number": (int, float), "boolean": bool}


def compact(schema: dict[str, Any]) -> Any:
    """The type of a CRD's schema, without texts and defaults."""
    kind = schema.get("type", "any")
    if schema.get("x-kubernetes-int-or-string"):
        return "int|str"
    if kind == "object" and "properties" in schema:
        required = schema.get("required", ())
        fields = schema["properties"].items()
        return {("!" if name in required else "") + name: compact(field) for name, field in fields}
    if kind == "object":
        inside = schema.get("additionalProperties")
        return {"*": compact(inside)} if isinstance(inside, dict) else "any"
    if kind == "array":
        return [compact(schema["items"])]
    choices = f" {'|'.join(map(str, schema['enum']))}" if "enum" in schema else ""
    return kind + choices + (f" >={schema['minimum']}" if "minimum" in schema else "")


def shared(kinds: dict[str, Any]) -> dict[str, Any]:
    """The same with repeated types under "#N"."""
    count: dict[str, int] = {}
    names: dict[str, str] = {}
    types: dict[str, Any] = {}

    def tally(one: Any) -> None:
        if isinstance(one, dict | list):
            text = json.dumps(one)
            count[text] = count.get(text, 0) + 1
            if count[text] == 1:
                for inner in one.values() if isinstance(one, dict) else one:
                    tally(inner)

    def rename(one: Any) -> Any:
        if not isinstance(one, dict | list):
            return one
        text = json.dumps(one)
        if text in names:
            return names[text]
        found = {key: rename(inner) for key, inner in one.items()} if isinstance(one, dict) else [rename(one[0])]
        if count[text] < 2 or len(text) < _SHARED_FROM:
            return found
        names[text] = f"#{len(types)}"
        types[names[text]] = found
        return names[text]

    for one in kinds.values():
        tally(one)
    return {**{kind: rename(one) for kind, one in kinds.items()}, **types}


def problems(manifest: Any, kind: str) -> list[str]:
    """Unknown and missing fields, wrong types and values; each with its path."""
    types = json.loads(DATA.read_text(encoding="utf-8"))["types"]
    found: list[str] = []

    def look(value: Any, type_: Any, path: str) -> None:
        if isinstance(type_, str) and type_.startswith("#"):
            look(value, types[type_], path)
        elif isinstance(type_, dict):
            if not isinstance(value, dict):
                found.append(f"{path}: not a table")
                return
            fields = {name.removeprefix("!"): inner for name, inner in type_.items()}
            found.extend(f"{path}: {name[1:]} is missing" for name in type_ if name[0] == "!" and name[1:] not in value)
            for name, inner in value.items():
                if name in fields or "*" in fields:
                    look(inner, fields.get(name, fields.get("*")), f"{path}.{name}")
                else:
                    found.append(f"{path}: unknown field {name}")
        elif isinstance(type_, list):
            if not isinstance(value, list):
                found.append(f"{path}: not a list")
                return
            for place, inner in enumerate(value):
                look(inner, type_[0], f"{path}[{place}]")
        else:
            found.extend(_plain_problem(value, type_, path))

    look(manifest, types[kind], kind)
    return found


def _plain_problem(value: Any, type_: str, path: str) -> list[str]:
    if type_ == "any":
        return []
    if type_ == "int|str":
        is_right = isinstance(value, int | str) and not isinstance(value, bool)
        return [] if is_right else [f"{path}: not a number or text"]
    kind, *limits = type_.split(" ")
    if not isinstance(value, _KINDS[kind]) or (kind != "boolean" and isinstance(value, bool)):
        return [f"{path}: {value!r} is not a {kind}"]
    for limit in limits:
        if limit.startswith(">="):
            if value < float(limit[2:]):
                return [f"{path}: {value} is below {limit[2:]}"]
        elif str(value) not in limit.split("|"):
            return [f"{path}: {value!r} is none of {limit}"]
    return []


def main() -> None:
    import yaml

    kinds = {}
    for path in sys.argv[1:]:
        crd = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        [version] = [one for one in crd["spec"]["versions"] if one["served"]]
        found = compact(version["schema"]["openAPIV3Schema"])
        found["metadata"] = {"!name": "string", "namespace": "string", "labels": {"*": "string"}}
        found["metadata"]["annotations"] = {"*": "string"}
        found.pop("status", None)
        kinds[crd["spec"]["names"]["kind"]] = found
    lines = [f" {json.dumps(name)}: {json.dumps(one)}" for name, one in shared(kinds).items()]
    sources = json.dumps(SOURCES)
    text = ",\n".join(lines)
    DATA.write_text(f'{{"sources": {sources}, "types": {{\n{text}\n}}}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
