"""Hosts by name: the proxy that is a command's only way out, and what it lets through."""
