"""Checkpoints of torchtitan, Megatron-LM and DeepSpeed, and any of torch's DCP, as Hugging Face folders."""
