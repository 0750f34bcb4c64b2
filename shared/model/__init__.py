"""Models: their shape, their files, their tokens.

Two kinds of files are read, GGUF (`gguf_*`, `weights`) and Hugging Face directories (`hub_*`); both
come out as one `spec` and as tensors under the names that `tensors` lists.

`spec`, `tensors`, `vocabulary`, `catalog`, `fetch`, `describe` and what they read never import
torch, so the command line may use them; `weights`, `hub_weights`, `loader` and the forward pass do.
"""
