"""Calls that run programs: what they change behind the filesystem's back is found by two scans, and brought back."""
