"""Models repeat: a transformer's twelve layers are one layer twelve times. Equal layers are handled once.

`equality` is the one notion of "equal" here. Three uses, from the model to its measured costs:

    trace_once      equal modules of a model: trace the first, copy its nodes for the others
    fold            equal layers of a captured graph: choose strategies for one, hold them for all
    measure_once    equal operators of a captured graph: measure a few, share the seconds

They need different things of an operator's inputs. Layers of a graph must be wired alike, so `fold` compares where an
input comes from; the cost of an operator depends on sizes alone, so `measure_once` compares only the inputs' shapes.
Each passes its comparison of inputs to `equality`, which compares everything else.
"""
