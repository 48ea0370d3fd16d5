"""The state of one agent: typed slices, the events that change them, their log, and their snapshots."""
