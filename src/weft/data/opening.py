"""Opens the data of a run: the corpus of its sources, a mixture of several, or the first window of a stream."""

from __future__ import annotations

from pathlib import Path

from weft.core.data_spec import DataSpec
from weft.data.building import BuildProgress
from weft.data.corpus import Corpus, open_corpus_of
from weft.data.mixture import MixedSource, Mixture
from weft.data.rows import RowLayout
from weft.data.sources import open_sources
from weft.data.split import Split
from weft.data.streaming import open_first_window


def open_corpus(
    spec: DataSpec, *, cache_dir: str | Path | None = None, progress: BuildProgress | None = None
) -> Corpus:
    """The corpus of `spec`, built first if it is not cached, by this process or by another."""
    if spec.sources:
        return _mixed(spec, [open_corpus(part, cache_dir=cache_dir, progress=progress) for part in spec.parts])
    if spec.streaming:
        return open_first_window(spec, cache_dir=cache_dir, progress=progress)
    return open_corpus_of(open_sources(spec), spec, cache_dir=cache_dir, progress=progress)


def _mixed(spec: DataSpec, corpora: list[Corpus]) -> Corpus:
    """One corpus of several."""

    def mix(splits: list[Split | Mixture | None]) -> Mixture:
        given = zip(spec.sources, spec.parts, splits, strict=True)
        mixed = tuple(
            MixedSource(str(source.source), split, RowLayout.of(part), source.weight)
            for source, part, split in given
            if isinstance(split, Split)
        )
        return Mixture(mixed, by_tokens=spec.weigh_by == "tokens")

    held_out = mix([corpus.evaluation for corpus in corpora])
    return Corpus(
        training=mix([corpus.training for corpus in corpora]),
        evaluation=held_out if held_out.sources else None,
        vocab_size=corpora[0].vocab_size,
        end_of_document=corpora[0].end_of_document,
        num_documents=sum(corpus.num_documents for corpus in corpora),
        num_tokens=sum(corpus.num_tokens for corpus in corpora),
        path=corpora[0].path,
    )
