"""Runs steps of a model over a KV pool: batches, the runner, the engine thread, a local engine."""
