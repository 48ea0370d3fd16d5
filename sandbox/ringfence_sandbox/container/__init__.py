"""The container of a sandbox: how it is made and shut in, and how commands reach it."""
