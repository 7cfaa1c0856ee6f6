"""Tokens and loss masks of chats, TRL's against weft's: 1,000 chats with each of four templates.

    python benchmarks/sft_masks.py trl FOLDER        (in an environment with trl; writes FOLDER/trl.json)
    python benchmarks/sft_masks.py weft FOLDER       (in weft's; compares, and prints a table)
    python benchmarks/sft_masks.py golden FOLDER     (in the first: writes the small file that a test compares with)

TRL's labels are those that its SFTTrainer gives to the model: its data preparation and its collator, with
assistant_only_loss. weft computes the mask from the marks of the template, and without marks from prefixes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS / "support"))
from chats import FAMILIES, make_chat_tokenizer, make_chats  # noqa: E402

CHATS, GOLDEN_CHATS, SEED = 1000, 6, 11
GOLDEN = TESTS / "unit" / "data" / "trl_masks.json"
IGNORED = -100


def chats_of(family: str, count: int) -> list[dict[str, Any]]:
    return make_chats(count, seed=SEED, has_tools=family == "chatml")


def trl_samples(folder: Path, count: int) -> dict[str, list[dict[str, list[int]]]]:
    from datasets import Dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    found = {}
    for family in FAMILIES:
        where = make_chat_tokenizer(folder / family, family, has_marks=True)
        tokenizer = AutoTokenizer.from_pretrained(where)
        tokenizer.pad_token = tokenizer.eos_token
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        rows = Dataset.from_list([{"tools": None, **chat} for chat in chats_of(family, count)])
        trainer = SFTTrainer(
            model=LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)),
            args=SFTConfig(
                output_dir=str(folder / "out"), assistant_only_loss=True, max_length=None, report_to=[], use_cpu=True,
                bf16=False, eos_token=tokenizer.eos_token,
            ),
            train_dataset=rows,
            processing_class=tokenizer,
        )  # fmt: skip
        samples = []
        for row in trainer.train_dataset:
            batch = trainer.data_collator([row])
            samples.append({key: batch[key][0].tolist() for key in ("input_ids", "labels")})
        found[family] = samples
    return found


def weft_samples(folder: Path, family: str, count: int, *, has_marks: bool) -> list[dict[str, list[int]]]:
    import numpy as np

    from weft.core.data_spec import DataSpec
    from weft.data.row_fields import SampleRow
    from weft.data.samples import SampleEncoder
    from weft.data.words import counted_of, tokens_of

    where = make_chat_tokenizer(folder / f"{family}-{has_marks}", family, has_marks=has_marks)
    encoder = SampleEncoder(DataSpec(format="chat", tokenizer=str(where)))
    rows = [SampleRow(where=f"row {at}", fields=chat).to_text() for at, chat in enumerate(chats_of(family, count))]
    samples = []
    for words in encoder.encode_batch(rows):
        tokens, counted = tokens_of(words, words.dtype), counted_of(words, words.dtype)
        samples.append({"input_ids": tokens.tolist(), "labels": np.where(counted, tokens, IGNORED).tolist()})
    return samples


def compare(folder: Path) -> bool:
    theirs = json.loads((folder / "trl.json").read_text())
    is_equal = True
    print("| template | mask from | chats | tokens | tokens with a loss | chats that differ |")
    print("| --- | --- | --- | --- | --- | --- |")
    for family in FAMILIES:
        for has_marks in (True, False):
            own = weft_samples(folder, family, len(theirs[family]), has_marks=has_marks)
            wrong = sum(a != b for a, b in zip(own, theirs[family], strict=True))
            tokens = sum(len(sample["input_ids"]) for sample in own)
            counted = sum(label != IGNORED for sample in own for label in sample["labels"])
            how = "marks" if has_marks else "prefixes"
            print(f"| {family} | {how} | {len(own):,} | {tokens:,} | {counted:,} | {wrong} |")
            is_equal &= wrong == 0
    return is_equal


def main() -> int:
    what, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    if what == "weft":
        return 0 if compare(folder) else 1
    if what == "trl":
        (folder / "trl.json").write_text(json.dumps(trl_samples(folder, CHATS)))
        return 0
    import trl

    samples = trl_samples(folder, GOLDEN_CHATS)
    GOLDEN.write_text(json.dumps({"trl": trl.__version__, "samples": samples}, separators=(",", ":")) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
