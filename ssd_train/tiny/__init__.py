"""The small backbone that ships: captioned scenes, their checker, and the training of a small Janus on them."""
