"""What the kernels share: the KV pool's rules."""
