"""Direct preference optimisation, TRL's against weft's: tokens of pairs, loss, rewards and gradients of one batch.

    python benchmarks/dpo_trl.py FOLDER        (in an environment with weft and trl)

Both read the same pairs of messages with the same tokenizer, the same weights as the policy and other ones as the
reference. TRL's figures are those of its DPOTrainer: its data preparation, collator and loss.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from chats import FAMILIES, make_chat_tokenizer, make_chats

PAIRS, LENGTH, MOST = 32, 512, 1e-6
# name: TRL's arguments, and the keys of [objective]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sigmoid": ({"loss_type": ["sigmoid"], "beta": 0.1}, {"beta": 0.1}),
    "ipo": ({"loss_type": ["ipo"], "beta": 0.3}, {"loss": "ipo", "beta": 0.3}),
    "sigmoid per token": ({"loss_type": ["sigmoid_norm"], "beta": 2.0}, {"beta": 2.0, "per_token": True}),
}


def pairs_of(count: int) -> list[dict[str, Any]]:
    """The last assistant turn of a chat, and another chat's in its place."""
    chats = [chat["messages"] for chat in make_chats(2 * count, seed=3, has_tools=False)]
    return [
        {"prompt": one[:-1], "chosen": one[-1:], "rejected": [{"role": "assistant", "content": other[-1]["content"]}]}
        for one, other in zip(chats[::2], chats[1::2], strict=True)
        if one[-1]["role"] == other[-1]["role"] == "assistant" and one[-1] != other[-1]
    ]


def models(vocab_size: int) -> tuple[Any, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        made.append(LlamaForCausalLM(config))
    return made[0], made[1]


def of_trl(folder: Path, rows: list[dict[str, Any]], where: Path, given: dict[str, Any]) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(where)
    tokenizer.pad_token = tokenizer.eos_token
    policy, reference = models(len(tokenizer))
    arguments = DPOConfig(
        output_dir=str(folder / "out"), max_length=None, report_to=[], use_cpu=True, bf16=False,
        gradient_checkpointing=False, **given,
    )  # fmt: skip
    trainer = DPOTrainer(
        model=policy, ref_model=reference, args=arguments, train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )  # fmt: skip
    batch = trainer.data_collator(list(trainer.train_dataset))
    trainer.model.train()
    loss = trainer._compute_loss(trainer.model, batch, return_outputs=False)
    loss.backward()
    names = ("input_ids", "attention_mask", "completion_mask")
    ids, present, counted = (batch[name] for name in names)
    order = [row + side * len(rows) for row in range(len(rows)) for side in (0, 1)]
    return {
        "tokens": [ids[row][present[row] > 0].tolist() for row in order],
        "counted": [counted[row][present[row] > 0].tolist() for row in order],
        "loss": loss.item(),
        "gradients": {name: value.grad for name, value in policy.named_parameters()},
        "margin": sum(trainer._metrics["train"]["rewards/margins"]),
    }


def of_weft(folder: Path, rows: list[dict[str, Any]], where: Path, keys: dict[str, Any]) -> dict[str, Any]:
    import weft
    from weft.core.data_spec import DataSpec
    from weft.core.objective_spec import ObjectiveSpec
    from weft.data import Loader, open_corpus
    from weft.data.rows import RowLayout
    from weft.engine.preference import REFERENCE, objective_of
    from weft.engine.reference import row_log_probs

    source = folder / "pairs.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSpec(
        source=str(source), format="preference", tokenizer=str(where), sequence_length=LENGTH, truncation="error",
        eval_fraction=0.0,
    )  # fmt: skip
    corpus = open_corpus(data)
    loader = Loader(corpus.training, seed=0, global_batch=len(rows), layout=RowLayout.of(data), epochs=1, shuffle=False)
    batch = loader.batch(0)
    policy, reference = models(corpus.vocab_size)
    spec = ObjectiveSpec(kind="dpo", **keys)
    one = weft.Engine(reference, weft.Plan(), objective=objective_of(spec), device="cpu")
    batch[REFERENCE] = row_log_probs(one, batch)
    engine = weft.Engine(policy, weft.Plan(), objective=objective_of(spec), device="cpu", clip_norm=0.0)
    gradients: dict[str, torch.Tensor] = {}
    engine.on_gradients = lambda found: gradients.update({name: value.clone() for name, value in found.items()})
    record = engine.step(batch)
    tokens, counted = [], []
    for piece in range(2 * len(rows)):
        ids, labels = batch["input_ids"][piece], batch["labels"][piece]
        last = int((labels != -100).nonzero().max())
        tokens.append([*ids[: last + 1].tolist(), int(labels[last])])
        counted.append([0, *(labels[: last + 1] != -100).long().tolist()])
    return {
        "tokens": tokens, "counted": counted, "loss": record.loss, "gradients": gradients,
        "margin": (record.figures or {})["reward_margin"],
    }  # fmt: skip


def main() -> int:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    rows, is_equal = pairs_of(PAIRS), True
    print("| template | loss | pairs | answers that differ | TRL | weft | loss differs by | gradient by |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for family in FAMILIES:
        where = make_chat_tokenizer(folder / family, family, has_marks=False)
        for name, (arguments, keys) in CASES.items():
            theirs, own = of_trl(folder, rows, where, arguments), of_weft(folder, rows, where, keys)
            kinds = [zip(own[key], theirs[key], strict=True) for key in ("tokens", "counted")]
            wrong = sum(a != b for kind in kinds for a, b in kind)
            largest = max(value.abs().max() for value in theirs["gradients"].values())
            apart = max((own["gradients"][key] - value).abs().max() for key, value in theirs["gradients"].items())
            loss = abs(own["loss"] - theirs["loss"]) / max(1.0, abs(theirs["loss"]))
            if name == "sigmoid":  # of the losses per token TRL reports rewards of sums
                is_equal &= abs(own["margin"] - theirs["margin"]) <= MOST
            share = float(apart / largest)
            print(
                f"| {family} | {name} | {len(rows)} | {wrong} | {theirs['loss']:.7f} | {own['loss']:.7f} | {loss:.1e}"
                f" | {share:.1e} |"
            )
            is_equal &= wrong == 0 and loss <= MOST
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
