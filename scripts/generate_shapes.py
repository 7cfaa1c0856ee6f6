"""Write src/weft/zoo/data/shapes/*.json: the shapes of all named models, as the installed transformers builds them.

Run it after a change of src/weft/models/shape or of the catalogue: python scripts/generate_shapes.py [NAME ...]
tests/unit/zoo/test_generated.py compares.
"""

from __future__ import annotations

import json
import sys

from rich.progress import track

from weft.core.shape_json import shape_to_json
from weft.models.shape.lookup import shape_from_type
from weft.zoo.catalogue import config_of, entries, shapes_file


def main() -> None:
    wanted = set(sys.argv[1:])
    for file, models in track(entries().items(), description="files"):
        target = shapes_file(file)
        written = json.loads(target.read_text(encoding="utf-8")) if target.exists() else {}
        for name, entry in models.items():
            if not wanted or name in wanted:
                shape = shape_from_type(str(entry["type"]), config_of(entry), name=name)
                written[name] = shape_to_json(shape)
        target.parent.mkdir(exist_ok=True)
        kept = {name: written[name] for name in models if name in written}
        lines = (f"{json.dumps(name)}: {json.dumps(table)}" for name, table in kept.items())
        target.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
