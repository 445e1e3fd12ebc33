"""Pipeline schedules as data: one list of forwards and backwards per device, in the order in which it runs them.

Stages are numbered 0, 1, 2, ... in the order of data flow. A device is a *slot* of the schedule, a row of its table.
One or more slots serve a stage; each of them runs its share of the micro-batches:

    replicas (2, 1)      rank 0               rank 1                 micro-batch i of a stage runs on the slot
                         slot 0: i even       slot 2: every i        placement[stage][i mod replicas[stage]]
                         slot 1: i odd

    replicas (1, 1),     rank 0               rank 1                 rank g of p serves the stages
    chunks 2             slot 0: stages 0, 2  slot 1: stages 1, 3    g, g + p, g + 2p, ...; under zb-v g, 2p - 1 - g

The schedules, as `print(schedule)` draws them: a row a slot, named `stage.replica`, on a clock where every action takes
one unit. F1 is the forward of micro-batch 1, B1 its backward. A backward may be split: I1 computes the gradients of the
stage's inputs, for which the stage before waits, and W1 those of its parameters. Where slots serve several stages, F2.1
is the forward of stage 2, micro-batch 1.

gpipe (Huang et al. 2019): all forwards, then all backwards; holds all micro-batches.

    0.0 | F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3
    1.0 | .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 ..
    2.0 | .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. ..

1f1b (Narayanan et al. 2021): backwards as soon as they can be; on equal stages as long as gpipe, but stage s of p holds
p - s micro-batches at most.

    0.0 | F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
    1.0 | .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
    2.0 | .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

interleaved-1f1b (same paper): v smaller stages a device, so that the pipeline fills v times as fast; more transfers,
and more micro-batches in flight.

    0+2.0 | F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 .... B2.2 .... B2.3 B0.2 B0.3
    1+3.0 | .... F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3 ....

zb-h1 (Qi et al. 2024): 1f1b whose later stages delay their W, up to p micro-batches in flight, so that the last I
reaches the first stage sooner; 3m + p - 1 units, against 3 (m + p - 1) of 1f1b, whose B takes two.

    0.0 | F0 F1 F2 .. .. I0 W0 F3 I1 W1 I2 W2 I3 W3
    1.0 | .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    2.0 | .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

interleaved-zb (both papers): interleaved-1f1b whose later ranks delay their W, until they hold as much as the first
rank; 3mv + p - 1 units of a stage, where zb-h1 with stages v times as large takes v (3m + p - 1).

    0+2.0 | F0.0 F0.1 F2.0 F2.1 F0.2 I2.0 W2.0 I2.1 W2.1 F2.2 I0.0 W0.0 I0.1 W0.1 I2.2 W2.2 .... I0.2 W0.2
    1+3.0 | .... F1.0 F1.1 F3.0 I3.0 F3.1 I3.1 F1.2 I1.0 W3.0 I1.1 W3.1 F3.2 I3.2 W1.0 W1.1 I1.2 W3.2 W1.2

zb-v (Qi et al. 2024): two stages a device, which go along the ranks and back, so that the last rank turns micro-batches
round without a transfer and the first one has the first and the last stage; 6m + p - 1 units of a stage, and no rank
holds more than the first one under 1f1b.

    0+3.0 | F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 I0.0 W0.0 F3.2 I3.2 W3.2 I0.1 W0.1 I0.2 W0.2 ....
    1+2.0 | .... F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 F1.2 I1.0 W1.0 F2.2 I2.1 W2.1 I1.1 I2.2 I1.2 W1.1 W2.2 W1.2
"""
