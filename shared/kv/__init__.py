"""The KV pool: its layout, who owns which block, who may read it, and where the bytes lie.

`layout`, `allocator` and `leases` are pure: integers in, decisions out, no torch and no clock.
`memfd` and `pool` hold the bytes, `control_page` fences readers off, `proof` shows that a
mapping is the pool it claims to be, and `pull` copies blocks from one pool to another.
"""
