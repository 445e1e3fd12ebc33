"""The report of a plan: what it is, what it costs, why, and how sure that is. `build.py` puts it together."""
