"""Engines: what generates and what trains. `base` is the contract; `fake`, `hf` and `vllm` fulfil it."""
