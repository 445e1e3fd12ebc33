"""Blocks of a model's code under a grad mode or an autocast of their own (`with torch.no_grad():`).

torch.export makes one operator of each. `inlined` takes it apart, so that stages and shards divide it; `casts` finds
the casts that stand for autocast. What must stay whole becomes a call of `calls`.
"""
