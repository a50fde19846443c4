"""The GP of SNGP: random features, likelihoods, the precision of the output weights, and the head made of them."""
