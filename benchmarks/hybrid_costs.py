"""What the stages of a plan take on one device: passes of a micro-batch, sends, the end of a step, and bytes held."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from autopar.schedule.builders import in_flight_limit, interleaved_in_flight_limit
from benchmarks.hybrid_layers import Arithmetic, Transformer, embedding_work, head_work, layer_work
from benchmarks.hybrid_plan import Job, Pass, Seconds, Split
from benchmarks.hybrid_tape import Work
from cost_models import Group, collective_seconds, efficiency_of, rates_of
from cost_models.collectives.formulas import Collective
from cost_models.hardware.device_specs import DeviceSpec
from cost_models.kernels.roofline import kernel_seconds
from cost_models.memory.training_memory import TrainingMemory, training_memory


@dataclass(frozen=True)
class Works:
    """One micro-batch in each part of a model, on one tensor rank: what is done, and forward, backward and repeated
    kernels in seconds."""

    layer: Work
    embedding: Work
    head: Work
    seconds: dict[str, tuple[float, float, float]]  # by the names of the three


@dataclass(frozen=True)
class Stages:
    """What one device does for the stages of a pipeline, first to last."""

    passes: tuple[Pass, ...]  # of a micro-batch
    finishes: tuple[Seconds, ...]  # once a step
    sends: tuple[float, ...]  # s, from each stage to the next

    def bound(self, split: Split, m: int) -> float:
        """Seconds below which no order of m micro-batches gets: a rank's own actions, and before its first and after
        its last those of one micro-batch on the ranks ahead of it.

        O(stages).
        """
        best = ahead = 0.0
        for rank in range(split.pipeline):
            own = range(rank, len(self.passes), split.pipeline)
            busy = sum(m * self.passes[s].both.total for s in own)
            finish = max(self.finishes[s].total for s in own)
            best = max(best, ahead + busy + finish)
            if rank < split.pipeline - 1:
                ahead += self.passes[rank].both.total + 2 * self.sends[rank]
        return best


def stages_of(job: Job, split: Split) -> Stages:
    n = split.pipeline * split.chunks
    layer, embedding, head = _passes(job, split)
    passes = [layer.times(job.model.layers / n)] * n
    passes[0] += embedding
    passes[-1] += head
    arriving = Seconds({"transfers": _regather(job, split)})
    for s in range(n):
        passes[s] += Pass(arriving if s else Seconds(), arriving if s < n - 1 else Seconds())
    finishes = tuple(_finish(job, split, s, n) for s in range(n))
    return Stages(tuple(passes), finishes, tuple(_send(job, split, s) for s in range(n - 1)))


@cache
def _works(model: Transformer, how: Arithmetic, spec: DeviceSpec, tensor: int, samples: int) -> Works:
    rates, efficiency = rates_of(spec), efficiency_of(spec)
    made = {
        name: make(model, how, tensor, samples)
        for name, make in (("layer", layer_work), ("embedding", embedding_work), ("head", head_work))
    }

    def seconds(work: Work) -> tuple[float, float, float]:
        forward, backward, again = (
            sum(kernel_seconds(kernel, rates, efficiency) for kernel in kernels)
            for kernels in (work.forward, work.backward, work.again)
        )
        return forward, backward, again

    return Works(**made, seconds={name: seconds(work) for name, work in made.items()})


def works_of(job: Job, split: Split) -> Works:
    return _works(job.model, job.system.arithmetic, job.spec, split.tensor, split.samples)


def _passes(job: Job, split: Split) -> tuple[Pass, Pass, Pass]:
    """Of a layer, of the embedding, of the head."""
    works, tokens = works_of(job, split), job.model.seq * split.samples
    size = _boundary(job, split)
    between = job.system.arithmetic.sequence_parallel
    gather, reduce = (_tensor(job, split, name, size) for name in ("all_gather", "reduce_scatter"))
    both = gather + reduce if between else _tensor(job, split, "all_reduce", size)
    forward, _, again = works.seconds["layer"]

    layer = _pass(works, "layer", 2 * both, 2 * both)
    if split.recompute == "full":
        layer += Pass(Seconds(), Seconds({"recompute": forward, "tensor": 2 * both}))
    elif split.recompute == "selective":
        layer += Pass(Seconds(), Seconds({"recompute": again}))
    sums = 3 * _tensor(job, split, "all_reduce", 4 * tokens)  # of the loss over the vocabulary: largest, target, total
    embedding = _pass(works, "embedding", reduce if between else both, gather if between else 0.0)
    head = _pass(works, "head", sums + (gather if between else 0.0), reduce if between else both)
    parts = (layer, works.layer), (embedding, works.embedding), (head, works.head)
    done = tuple(_accumulated(job, split, _sharded(job, split, one, work), work) for one, work in parts)
    return done[0], done[1], done[2]


def _pass(works: Works, name: str, forward: float, backward: float) -> Pass:
    """Kernels, and seconds of tensor collectives beside them."""
    ahead, back, _ = works.seconds[name]
    return Pass(Seconds({"compute": ahead, "tensor": forward}), Seconds({"compute": back, "tensor": backward}))


def _accumulated(job: Job, split: Split, one: Pass, work: Work) -> Pass:
    """With gradients added to those of other micro-batches."""
    if not job.system.accumulates and split.microbatches(job.batch) == 1:
        return one
    width = job.system.arithmetic.dtype.itemsize + 2 * job.system.precision.gradient
    return one + Pass(Seconds(), Seconds({"compute": _moved(job.spec, width * work.elements)}))


def _sharded(job: Job, split: Split, one: Pass, work: Work) -> Pass:
    """With parameters gathered and gradients reduced for this micro-batch (ZeRO 2 and 3), as far as kernels do not hide
    it: the next layer is gathered while one computes.

    With ZeRO 3, what was gathered is copied from the collective's buffer to the parameters, in each pass, and gradients
    to the reduction's buffer (FSDP2: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
    """
    if split.zero < 2 or split.data == 1:
        return one
    width, gradient = job.system.arithmetic.dtype.itemsize, job.system.precision.gradient
    gather = _replicas(job, split, "all_gather", width * work.elements) if split.zero == 3 else 0.0
    reduce = _replicas(job, split, "reduce_scatter", gradient * work.elements)
    copy, copy_back = (_moved(job.spec, n * work.elements) for n in (2 * width, width + gradient))
    copies = (copy, copy + copy_back) if split.zero == 3 else (0.0, 0.0)
    forward = max(0.0, gather - one.forward.total) + copies[0]
    backward = max(0.0, gather + reduce - one.backward.total) + copies[1]
    return one + Pass(Seconds({"shards": forward}), Seconds({"shards": backward}))


def _moved(spec: DeviceSpec, nbytes: float) -> float:
    """Seconds of reading and writing so many bytes."""
    return efficiency_of(spec).memory["pointwise"].seconds(nbytes, spec.bandwidth)


def _boundary(job: Job, split: Split) -> int:
    """Bytes between two layers, of all tensor ranks."""
    return job.system.arithmetic.dtype.itemsize * job.model.seq * split.samples * job.model.hidden


def _group(job: Job, per_node: int, nodes: int) -> Group:
    return Group(per_node, nodes, job.cluster.intra_node, job.cluster.inter_node)


def _tensor(job: Job, split: Split, collective: Collective, nbytes: float) -> float:
    """Seconds among tensor ranks."""
    group = _group(job, min(split.tensor, job.node), -(-split.tensor // job.node))
    return collective_seconds(collective, nbytes, group)


def _replicas(job: Job, split: Split, collective: Collective, nbytes: float) -> float:
    """Seconds among replicas, for all tensor ranks at the same time."""
    per_node = min(split.data, max(1, job.node // split.tensor))
    group = _group(job, per_node, -(-split.data // per_node))
    return collective_seconds(collective, nbytes, group, concurrent=min(split.tensor, job.node))


def _send(job: Job, split: Split, stage: int) -> float:
    """Seconds from a stage to the next. Each tensor rank sends its part (Narayanan et al., 2021, section 4.1); the
    devices of a node send at the same time."""
    stride = split.tensor * split.data  # devices of a stage
    ends = [(s % split.pipeline) * stride // job.node for s in (stage, stage + 1)]
    across = ends[0] != ends[1]
    group = _group(job, 1, 2) if across else _group(job, 2, 1)
    nbytes = _boundary(job, split) / split.tensor
    return collective_seconds("send_recv", nbytes, group, concurrent=min(stride, job.node) if across else 1)


def _regather(job: Job, split: Split) -> float:
    """Seconds in which the tensor ranks of a stage exchange the parts that they were sent."""
    if job.system.arithmetic.sequence_parallel:
        return 0.0
    return _tensor(job, split, "all_gather", _boundary(job, split))


def _elements(job: Job, split: Split, stage: int, n: int) -> int:
    """Parameters on a device for stage `stage` of n."""
    works = works_of(job, split)
    ends = works.embedding.elements * (stage == 0) + works.head.elements * (stage == n - 1)
    if n == 1 and not job.model.gated:  # one matrix for both
        ends -= works.head.elements
    return round(works.layer.elements * job.model.layers / n) + ends


def _finish(job: Job, split: Split, stage: int, n: int) -> Seconds:
    """Of one stage, once a step."""
    elements, precision = _elements(job, split, stage, n), job.system.precision
    gradients = 0.0
    if split.zero == 0:
        gradients += _replicas(job, split, "all_reduce", precision.gradient * elements)
    if split.zero == 1:
        gradients += _replicas(job, split, "reduce_scatter", precision.gradient * elements)
    if split.zero in (1, 2):
        gradients += _replicas(job, split, "all_gather", precision.parameter * elements)
    if split.pipeline > 1 and not job.model.gated and stage in (0, n - 1):  # the matrix that embedding and head share
        both = _group(job, 1, 2) if job.cluster.nodes > 1 else _group(job, 2, 1)
        shared = precision.gradient * works_of(job, split).head.elements
        gradients += collective_seconds("all_reduce", shared, both, concurrent=min(split.tensor, job.node))
    own = elements / (split.data if split.zero else 1)
    return Seconds({"gradients": gradients, "optimizer": _moved(job.spec, job.system.optimizer_bytes * own)})


def memory_of(job: Job, split: Split) -> TrainingMemory:
    """Of the device that needs the most: the first, which has the most micro-batches in flight, or the last, which has
    the logits."""
    ranks = {0, split.pipeline - 1}
    return max((_memory(job, split, rank) for rank in ranks), key=lambda memory: memory.total)


def _memory(job: Job, split: Split, rank: int) -> TrainingMemory:
    works, precision, m = works_of(job, split), job.system.precision, split.microbatches(job.batch)
    p, n = split.pipeline, split.pipeline * split.chunks
    layers = job.model.layers / n
    if split.chunks > 1:
        in_flight = interleaved_in_flight_limit(m, p, split.chunks, rank)
    else:
        in_flight = in_flight_limit("1f1b", m, 1, p - rank, p)
    part = split.tensor if job.system.arithmetic.sequence_parallel else 1
    whole = works.layer.kept
    kept = {"none": whole, "selective": works.layer.kept_selective, "full": _boundary(job, split) // part}
    held = kept[split.recompute]
    working = whole - held if split.recompute == "selective" else whole if split.recompute == "full" else 0
    if rank == p - 1:  # in the backward of the loss the gradients of the logits, in float32 and as they were
        logits = job.model.seq * split.samples * -(-job.model.vocab // split.tensor)
        working = max(working, works.head.kept + logits * (4 + job.system.arithmetic.dtype.itemsize))
    elements = sum(_elements(job, split, s, n) for s in range(rank, n, p))
    activations = max(
        round(in_flight * layers * held) + working,
        4 * elements if precision.gradient < precision.master else 0,  # the optimizer's copy of the gradients
    )
    transient = 0
    if split.zero == 3:  # this layer and the next, one layer's gradients, and the matrices at the ends
        width = job.system.arithmetic.dtype.itemsize
        ends = works.embedding.elements + works.head.elements
        transient = (3 * width + precision.gradient) * works.layer.elements + width * ends
    return training_memory(
        [(elements,)],
        precision=precision,
        zero=split.zero,
        replicas=split.data,
        activations=activations,
        transient=transient,
        device_type="cuda",
    )
