"""One rank of any world on fake tensors and a fake process group: what it would need and send, without devices."""
