"""The daemon that turns a prompt's KV cache into the rest of the answer."""
