"""One exact projection of tensors, without modules: keep k elements over all ranks."""
