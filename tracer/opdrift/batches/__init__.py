"""Follow which dim of each tensor carries the batch, and record a fingerprint of each sample.

`seeds` says where the batch is in what a model is called with; `tracking` carries that through the ops,
one row of `rules` an op; `rows` writes what `Trace.sample` and `Trace.batch_of` read. Decision 8 says
why it is built like this.
"""
