"""Models: their shape, their files, their tokens.

`spec`, `vocabulary`, `catalog`, `fetch`, `gguf_file` and `gguf_model` never import torch, so the
command line may use them; `weights`, `loader` and the forward pass do.
"""
