"""The longest rows: they fit, longer ones do not, and more context-parallel ranks reach further."""

import itertools
from dataclasses import replace

from weft.plan.ask import ask
from weft.plan.longest import PARTS, UNIT, longest_rows
from weft.plan.search import has_fitting_plan

FIXED = {"mesh.tp": 1, "mesh.pp": 1}


def test_the_answer_fits_and_longer_rows_do_not() -> None:
    question = ask("llama-3-8b", "4xH100-80GB")
    found = longest_rows(question, FIXED)
    assert [one.cp for one in found] == [1, 2, 4]
    for one in found:
        assert one.best is not None
        assert one.best.fits
        assert one.best.plan.mesh.cp == one.cp
        step = max(UNIT, one.sequence_length // PARTS)
        workload = replace(question.request.workload, global_batch=4, sequence_length=one.sequence_length + step)
        assert not has_fitting_plan(replace(question.request, workload=workload), {**FIXED, "mesh.cp": one.cp})
    lengths = [one.sequence_length for one in found]
    assert all(longer > 1.4 * shorter for shorter, longer in itertools.pairwise(lengths))


def test_a_fixed_degree_is_the_only_answer() -> None:
    (one,) = longest_rows(ask("llama-3-8b", "8xH100-80GB"), {**FIXED, "mesh.cp": 4}, global_batch=2)
    assert (one.cp, one.global_batch) == (4, 2)


def test_where_nothing_fits_there_is_no_answer() -> None:
    (one,) = longest_rows(ask("llama-3-70b", "1xT4"), {})
    assert (one.sequence_length, one.best) == (0, None)
    assert one.as_dict()["best"] is None
