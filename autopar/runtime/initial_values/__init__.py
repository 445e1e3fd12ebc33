"""Values for models that were built without them (`torch.device("meta")`): each rank gets what it holds."""
