"""`DataSpec`: the `[data]` section of a run: its sources, its evaluation sets, and how rows are made of them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationError, model_validator

from weft.core.config import Section
from weft.core.loop_spec import HELD_OUT

DataFormat = Literal["text", "chat", "prompt-completion", "preference"]
Packing = Literal["none", "concatenate", "documents"]
Truncation = Literal["end", "start", "drop", "error", "split"]
Turns = Literal["assistant", "all", "last"]


class OtherSource(Section):
    """A source beside data.source; keys that are left out are those of [data]."""

    source: str | list[str] = Field(description="as data.source")
    format: DataFormat | None = Field(default=None, description="as data.format")
    text_field: str | None = Field(default=None, description="as data.text_field")
    split: str | None = Field(default=None, description="as data.split")
    train_on: Turns | None = Field(default=None, description="as data.train_on")


class SourceSpec(OtherSource):
    """One source of a mixture; keys that are left out are those of [data]."""

    weight: float = Field(default=1.0, gt=0, description="share of the samples or tokens, over the sum of all weights")


class EvaluationSource(OtherSource):
    """One evaluation set; keys that are left out are those of [data]. All of its documents are evaluated on."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="its name in metrics.jsonl, the report and trackers"
    )
    batches: int | None = Field(default=None, ge=1, description="as evaluation.batches, which it is without")


