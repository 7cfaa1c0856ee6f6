"""A module of your own, trained by `weft.train` on two ranks: run folder, report, checkpoints, resume."""

import torch
from torch import nn

import weft


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(257, 32)
        self.blocks = nn.ModuleList(nn.GRU(32, 32, batch_first=True) for _ in range(2))
        self.head = nn.Linear(32, 257)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)[0]
        return self.head(x)


def build():
    torch.manual_seed(0)
    return Recurrent()


if __name__ == "__main__":
    run = weft.RunSpec.from_tables(
        {
            "model": {"type": "llama"},  # replaced by model=
            "data": {"tokenizer": "bytes", "sequence_length": 64},
            "train": {"steps": 4, "global_batch": 8, "learning_rate": 1e-2},
        }
    )
    plan = weft.Plan.from_tables({"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 2}})
    ledger = weft.train(run, plan, model=build, out="runs/own-model")
    print(ledger["run"]["status"], ledger["run"]["final_loss"])
