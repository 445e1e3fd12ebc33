"""The inter-operator search: pipeline stages, their device groups and replicas."""
