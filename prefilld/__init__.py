"""The daemon that turns prompts into KV cache and a first token."""
