"""The history as a git repository outside of the workspace: objects, packs, commits, and the states that they have."""
