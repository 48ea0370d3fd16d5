"""The image of one project: its locks, the artefacts that they name, and what is built from them."""
