"""Steps by other systems, to compare plans with.

    independent.py     the ceiling: a process a device, each with its part of the batch, which exchange nothing
    gpipe.py           torchgpipe
    pipelining.py      torch.distributed.pipelining, all of its schedules

`catalogue.py` knows all of them by name, and makes those of a few lines (the plain model, nn.DataParallel) itself;
`rank.py` and `processes.py` are what runs in the processes of some of them (DistributedDataParallel, too).
"""
