"""The tree of a workspace, reached by descriptors, and where its state is kept."""
