"""All-reduces of GPU tensors: torch's NCCL and Gloo process groups, built without torch's default group."""
