"""Runs the oracle's checks in the order of cause and effect; facts of the run only are computed once.

config -> initial weights -> data -> schedule -> update by its gradients -> loss and gradients -> export
"""

from __future__ import annotations

from typing import Any

from weft.verify.oracle.adapter import IN_CODES, AdaptedPlainModel, without_factors
from weft.verify.oracle.config import asked_config, check_config
from weft.verify.oracle.documents import Beginning, NotReadAgainError, read_beginning
from weft.verify.oracle.export import check_export
from weft.verify.oracle.facts import CorpusFacts, RankShare, RunFacts, Saved, Tables
from weft.verify.oracle.initial import Statistics, check_initial, check_pretrained, draw_statistics
from weft.verify.oracle.loss import AnyStream, LossJudge
from weft.verify.oracle.mixtures import MixedStream, SourceRows
from weft.verify.oracle.model import Batch, PlainModel
from weft.verify.oracle.objectives import NextTokenFormula, objective_of
from weft.verify.oracle.pairs import PairStream
from weft.verify.oracle.rows import check_data, check_mixed
from weft.verify.oracle.samples import SampleStream
from weft.verify.oracle.schedule import check_schedule
from weft.verify.oracle.schedule_free import evaluated
from weft.verify.oracle.streams import Stream, stream_of
from weft.verify.oracle.updates import check_updates
from weft.verify.verdict import Check

EXPORTED_ROWS = 2


class Oracle:
    """Checks every plan of a session; reuses the plain model, its statistics and the documents."""

    def __init__(self) -> None:
        self._statistics: dict[str, Statistics] | None = None
        self._beginnings: dict[str, Beginning | str] = {}
        self._plain: PlainModel | None = None
        self._untrained: frozenset[str] | None = None

    def checks(self, facts: RunFacts) -> list[Check]:
        asked, loop = asked_config(facts.run["model"], facts.config), facts.loop
        if self._plain is None or self._statistics is None:
            objective = objective_of(facts.run["objective"])
            self._plain = _plain_of(asked, facts.run["adapter"], objective)
            self._statistics = draw_statistics(asked, has_scores=objective.has_scores)
        plain, corpus = self._plain, facts.corpus
        both, data = self._data(facts)
        checks = [
            check_config(asked, plain.model.config, facts.config, vocab_size=corpus.vocab_size),
            check_initial(self._statistics, without_factors(facts.initial), without_rule=facts.without_rule),
            data,
            check_schedule(facts.run, facts.rate, facts.loop_run, loop.rates),
        ]
        if facts.pretrained is not None:
            checks.append(check_pretrained(str(facts.run["model"]["path"]), facts.pretrained))
        if isinstance(plain, AdaptedPlainModel):
            checks.append(plain.check_initial(facts.initial))
        if {name for name, _ in plain.model.named_parameters()} != set(without_factors(facts.initial)):
            return checks  # a different model: later checks would only repeat that
        if not data.ok and not isinstance(both[0], Stream):
            return checks  # samples that are not of the corpus: there is nothing to judge losses by
        checks.append(self._updates(facts, plain, both[0]))
        checks.append(LossJudge(facts=facts, plain=plain, streams=both).check())
        plain.put({**facts.initial, **evaluated(_last(facts), facts.loop_run["train"])})
        batch = Batch(fields=dict(both[0].batch_at(range(min(EXPORTED_ROWS, both[0].num_rows)))))
        return [*checks, check_export(loop.export, asked, facts.run["data"], plain, batch)]

    def _updates(self, facts: RunFacts, plain: PlainModel, stream: AnyStream) -> Check:
        """Check updates. A bias of routers that the run moves without a gradient has a check of its own."""
        if self._untrained is None:
            plain.put(facts.initial)
            rows = range(min(int(facts.loop_run["train"]["global_batch"]), stream.num_rows))
            batch = plain.with_reference(Batch(fields=dict(stream.batch_at(rows))))
            self._untrained = plain.untrained(batch, chunk_rows=facts.loop.chunk_rows)
        moved = plain.frozen() if facts.loop_run["router"]["bias_rate"] else frozenset()
        saved = _last(facts).weights
        if facts.run["adapter"]["base"] in IN_CODES:  # frozen, in no checkpoint
            moved |= facts.initial.keys() - saved.keys()
        initial = {name: value for name, value in facts.initial.items() if name not in moved}
        if isinstance(plain, AdaptedPlainModel) and facts.run["adapter"]["base"] != "model":
            initial = {name: plain.at_rest(name, value, saved[name].dtype) for name, value in initial.items()}
        return check_updates(facts.loop_run["train"], initial, facts.loop, untrained=self._untrained)

    def _data(self, facts: RunFacts) -> tuple[tuple[AnyStream, AnyStream | None], Check]:
        """The rows of training and held out, and the check of the data."""
        corpus = facts.corpus
        if isinstance(corpus, CorpusFacts):
            alone = _streams(facts.run["data"], corpus)
            again = self._read_again(facts.run["data"], corpus)
            return alone, check_data(facts.run, corpus, again, alone, dp_degree=facts.dp_degree)
        each = [_streams(source.data, source.corpus) for source in corpus.sources]
        training = MixedStream(share=corpus.training, sources=[SourceRows(one) for one, _ in each])
        others = [SourceRows(one) for _, one in each if one is not None]
        held_out = None if corpus.held_out is None else MixedStream(share=corpus.held_out, sources=others)
        read = [self._read_again(source.data, source.corpus) for source in corpus.sources]
        both, unseen = (training, held_out), [one for _, one in each]
        return both, check_mixed(facts.run, corpus, read, both, unseen, dp_degree=facts.dp_degree)

    def _read_again(self, data: Tables, corpus: CorpusFacts) -> Beginning | str:
        if corpus.counted is not None:
            return "samples are checked by their own"
        key = str(data)
        if key not in self._beginnings:
            try:
                self._beginnings[key] = read_beginning(data, end_of_document=corpus.end_of_document)
            except NotReadAgainError as reason:
                self._beginnings[key] = str(reason)
        return self._beginnings[key]


def _plain_of(config: Any, adapter: Tables, objective: NextTokenFormula) -> PlainModel:
    if adapter["kind"] == "none":
        return PlainModel(config, objective)
    return AdaptedPlainModel(config, adapter, objective)


def _last(facts: RunFacts) -> Saved:
    return facts.loop.saved(max(facts.loop.saved_steps))


def _streams(data: Tables, corpus: CorpusFacts) -> tuple[Stream | SampleStream, Stream | SampleStream | None]:
    """Training and held out."""
    held_out = None if corpus.held_out is None else _stream(data, corpus, corpus.held_out)
    return _stream(data, corpus, corpus.training), held_out


def _stream(data: Tables, corpus: CorpusFacts, share: RankShare) -> Stream | SampleStream:
    if corpus.counted is not None:
        is_text = data["format"] == "text"
        return (PairStream if data["format"] == "preference" else SampleStream)(
            share=share,
            tokens=corpus.tokens,
            counted=corpus.counted,
            length=int(data["sequence_length"]),
            end=corpus.end_of_document,
            truncation=data["truncation"] or ("split" if is_text else "end"),
            is_packed=data["packing"] == "documents",
        )
    return stream_of(
        corpus.tokens, share.ranges, length=int(data["sequence_length"]), end=corpus.end_of_document,
        isolates=bool(data["isolate_documents"]),
    )  # fmt: skip
