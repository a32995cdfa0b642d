"""Frozen autoregressive image models behind one contract, :class:`~ssd_train.backbones.base.Backbone`: prompts and
tokens go in, states before the final norm, logits and pixels come out. One family a file.

How to add one
--------------
One file and one yaml. tests/example_backbone.py does it in under 100 lines for a model that is not listed, a Llama that
draws in the manner of LlamaGen; the tests put it through all that they put the others through.

1. Subclass :class:`~ssd_train.backbones.base.Backbone` and hand its `__init__` the transformers model, its decoder
   stack (whose final norm is taken out, so that it returns the states before it), the image head, the input embeddings
   of the image tokens and the grid. Are image tokens rows of the text vocabulary, with an end-of-line token after each
   row? Subclass :class:`~ssd_train.backbones.shared_vocabulary.SharedVocabulary` instead.
2. Prompts: `encode_prompts` gives the ids of both contexts, conditional and unconditional, up to the token whose state
   predicts image token 0. `PromptBatch.collate` pads them on the left; positions and attention follow by themselves.
3. Pixels: `decode_pixels` and `encode_pixels`. A model without them raises FileNotFoundError saying what is missing,
   and all but the pictures works.
4. The yardstick: `reference_logits` is the model's own forward pass, uncached. The cache stage compares `readout(H)`
   with it before it stores anything: states taken after the norm, or shifted by one position, are caught there.
5. Loading: a classmethod, here `load`, that takes what the yaml names, and `name` and `device`. `local_folder` and
   `require_complete` in checkpoints.py make it strict and its errors clear; `numerics` there checks
   dtype and attention.
6. Size, optional: a classmethod `sketch` that builds the same with random weights from an `architecture`. With it,
   `stages=[plan]` tells what a run needs, and a run that cannot fit is refused before anything is loaded.

Then the yaml, in a folder `model` of your own, say `mine/model/llamagen.yaml`:

```yaml
name: llamagen
backbone:
  _target_: example_backbone.LlamaGen.load  # anything that Python can import
  checkpoint: path/or/hub-id
  grid: [16, 16]
  dtype: bfloat16
sampling: {guidance: 7.5, temperature: 1.0, top_k: 1000, top_p: 1.0}
prompts:
  _target_: ssd_train.prompts.DatasetPrompts
  path: prompts.txt
```

    python -m ssd_train --config-dir mine +model=llamagen
"""
