"""Whether a run has rows to evaluate: if not, an explicit request is an error, the default a warning.

One held-out row is enough: it is padded to a batch with zero-weight rows.
"""

from __future__ import annotations

from weft.core.errors import DataError
from weft.core.run_spec import RunSpec
from weft.data import Corpus, Split
from weft.data.mixture import Mixture
from weft.data.rows import RowLayout, has_pieces

_HINT = "raise data.eval_fraction, lower data.sequence_length or add documents; evaluation.every = 0 turns it off"


def why_no_evaluation(run: RunSpec, corpus: Corpus) -> str:
    """Empty if there are rows to evaluate, or none are wanted; else the reason and the keys that change it."""
    is_trainable = _has_rows(corpus.training, run)  # else the training data is the error
    reason = _missing(run, corpus) if run.evaluation.interval > 0 and is_trainable else ""
    if not reason:
        return ""
    is_asked = run.evaluation.every is not None and run.data.eval_fraction > 0
    if is_asked:
        raise DataError(f"evaluation.every = {run.evaluation.every} asks for held-out rows: {reason}", hint=_HINT)
    return f"no held-out loss: {reason}; {_HINT}"


def _missing(run: RunSpec, corpus: Corpus) -> str:
    held_out, length = corpus.evaluation, run.data.sequence_length
    if run.data.eval_fraction == 0 and run.data.evaluation:
        return ""
    if run.data.eval_fraction == 0:
        # Nothing should be held out; a warning only if evaluations are requested nevertheless.
        return "data.eval_fraction = 0 holds out no rows" if run.evaluation.every is not None else ""
    if held_out is None:
        return "0 rows are held out: the data is a single document"
    if _has_rows(held_out, run):
        return ""
    if isinstance(held_out, Mixture):
        return "0 rows of a source of data.sources are held out"
    if run.data.row_packing != "concatenate":
        return f"0 rows are held out: no sample of {held_out.num_documents} is left for data.sequence_length = {length}"
    return (
        f"0 rows are held out: {held_out.num_tokens} tokens in {held_out.num_documents} of {corpus.num_documents}"
        f" documents, but a row of data.sequence_length = {length} needs {length + 1}"
    )


def _has_rows(split: Split | Mixture, run: RunSpec) -> bool:
    """Whether there is a row, of every source; streams are only counted, since packing takes time."""
    if isinstance(split, Mixture):
        return all(_has(source.split, source.layout) for source in split.sources)
    return _has(split, RowLayout.of(run.data))


def _has(split: Split, layout: RowLayout) -> bool:
    return split.num_rows(layout.sequence_length) > 0 if layout.packing == "concatenate" else has_pieces(split, layout)
