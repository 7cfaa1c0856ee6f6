"""A training script as users write them, without weft; `--bug` plants one mistake. Tests run it."""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--parallel", choices=["ddp", "fsdp", "fsdp1", "manual"], default="ddp")
parser.add_argument("--bug", default="")
parser.add_argument("--optimizer", default="AdamW")
parser.add_argument("--autocast", action="store_true")
parser.add_argument("--share", action="store_true")  # a fixed global batch, of which a rank takes its share
options = parser.parse_args()

if not dist.is_initialized():
    dist.init_process_group("gloo")
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if options.bug == "no seed":
    torch.seed()
else:
    torch.manual_seed(rank if options.bug == "seed by rank" else 0)

layers = [nn.Embedding(32, 16), nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 8)]
if options.bug == "batch norm":
    layers.insert(3, nn.BatchNorm1d(32))
module: nn.Module = nn.Sequential(*layers)
drawn = torch.Generator().manual_seed(7)
data = TensorDataset(torch.randint(0, 32, (64, 4), generator=drawn), torch.randint(0, 8, (64,), generator=drawn))
model = module
if options.parallel == "ddp":
    model = DistributedDataParallel(module)
elif options.parallel == "fsdp1":
    model = FullyShardedDataParallel(module, device_id=torch.device("cpu"))
elif options.parallel == "fsdp":
    fully_shard(module[2])
    model = fully_shard(module)
sampler = None
if options.bug != "no sampler" and not options.share:
    sampler = DistributedSampler(data, seed=rank if options.bug == "own order" else 0)
batch = 8 if options.share else 4
loader = DataLoader(data, batch_size=batch, sampler=sampler)
optimizer = getattr(torch.optim, options.optimizer)(model.parameters(), lr=1e-2)
for _ in range(2):
    for step, (inputs, labels) in enumerate(loader):
        if options.share:
            inputs, labels = inputs[rank::ranks], labels[rank::ranks]
        is_alone = options.bug == "no sync" or (options.bug == "no sync later" and step == 1)
        no_sync = model.no_sync() if is_alone else nullcontext()
        with torch.autocast("cpu", enabled=options.autocast), no_sync:
            losses = nn.functional.cross_entropy(model(inputs).float(), labels, reduction="none")
        if options.bug == "mean of means":
            kept = losses[labels < 5]
            loss = kept.sum() / max(1, len(kept))
        else:
            loss = losses.sum() / len(labels)
        if options.bug == "divided twice":
            loss = loss / ranks
        optimizer.zero_grad()
        loss.backward()
        if options.parallel == "manual":
            for parameter in model.parameters():
                if parameter.grad is not None and options.bug != "no all-reduce":
                    dist.all_reduce(parameter.grad)
                    if options.bug != "not divided":
                        parameter.grad /= ranks
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        print(f"rank {rank}: {loss.item():.4f}")
