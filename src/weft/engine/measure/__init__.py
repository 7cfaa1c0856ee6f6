"""What a step costs: memory by term, traffic, FLOPs, times, dtypes found on live tensors."""
