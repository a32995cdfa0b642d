"""The trained predictors: states and embeddings go in, predicted states come out; and the folder that they are exported
to and loaded from."""
