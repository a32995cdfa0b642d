"""Frozen autoregressive image models behind one contract, :class:`~ssd_train.backbones.base.Backbone`: prompts and
tokens go in, states before the final norm, logits and pixels come out. One family a file."""
