"""The tiny test bed: captioned scenes, their checker, and the training of a small Janus on them."""
