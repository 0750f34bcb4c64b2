"""The numeric steps of a forward pass, each a function of tensors with a written contract.

What stands here is the torch implementation: it runs on the CPU, and it is the reference for any
faster one, which must have the same signature.  Ops know nothing of models, requests or pools.
"""
