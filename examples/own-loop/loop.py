"""A training loop of your own around `weft.Engine`: the same script on one process and under torchrun."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import weft

process = weft.join(device_type="cpu")
torch.manual_seed(0)
config = LlamaConfig(vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
plan = weft.Plan.from_tables({"mesh": {"dp_shard": process.world_size}, "data_parallel": {"zero": 3}})
engine = weft.Engine(AutoModelForCausalLM.from_config(config), plan, optimizer="adamw", device="cpu")

draw = torch.Generator().manual_seed(0)
for _ in range(5):
    tokens = torch.randint(0, 256, (8, 33), generator=draw)
    batch = engine.share_of({"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]})
    record = engine.step(batch, learning_rate=1e-3)
    if process.is_main:
        print(f"step {record.step}: loss {record.loss:.4f}, gradient norm {record.grad_norm:.4f}")

out = f"runs/{process.world_size}-ranks"
engine.save(f"{out}/checkpoints")
engine.export(f"{out}/model")
weft.leave()
