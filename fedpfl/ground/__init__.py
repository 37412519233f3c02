"""Trees of tensors, errors, files, run locks and identities: the modules all rooms import."""
