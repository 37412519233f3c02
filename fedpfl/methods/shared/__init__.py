"""What several methods share: the contract, minibatches, scores, sub-models and families."""
