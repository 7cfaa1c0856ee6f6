"""Checks before torch is imported: files, folders, tokenizers and optional libraries exist.

They open no file and download nothing; the contents are checked later.
"""

from __future__ import annotations

from pathlib import Path

from weft.core.errors import DataError
from weft.core.extras import require_extra
from weft.core.run_spec import RunSpec
from weft.core.server_spec import GENERATED, ServerRun


def require_inputs(run: RunSpec) -> None:
    """Check that data, tokenizer and libraries of the run exist; `weft.zoo.hub` checks the model's files."""
    _require_data(run)
    if run.train.optimizer == "adamw8bit":
        require_extra("torchao")
    for tracker in run.track.kind:
        require_extra(tracker)


def require_server_inputs(run: ServerRun, *, is_resumed: bool) -> None:
    """As `require_inputs`; a resumed run has its data in its folder."""
    require_extra("numba")
    if run.server.launcher == "ray":
        require_extra("ray")
    sources = [run.data.source] if isinstance(run.data.source, str) else run.data.source
    for path in map(Path, () if is_resumed or run.data.source == GENERATED else sources):
        if not path.is_file():
            raise DataError(
                f"there is no file {path}", hint="data.source is 'clicks' or paths of CSV, TSV, parquet files"
            )
        if path.suffix == ".parquet":
            require_extra("pyarrow")


def _require_data(run: RunSpec) -> None:
    from weft.data.dataset_source import DatasetSource
    from weft.data.sources import FileSource, open_sources
    from weft.data.tokenizers import open_tokenizer

    for source in (
        source for part in [*run.data.parts, *run.data.evaluation_parts.values()] for source in open_sources(part)
    ):
        if isinstance(source, DatasetSource):
            require_extra("datasets")
            source.require_folder()
        elif isinstance(source, FileSource) and any(file.suffix.lower() == ".parquet" for file in source.files):
            require_extra("pyarrow")
    if run.tokenizer != run.model.path:  # weft.data reports a model without a tokenizer
        open_tokenizer(run.tokenizer)
