"""The two systems of vTrain's table, from what its authors published with it (Bang et al., vTrain, 2024,
github.com/VIA-Research/vTrain at f8dda84).

Rows of several nodes are measured iterations. Those of one node are not, down to the last digit:

    rows that differ in                          differ by                     as in src/predictor.py
    micro-batches alone, m = 2, 4, 8, 16         exactly 2, 4, 8 slopes        layers profiled once, added up m times
    replicas alone, 2, 4, 8                      what all sizes of micro-      `compute_comm_time`: by table, and
                                                 batches share                 without 2 (n - 1) / n from 1 GiB on

So they are what the authors' simulator makes of traces of one layer on one A100, and an error against them is the
distance between two predictions. It adds up the traces of all layers, gaps between kernels included, with two
all-reduces after each layer's forward and backward (`create_layer_graph`): nothing is launched ahead of a layer or
behind a collective. Plans say that as `overlap="serial"`. Traces are of one iteration each: of equal numbers of kernels
they take 60 to 110 ms for 24 layers, which no price follows.

That is why the plan that is ranked first takes 5 % longer than the best. The rows rest on 32 traces, each of a hidden
size, a tensor degree and a number of samples, which prices miss by 11 % (standard deviation). Two of them make 3.6
points of that regret: of hidden size 2048, two samples on two tensor devices, and on four, faster than one sample.
What was tried, with the constants chosen by one hidden size and judged on the other, or on all:

    launches ahead by what the head's backward, before the only traced layer's, leaves the host      regret 5.5 to 6.5 %
    no launch ahead of a kernel at all; gradients that are not added up; slower kernels or hosts     regret 4.6 to 6.2 %
    twice the collectives of layers: either size alone prefers that to once, and the traces' mean
    error falls from 8.4 to 6.2 %; but nothing published says why, and the 95th percentile of all
    rows rises from 17 to 23 %, so it is not taken                                                   regret 3.2 %

Only the traces matter for the ranking. If gradients are reduced as the simulator does it, in one all-reduce that takes
bytes over bus bandwidth from 1 GiB on, rows with eight replicas of hidden size 2048 fall from 12 to 5 % above the
table, and the regret is 5.2 %; with its sends as well (twice the bytes at 26.8 GB per second, exposed) it is 5.4 %.
The traced seconds of a layer, without all-reduces, follow from rows that differ in micro-batches and stages alone:

    hidden size             1024                     2048
    samples                 1     2     4            1     2     4
    1 tensor device         3.0   3.2   5.1 ms       3.3   4.8   8.8 ms
    2                       3.2   3.4   2.9          3.2   4.3   5.8
    4                       3.3   3.1   3.6          2.7   2.3   4.3

Of hidden size 2048, a second sample takes a third more time on two devices, and less time on four. A price that grows
with the work on a device cannot do both.

Two more facts follow from the figures; the table states neither:

Nothing runs again. Hidden size 2048 with 8 samples on each of two replicas takes 0.46 s a micro-batch. Four passes, one
of them again, would be 200 TFLOP/s with unfused attention, 290 for the products alone, more than any measured on an
A100 (271); three are 150. The same authors' measured runs of several nodes reach 143, counted with four passes.

The card has 40 GB. Fused Adam moves 22 bytes a parameter at up to 1.27 TB/s in the rows of hidden size 1024: 0.82 of
1555 GB/s, which is what `A100-40` has, but 0.62 of the 2039 of `A100-80`.
"""

from __future__ import annotations

import dataclasses

from cost_models.hardware.device_specs import device_spec
from cost_models.hardware.networks import network

TRACED_HOST = 2.8
"""Times that the traced host takes as long as `launches.HOST_COSTS`, where an A100's usual host has 1.84: fitted to the
rows of one node with hidden size 1024 and one stage, by mean error in steps of 0.15 (2.65: 6.6 %, 2.8: 5.3 %, 2.95:
6.3 %). Recording every call of the driver takes the host time."""

TRACED_A100 = dataclasses.replace(
    device_spec("A100-40"), name="A100 of 40 GB under a tracer", memory=80e9, host=TRACED_HOST
)
"""Memory enough for every row: none of these steps ran as a whole."""

NVLINK = dataclasses.replace(
    network("NVLink3"),
    name="NVLink3 of vTrain",
    latency=2.5e-6,
    efficiency=0.675,
    ramp=0.0,
    start=35e-6,
    sources=dict.fromkeys(
        ("latency", "efficiency", "ramp", "start"),
        "fitted to the authors' nccl-tests of all-reduce (trace/a100/AR_GPU2, 4 and 8_1M_1024M_LUT), at powers of "
        "two from 1 to 256 MiB; 7 % off on average, at most 18 %",
    ),
)

HDR = dataclasses.replace(
    network("HDR"),
    name="4xHDR",
    line_rate=100e9,
    shared=True,
    sources={"line_rate": "800 Gbit/s a node: the header of the table"},
)
