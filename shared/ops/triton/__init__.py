"""The fast path of the ops on a GPU: Triton kernels behind the signatures of `shared.ops`.

Importing a module of this package imports triton, so only what has a GPU may; tests run the same
kernels on a CPU through Triton's interpreter.

Every kernel is safe inside a CUDA graph: grids follow from shapes, never from values on the device.
"""
