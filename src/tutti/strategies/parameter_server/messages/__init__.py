"""Parameter servers over messages: workers push gradients to servers and pull parameters."""
