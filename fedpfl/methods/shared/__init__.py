"""What several methods are made of: the contract, minibatches, scores, sub-models, families with a
base.
"""
