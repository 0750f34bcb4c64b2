"""The KV pool: its layout, who owns which block, who may read it, and where the bytes lie.

`layout`, `allocator` and `leases` are pure: integers in, decisions out, no torch and no clock.
`pool` says what a pool is; `memfd` keeps it in shared memory, `cuda_pool` and `cuda_ipc` on a GPU,
over `cuda_runtime` and `cuda_driver`, and `cuda_preflight` looks for what would not work there.
`control_page` fences readers off, `proof` shows that a mapping is the pool it claims to be, and
`pull` copies blocks from one pool to another.
"""