class DataSpec(Section):
    """Where rows come from and how they are built."""

    source: str | list[str] = Field(
        default="python-stdlib",
        description="'python-stdlib', a file, folder or glob (.txt .py .md .jsonl .parquet), a list of them, "
        "or 'hf:NAME' for a dataset of the datasets library (a local folder or a hub name)",
    )
    sources: list[SourceSpec] = Field(
        default_factory=list,
        description="several sources in place of `source`, each with `source`, `weight`, and its own `format`, "
        "`text_field`, `split`, `train_on`",
    )
    evaluation: list[EvaluationSource] = Field(
        default_factory=list,
        description="tables [[data.evaluation]], evaluation sets beside the held-out documents, each with `name`, "
        "`source`, `batches`, and its own `format`, `text_field`, `split`, `train_on`",
    )
    weigh_by: Literal["samples", "tokens"] = Field(
        default="samples", description="what the weights of `sources` are shares of; tokens: without padding"
    )
    streaming: bool = Field(
        default=False,
        description="true: data is read and tokenised while it is trained on, for data larger than the disk",
    )
    shuffle_window: int = Field(
        default=10_000, ge=1, description="with streaming: documents that are tokenised and shuffled at a time"
    )
    tokenizer: str | None = Field(
        default=None,
        description="'bytes', or a folder, file or hub name (NAME or NAME@REVISION) of a Hugging Face tokenizer; "
        "without it the tokenizer of model.path, and 'bytes' for model.type",
    )
    sequence_length: int = Field(default=256, ge=2, description="tokens per row, at least 2")
    text_field: str = Field(default="text", description="the field of JSONL, parquet and HF rows that holds the text")
    split: str = Field(default="train", description="the split of an HF dataset")
    eval_fraction: float = Field(default=0.02, ge=0, lt=1, description="share of documents held out for evaluation")
    format: DataFormat = Field(
        default="text",
        description="text | chat (rows of `messages`, or `conversations`) | prompt-completion (rows of `prompt` and "
        "`completion`) | preference (rows of `prompt`, `chosen`, `rejected`)",
    )
    chat_template: str | None = Field(
        default=None,
        description="a file with the chat template in Jinja; without it the tokenizer's own (all formats but text)",
    )
    train_on: Literal["assistant", "all", "last"] | None = Field(
        default=None,
        description="tokens with a loss in chats: assistant (all assistant turns; the default) | last (the last "
        "assistant turn) | all",
    )
    packing: Literal["none", "concatenate", "documents"] | None = Field(
        default=None,
        description="none (a sample per row, padded with positions without a loss) | concatenate (one stream, "
        "cut into rows) | documents (whole samples packed into rows by best fit; attention and positions restart at "
        "each); absent: concatenate for text, none otherwise",
    )
    truncation: Literal["end", "start", "drop", "error", "split"] | None = Field(
        default=None,
        description="samples longer than a row, with packing none and documents: end (the end is cut off) | start | "
        "drop | error | split (into several samples); absent: split for text, end otherwise",
    )
    isolate_documents: bool = Field(
        default=False,
        description="with packing concatenate: true: attention and positions restart at every document inside a row",
    )
    balance_rows: bool = Field(
        default=True,
        description="where documents of a row do not attend to each other: true: the rows of each global batch are "
        "ordered so that ranks and micro-batches have nearly equal attention work (sum of squared document lengths); "
        "false: as drawn. The samples of a batch are the same",
    )
    epochs: int | None = Field(default=None, ge=1, description="passes over the data; absent: as many as steps need")

    @property
    def row_packing(self) -> Packing:
        return self.packing or ("concatenate" if self.format == "text" else "none")

    @property
    def row_truncation(self) -> Truncation:
        return self.truncation or ("split" if self.format == "text" else "end")

    @property
    def isolates(self) -> bool:
        """Whether rows have several documents that do not attend to each other."""
        return any(part.isolates_rows for part in [*self.parts, *self.evaluation_parts.values()])

    @property
    def isolates_rows(self) -> bool:
        """As `isolates`, of one source."""
        return self.isolate_documents or self.row_packing == "documents"

    @property
    def trains_isolated(self) -> bool:
        """As `isolates`, of the training rows."""
        return any(part.isolates_rows for part in self.parts)

    @property
    def balances(self) -> bool:
        """Whether the rows of a global batch of training are ordered by their attention work."""
        return self.balance_rows and self.trains_isolated

    @property
    def turns(self) -> Turns:
        return self.train_on or "assistant"

    @property
    def parts(self) -> list[DataSpec]:
        """The data of each source: itself if there is one."""
        return [self._part(source) for source in self.sources] or [self]

    @property
    def evaluation_parts(self) -> dict[str, DataSpec]:
        """The data of each evaluation set by name: nothing of it is held out, nothing is streamed."""
        whole = {"eval_fraction": 0.0, "streaming": False, "epochs": None}
        return {one.name: self._part(one).model_copy(update=whole) for one in self.evaluation}

    def _part(self, source: OtherSource) -> DataSpec:
        """The data of one source, without keys of [data] that are for other formats and packings."""
        keys = self.model_dump(exclude={"sources", "evaluation", "weigh_by", "source"})
        keys |= source.model_dump(include=set(OtherSource.model_fields), exclude_none=True)
        is_stream = (keys["packing"] or ("concatenate" if keys["format"] == "text" else "none")) == "concatenate"
        unused = {"truncation"} if is_stream else {"isolate_documents"}
        unused |= {"chat_template"} if keys["format"] == "text" else set()
        unused |= {"train_on"} if keys["format"] != "chat" and source.train_on is None else set()
        return DataSpec(**{key: value for key, value in keys.items() if key not in unused})

    def _require_part(self, source: OtherSource, where: str, use: str) -> None:
        try:
            part = self._part(source)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise ValueError(f"{where}: {reason}") from None
        if part.format == "preference":
            raise ValueError(f"{where}: pairs of format = 'preference' are not {use}")

    @model_validator(mode="after")
    def _sources_fit(self) -> DataSpec:
        if self.sources and self.source != "python-stdlib":
            raise ValueError("give source or sources, not both")
        if self.sources and self.streaming:
            raise ValueError("streaming is for one data.source, not for a mixture of data.sources")
        for index, source in enumerate(self.sources):
            self._require_part(source, f"sources[{index}]", "mixed")
        return self

    @model_validator(mode="after")
    def _evaluation_fits(self) -> DataSpec:
        names = [HELD_OUT, *(one.name for one in self.evaluation)]
        for index, one in enumerate(self.evaluation):
            if one.name in names[: index + 1]:
                raise ValueError(f"evaluation[{index}]: the name {one.name!r} is taken")
            self._require_part(one, f"evaluation[{index}]", "evaluated")
        return self

    @model_validator(mode="after")
    def _keys_fit(self) -> DataSpec:
        if self.sources:
            return self
        if self.isolate_documents and self.row_packing != "concatenate":
            raise ValueError(
                "isolate_documents is for packing = 'concatenate'; packing = 'documents' isolates documents"
            )
        if self.truncation is not None and self.row_packing == "concatenate":
            raise ValueError("truncation is for packing = 'none' and 'documents': a stream has no longest sample")
        if self.format == "preference" and self.row_packing != "none":
            raise ValueError("pairs of format = 'preference' are not packed: set packing = 'none'")
        if self.format == "preference" and self.truncation == "split":
            raise ValueError(
                "pairs of format = 'preference' cannot be split: set truncation to end, start, drop or error"
            )
        if self.format == "text" and self.chat_template is not None:
            raise ValueError("chat_template is for the formats chat, prompt-completion and preference")
        if self.format != "chat" and self.train_on is not None:
            raise ValueError("train_on is for format = 'chat'")
        return self
