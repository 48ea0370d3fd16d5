"""Transactions over the files of one workspace on disk."""
