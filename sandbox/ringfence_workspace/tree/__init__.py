"""The tree of a workspace, reached by descriptors; where its state is kept, and who has it open."""
