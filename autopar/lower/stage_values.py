r"""Which values every stage makes, reads, receives and sends.

```
   program:  x -> a -> b -> c -> out      stages {a: 0, b: 0, c: 1}
                   \-----------^

   stage 0   needs x, a, b         sends b, a       (1) an operator is needed where it runs, (2) with all that it reads;
   stage 1   needs a, b, c         sends c          (3) what a stage needs of another one, that one sends
```
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from autopar.analysis.operators import compute_nodes, replicable_nodes
from autopar.capture.node_names import describe
from autopar.capture.program import Program
from autopar.errors import PlanError


@dataclass(frozen=True)
class StageValues:
    """The values of all stages, by number of the stage."""

    home: Mapping[fx.Node, int]  # the stage that makes a value; what is missing, every stage has or makes itself
    needed: tuple[frozenset[fx.Node], ...]
    sent: tuple[tuple[fx.Node, ...], ...]  # in program order; the last stage also sends the model's results

    def received(self, stage: int) -> Iterator[tuple[int, int, fx.Node]]:
        """(stage that sends it, position in what it sends, value)."""
        for source in range(stage):
            for position, node in enumerate(self.sent[source]):
                if node in self.needed[stage]:
                    yield source, position, node


def stage_values(program: Program, stage_of: Mapping[fx.Node, int], results: list[fx.Node]) -> StageValues:
    """`results`: what the model returns, with each value once. Raises PlanError for values that flow backwards."""
    graph = program.graph
    replicable = replicable_nodes(program)
    home = {node: stage_of[node] for node in compute_nodes(graph) if node not in replicable}
    n_stages = max(home.values(), default=0) + 1
    needed: list[set[fx.Node]] = [set() for _ in range(n_stages)]

    def need(node: fx.Node, stage: int) -> None:
        if node in needed[stage]:
            return
        needed[stage].add(node)
        maker = home.get(node)
        if maker is None:
            for source in node.all_input_nodes:
                need(source, stage)
        elif maker > stage:
            raise PlanError(
                f"stage {stage} reads {describe(node)}, which stage {maker} makes: values only flow to later stages; "
                f"put it on stage {stage} or earlier"
            )

    for node, stage in home.items():
        needed[stage].add(node)  # (1)
        for source in node.all_input_nodes:
            need(source, stage)  # (2)
    for result in results:
        need(result, n_stages - 1)
    sent: list[list[fx.Node]] = [[] for _ in range(n_stages)]
    for node, stage in home.items():
        if any(node in needed[other] for other in range(n_stages) if other != stage):
            sent[stage].append(node)  # (3)
    sent[-1] += [result for result in results if result not in sent[-1]]
    return StageValues(home, tuple(map(frozenset, needed)), tuple(map(tuple, sent)))
