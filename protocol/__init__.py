"""The wire: what both daemons and every client agree on.  No torch, no configuration, no clock."""
