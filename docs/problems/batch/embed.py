"""Embed a sentence alone, and the same sentence in a batch of three, padded."""

import torch
from torch import nn

import opdrift


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.project = nn.Linear(32, 16)

    def forward(self, tokens):
        padding = tokens == 0
        x = self.layer(self.embed(tokens), src_key_padding_mask=padding)
        return self.project(x.mean(dim=1))


torch.manual_seed(0)
model = Encoder().eval()
sentences = [torch.randint(1, 100, (n,)) for n in (9, 5, 7)]
lengths = torch.tensor([len(s) for s in sentences])
batch = nn.utils.rnn.pad_sequence(sentences, batch_first=True)

with torch.no_grad():
    with opdrift.record("alone.trace", model=model, batch=opdrift.Batch(1)):
        alone = model(sentences[1][None])
    with opdrift.record("batch.trace", model=model, batch=opdrift.Batch(3, lengths=lengths)):
        together = model(batch)
print("alone", *(f"{x:+.3f}" for x in alone[0, :4]))
print("batch", *(f"{x:+.3f}" for x in together[1, :4]))
