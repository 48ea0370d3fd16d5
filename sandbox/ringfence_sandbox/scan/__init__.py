"""What changed in a tree since somebody looked: one `lstat` a file, and a read of those that differ."""
