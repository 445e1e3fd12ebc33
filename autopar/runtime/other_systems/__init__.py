"""Training steps by other systems, to compare plans with: each file runs one of them.

    plain.py           the model itself, with all threads that torch has; nn.DataParallel
    independent.py     the ceiling: a process a device, each with its part of the batch, which exchange nothing
    data_parallel.py   DistributedDataParallel
    gpipe.py           torchgpipe
    pipelining.py      torch.distributed.pipelining, all of its schedules

`catalogue.py` knows them by name; `processes.py` and `rank.py` are the processes that some of them need.
"""
