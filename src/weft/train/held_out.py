"""Whether a run can be evaluated: a request that cannot be met is an error, a default that cannot is a warning.

One held-out row is enough: it is padded to a batch with rows of no weight.
"""

from __future__ import annotations

from weft.core.errors import DataError
from weft.core.run_spec import RunSpec
from weft.data import Corpus

_HINT = "raise data.eval_fraction, lower data.sequence_length or give more documents; evaluation.every = 0 is never"


def why_no_evaluation(run: RunSpec, corpus: Corpus) -> str:
    """Empty where there are rows to evaluate, or none are wanted; else what is missing and which key changes it."""
    is_trainable = corpus.training.num_rows(run.data.sequence_length) > 0  # else the training data is the error
    reason = _missing(run, corpus) if run.evaluation.interval > 0 and is_trainable else ""
    if not reason:
        return ""
    is_asked = run.evaluation.every is not None and run.data.eval_fraction > 0
    if is_asked:
        raise DataError(f"evaluation.every = {run.evaluation.every} asks for held-out rows: {reason}", hint=_HINT)
    return f"no held-out loss: {reason}; {_HINT}"


def _missing(run: RunSpec, corpus: Corpus) -> str:
    held_out, length = corpus.evaluation, run.data.sequence_length
    if run.data.eval_fraction == 0:
        # Nothing was to be held out; worth a word only to who asks for evaluations all the same.
        return "data.eval_fraction = 0 holds out no rows" if run.evaluation.every is not None else ""
    if held_out is None:
        return "0 rows are held out, since the data is a single document"
    if held_out.num_rows(length) > 0:
        return ""
    return (
        f"0 rows are held out: {held_out.num_tokens} tokens in {held_out.num_documents} of {corpus.num_documents}"
        f" documents, and a row of data.sequence_length = {length} needs {length + 1}"
    )
